"""Whatever is wrong at the other end, the error says so, and which command mends it."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from gpulayer.cli import make_parser
from gpulayer.errors import AuthError, ConnectError, VersionMismatchError
from gpulayer.wire import keys, reach
from gpulayer.wire.context import context
from gpulayer.wire.hello import make_hello
from gpulayer.wire.message import Kind
from gpulayer.wire.reach import Handshake, check, explain_handshake, refuses
from gpulayer.wire.rpc import Dial


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port of ours on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def unanswering_port() -> Iterator[int]:
    """A port that takes no more connections and refuses none: what a firewall that drops packets looks like."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.asynccontextmanager
async def server_that_says(banner: bytes, *, stays: bool = True, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A plain TCP server; the endpoint it listens at."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        if stays:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, host, 0)
    async with server:
        yield f"tcp://{f'[{host}]' if ':' in host else host}:{server.sockets[0].getsockname()[1]}"


def commands(text: str) -> list[str]:
    """The commands that an error tells to type."""
    return [found.strip() for found in re.findall(r"type: (gpulayer [^;(]*)", text)]


async def problem(endpoint: str, timeout_s: float = 5.0) -> str:
    with pytest.raises(ConnectError) as caught:
        await check("gpu1", endpoint, timeout_s)
    assert type(caught.value) is ConnectError
    assert caught.value.host == "gpu1"
    return str(caught.value)


# --- can it be reached at all


def test_check_passes_for_an_agents_port(run, make_site, own_folders) -> None:
    async def test() -> None:
        await check("gpu1", make_site("a").listen_tcp().dial.endpoint, 5.0)
        await check("gpu1", make_site("b").listen_ipc(own_folders / "run").dial.endpoint, 5.0)

    run(test())


def test_refused_port_says_that_nothing_listens(run, deaf_port: int) -> None:
    text = run(problem(f"tcp://127.0.0.1:{deaf_port}"))
    assert text.startswith(f"gpu1 is up, but nothing listens at tcp://127.0.0.1:{deaf_port}")
    assert commands(text) == ["gpulayer up"]


def test_refused_port_of_a_name_with_several_addresses_says_so_too(run, deaf_port: int) -> None:
    assert "is up, but nothing listens" in run(problem(f"tcp://localhost:{deaf_port}"))


def test_host_that_does_not_answer_is_told_from_one_that_refuses(run, unanswering_port: int) -> None:
    text = run(problem(f"tcp://127.0.0.1:{unanswering_port}", timeout_s=0.3))
    assert "does not answer" in text
    assert "waited 0.3 s" in text
    assert "firewall" in text


def test_unknown_name_is_told(run) -> None:
    assert run(problem("tcp://no-such-host.invalid:7770")).startswith("gpu1: no such host (")


def test_other_error_of_the_network_is_told(run) -> None:
    assert "cannot connect to tcp://255.255.255.255:7770" in run(problem("tcp://255.255.255.255:7770"))


def test_ipv6_address_is_reached(run) -> None:
    async def test() -> str:
        async with server_that_says(b"SSH-2.0", host="::1") as endpoint:
            return await problem(endpoint)

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert "it said b'SSH-2.0'" in run(test())


def test_missing_or_stale_socket_file_is_told(run, own_folders: Path) -> None:
    path = own_folders / "s.sock"
    assert "cannot connect to ipc://" in run(problem(f"ipc://{path}"))
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert "nothing listens at ipc://" in run(problem(f"ipc://{path}"))


# --- another program listens there


@pytest.mark.parametrize(
    ("banner", "shown"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "it said b'SSH-2.0-Op'"),
        (b"220 mail ESMTP\r\n", "it said b'220 mail E'"),
        (b"\x00\xff", r"it said b'\x00\xff'"),
    ],
)
def test_program_with_a_banner_is_no_agent(run, banner: bytes, shown: str) -> None:
    async def test() -> None:
        async with server_that_says(banner) as endpoint:
            text = await problem(endpoint)
            assert text.startswith(f"another program listens at {endpoint} ({shown}), not a GPUlayer agent")

    run(test())


def test_program_that_hangs_up_is_no_agent(run) -> None:
    async def test() -> None:
        async with server_that_says(b"", stays=False) as endpoint:
            assert "another program listens" in await problem(endpoint)

    run(test())


def test_program_that_waits_to_be_asked_is_no_agent(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_GREETING_WAIT_S", 0.5)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=web.serve_forever, args=(0.05,))
    thread.start()

    async def test() -> list[str]:
        async with server_that_says(b"") as silent:
            return await asyncio.gather(problem(f"tcp://127.0.0.1:{web.server_port}"), problem(silent))

    try:
        texts = run(test())
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
    assert all("(it said nothing), not a GPUlayer agent" in text for text in texts)


# --- is it gone


def test_refuses_is_true_only_where_nothing_listens(run, make_site, own_folders: Path, deaf_port: int) -> None:
    async def test() -> None:
        tcp, ipc = make_site("a").listen_tcp(), make_site("b").listen_ipc(own_folders / "run")
        for endpoint in (tcp.dial.endpoint, tcp.dial.endpoint.replace("127.0.0.1", "localhost"), ipc.dial.endpoint):
            assert await refuses(endpoint) is False
        for endpoint in (f"tcp://127.0.0.1:{deaf_port}", f"tcp://localhost:{deaf_port}", f"ipc://{own_folders}/none.sock"):
            assert await refuses(endpoint) is True

    run(test())


def test_host_that_does_not_answer_is_not_known_to_be_gone(run, unanswering_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_GREETING_WAIT_S", 0.2)
    assert run(refuses(f"tcp://127.0.0.1:{unanswering_port}")) is False
    assert run(refuses("tcp://no-such-host.invalid:7770")) is False


# --- it speaks ZeroMQ, but not with us


@pytest.mark.parametrize("failure", Handshake)
def test_each_failed_handshake_is_explained_with_commands_that_exist(failure: Handshake) -> None:
    text = explain_handshake("gpu1:7770", failure)
    assert "gpu1:7770" in text
    for command in commands(text):
        public = keys.new_pair().public
        arguments = [public if word == "PUBLIC-KEY" else word for word in shlex.split(command)[1:]]
        assert make_parser().parse_args(arguments).run


def fails(run, make_endpoint, dial: Dial, kind: type[ConnectError], timeout_s: float = 5.0) -> str:
    """The text of the error that connecting gives; the endpoint stays usable and unconnected."""

    async def test() -> str:
        endpoint = await make_endpoint()
        with pytest.raises(ConnectError) as caught:
            await endpoint.connect(dial, make_hello("driver"), timeout_s)
        assert type(caught.value) is kind
        assert caught.value.host == dial.name
        assert endpoint.channels == {}
        return str(caught.value)

    return run(test())


def test_unknown_client_key_is_told_with_both_commands(run, make_site, make_endpoint) -> None:
    site = make_site().listen_tcp()
    text = fails(run, make_endpoint, replace(site.dial, identity=keys.new_pair()), AuthError)
    assert "gpu1 does not know this machine's key" in text
    assert commands(text) == ["gpulayer keys show", "gpulayer keys add PUBLIC-KEY --role driver"]
    assert site.hellos == []


def test_wrong_server_key_is_told_with_both_commands(run, make_site, make_endpoint) -> None:
    site = make_site().listen_tcp()
    text = fails(run, make_endpoint, replace(site.dial, server_key=keys.new_pair().public), AuthError)
    assert "gpu1 does not hold the key that we expect of it" in text
    assert commands(text) == ["gpulayer keys show", "gpulayer keys trust gpu1 PUBLIC-KEY"]
    assert site.hellos == []


def test_key_that_was_added_meanwhile_lets_in(run, make_site, make_endpoint) -> None:
    site, pair = make_site().listen_tcp(), keys.new_pair()
    dial = replace(site.dial, identity=pair)
    fails(run, make_endpoint, dial, AuthError)
    keys.authorize(site.home, pair.public, "driver")

    async def test() -> None:
        endpoint = await make_endpoint()
        assert (await endpoint.connect(dial, make_hello("driver"), 5.0)).name == "gpu1"

    run(test())


def test_plain_zeromq_server_is_no_agent(run, make_endpoint) -> None:
    """What libzmq's own events say of it depends on which side gives up first, so the greeting is read before."""
    plain = context().socket(zmq.ROUTER)
    port = plain.bind_to_random_port("tcp://127.0.0.1")
    pair = keys.new_pair()
    text = fails(run, make_endpoint, Dial("gpu1", f"tcp://127.0.0.1:{port}", pair, pair.public), AuthError)
    assert text == "gpu1 speaks ZeroMQ without GPUlayer's security: another program listens on that port"
    assert not plain.poll(0)
    plain.close(0)


def test_agent_that_does_not_answer_is_told(run, make_site, make_endpoint) -> None:
    site = make_site().listen_tcp()
    site.greeting = None
    text = fails(run, make_endpoint, site.dial, ConnectError, timeout_s=0.3)
    assert "gpu1 accepted the connection but did not answer within 0.3 s" in text
    assert site.hellos[0]["kind"] == "driver"


def test_agent_of_another_version_refuses_with_a_table(run, make_site, make_endpoint) -> None:
    site = make_site().listen_tcp()
    site.greeting, site.rows = Kind.REFUSED, [["python", "3.11", "3.13"]]
    text = fails(run, make_endpoint, site.dial, VersionMismatchError)
    assert text.splitlines()[0] == "gpu1 runs versions that do not fit ours"
    assert text.splitlines()[-1].split() == ["python", "3.11", "3.13"]


def test_same_agent_under_another_name_is_told(run, make_site, make_endpoint) -> None:
    site = make_site().listen_tcp()

    async def test() -> str:
        endpoint = await make_endpoint(site)
        with pytest.raises(ConnectError) as caught:
            await endpoint.connect(replace(site.dial, name="gpu1.lab"), make_hello("driver"), 0.3)
        assert list(endpoint.channels) == [site.id]
        return str(caught.value)

    assert "is it connected already under another name?" in run(test())


# --- the monitor


def test_monitor_tells_of_a_dropped_connection(run, make_site, make_endpoint, until: Callable) -> None:
    site = make_site().listen_tcp()
    drops: list[int] = []

    async def test() -> None:
        endpoint = await make_endpoint(site)
        monitor = endpoint.channels[site.id].monitor
        monitor.on_disconnect = lambda: drops.append(1)
        site.close()
        await until(lambda: drops)
        assert not monitor.failure.done()
        monitor.close()
        monitor.close()
        assert monitor.failure.cancelled()

    run(test())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_ipc_listener_of_another_user_is_refused(run, tmp_path):
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.setuid(65534); s.listen();"
        "print('ready', flush=True); s.accept()[0].recv(100)"
    )
    path = tmp_path / "s"
    with subprocess.Popen([sys.executable, "-I", "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(AuthError, match="belongs to a process of uid 65534"):
            run(reach.check("here", f"ipc://{path}", 5.0))
