"""What a caller sees when the other side goes: an agent, a host, a process, a connection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.config import Settings
from gpulayer.errors import ActorDiedError, GPUlayerError, HostLostError
from gpulayer.resources import Address
from gpulayer.wire import keys, rpc
from gpulayer.wire.courier import WINDOW_BYTES
from gpulayer.wire.hello import make_hello
from gpulayer.wire.message import Kind, Message
from gpulayer.wire.rpc import Dial
from tests.wire.office import waiting_bytes
from tests.wire.site import address_at, error_of, listen, note, over_both

ROOT = Path(__file__).resolve().parents[2]


def test_request_without_a_way_fails_in_a_later_turn(run, make_endpoint, until) -> None:
    async def test() -> None:
        endpoint = await make_endpoint()
        answers: list[Message] = []
        endpoint.request(Address(b"nowhere!", b"nobody!!"), Kind.CALL, {}, [b"x" * 100_000], note(answers))
        assert answers == []
        await until(lambda: answers)
        assert type(error_of(answers[0])) is HostLostError
        assert waiting_bytes(endpoint._courier) == 0

    run(test())


def test_lost_host_fails_its_requests_and_no_others(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two"))
        endpoint = await make_endpoint(one, two)
        events: list[str] = []
        endpoint.on_host_lost = lambda host, error: events.append(f"lost {host.name}")
        for destination in (one.address, Address(one.id, b"a worker"), two.address):
            endpoint.request(destination, Kind.ASK, {"m": "q"}, (), lambda message: events.append(str(error_of(message))))
        endpoint.lose(one.id, "we say so")
        endpoint.lose(one.id, "twice")
        assert events == ["lost one", *["host one (one) is lost: we say so"] * 2]
        assert list(endpoint.channels) == [two.id]
        await until(lambda: two.asked)

    run(test())


def test_lost_home_is_replaced_and_fails_what_it_relayed(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two"))
        endpoint, other = await make_endpoint(one, two), await make_endpoint(two)
        answers: list[Message] = []
        far = Address(b"far away", other.peer)
        endpoint.request(far, Kind.CALL, {}, (), note(answers))
        endpoint.request(two.address, Kind.ASK, {"m": "q"}, (), lambda message: pytest.fail("two is there"))
        await until(lambda: two.asked)
        endpoint.lose(one.id, "gone")
        assert [type(error_of(message)) for message in answers] == [HostLostError]
        assert endpoint.home == two.address
        endpoint.tell(far, "by another way")
        await until(lambda: other.inbox)

    run(test())


def test_last_lost_host_fails_later_requests_too(run, make_site, make_endpoint, own_folders) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site)
        endpoint.lose(site.id, "gone")
        assert endpoint.home == site.address
        endpoint.tell(site.address, "nobody hears this")
        for destination in (site.address, Address(site.id, b"a worker")):
            with pytest.raises(HostLostError, match=r"host gpu1 \(gpu1\) is lost: gone"):
                await asyncio.wait_for(endpoint.ask(destination, "q"), 5.0)
        with pytest.raises(HostLostError, match="no agent is connected that leads to host"):
            await asyncio.wait_for(endpoint.ask(Address(b"far away"), "q"), 5.0)

    run(test())


def test_failing_requests_may_fail_each_other_and_ask_again(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site)
        answers: list[int] = []

        def on_reply(message: Message) -> None:
            answers.append(message.id)
            endpoint.fail_pending(lambda _: True, GPUlayerError("all"))
            if len(answers) == 1:
                endpoint.request(site.address, Kind.ASK, {"m": "again"}, (), lambda _: None)

        numbers = [endpoint.request(site.address, Kind.ASK, {"m": "q"}, (), on_reply) for _ in range(5)]
        endpoint.fail_pending(lambda _: True, GPUlayerError("all"))
        assert sorted(answers) == numbers

    run(test())


def test_death_of_a_process_fails_its_requests_only(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site)
        dead, alive = Address(site.id, b"worker 1"), Address(site.id, b"worker 2")
        answers: list[Message] = []
        endpoint.request(dead, Kind.CALL, {}, [b"x" * 3 * WINDOW_BYTES], note(answers))
        endpoint.request(alive, Kind.CALL, {}, (), lambda message: pytest.fail("it lives"))
        endpoint.fail_pending(lambda address: address == dead, ActorDiedError(name="C", cause="killed"))
        assert [type(error_of(message)) for message in answers] == [ActorDiedError]
        assert waiting_bytes(endpoint._courier) == 0

    run(test())


def test_agent_that_knows_us_no_more_is_lost_at_once(run, make_site, make_endpoint, until) -> None:
    async def test() -> None:
        site = make_site().listen_tcp()
        endpoint = await make_endpoint(site)
        asking = asyncio.ensure_future(endpoint.ask(site.address, "q"))
        await until(lambda: site.asked)
        site.refuse(endpoint.peer)  # what an agent answers that was started anew on the same port
        with pytest.raises(HostLostError, match="does not know us any more"):
            await asking
        assert endpoint.channels == {}

    run(test())


def test_silent_agent_is_lost(run, make_site, make_endpoint, own_folders, until, monkeypatch) -> None:
    monkeypatch.setattr(rpc, "HOST_LOST_S", 0.2)

    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site)
        asking = asyncio.ensure_future(endpoint.ask(site.address, "q"))
        endpoint.ping_all()
        await until(lambda: site.asked)
        assert site.id in endpoint.channels
        endpoint.channels[site.id].heard_s -= 0.3
        endpoint.ping_all()
        with pytest.raises(HostLostError, match=r"nothing was heard from it for 0.2 s"):
            await asking

    run(test())


def test_agent_is_not_lost_when_it_is_this_process_that_could_not_listen(
    run, make_site, make_endpoint, own_folders, monkeypatch
) -> None:
    monkeypatch.setattr(rpc, "HOST_LOST_S", 0.2)
    monkeypatch.setattr(rpc, "PING_S", 0.01)

    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site)
        endpoint.ping_all()
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is held up, as by user code that holds the GIL
        endpoint.ping_all()
        assert site.id in endpoint.channels

    run(test())


@over_both
def test_agent_that_stops_listening_is_lost_within_a_second(run, make_site, make_endpoint, own_folders, until, how: str) -> None:
    async def test() -> None:
        site = listen(make_site(), how, own_folders)
        endpoint = await make_endpoint(site)
        asking = asyncio.ensure_future(endpoint.ask(site.address, "q"))
        await until(lambda: site.asked)
        closed_s = time.monotonic()
        site.close()
        with pytest.raises(HostLostError, match="its agent has ended"):
            await asking
        assert time.monotonic() - closed_s < 1.0

    run(test())


def take_port(port: int) -> socket.socket:
    """Listen on a port as soon as it is free."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_agent_that_drops_us_before_it_stops_listening_is_lost_too(run, make_site, make_endpoint, until) -> None:
    async def test() -> None:
        site = make_site().listen_tcp()
        endpoint = await make_endpoint(site)
        site.close()
        listener = take_port(int(site.dial.endpoint.rpartition(":")[2]))
        await asyncio.sleep(0.15)  # what is to be survived: it still takes connections for a while
        assert site.id in endpoint.channels
        listener.close()
        await until(lambda: site.id not in endpoint.channels, 1.0)

    run(test())


def test_dropped_connection_is_mended_when_the_agent_still_listens(run, make_site, make_endpoint, until) -> None:
    async def test() -> None:
        site = make_site().listen_tcp()
        endpoint = await make_endpoint(site)
        drops: list[int] = []
        confirm = endpoint.channels[site.id].monitor.on_disconnect
        endpoint.channels[site.id].monitor.on_disconnect = lambda: (drops.append(1), confirm())
        for connection in connections_to(site):
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        await until(lambda: drops)
        endpoint.ping_all()
        await until(lambda: endpoint.channels[site.id].latency_s is not None)

    run(test())


def connections_to(site: Any) -> list[socket.socket]:
    """This process's ends of the client connections to a site."""
    port = int(site.dial.endpoint.rpartition(":")[2])
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            wanted = copy.getpeername() == ("127.0.0.1", port)
        except OSError:
            wanted = False
        if wanted:
            found.append(copy)
        else:
            copy.close()
    assert found
    return found


def test_close_sends_what_waits(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint, other = await make_endpoint(site), await make_endpoint(site)
        for number in range(100):
            endpoint.tell(address_at(site, other), "last words", n=number)
        await endpoint.close(2000)
        assert endpoint.channels == {}
        await until(lambda: len(other.inbox) == 100)
        endpoint.tell(address_at(site, other), "too late")
        with pytest.raises(HostLostError):
            await endpoint.ask(address_at(site, other), "too late")

    run(test())


# --- a real agent, in a process of its own


@pytest.fixture
def agent() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A real agent on some port, and what it says when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpulayer.agent", "--port", "0", "--cpus", "2"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def dial_of(ready: dict[str, Any], how: str) -> Dial:
    if how == "ipc":
        return Dial("here", f"ipc://{ready['socket']}")
    identity = keys.load_or_make_identity(Settings.from_environment().home)
    return Dial("here", f"tcp://127.0.0.1:{ready['port']}", identity, identity.public)


@over_both
def test_payload_arrives_right_after_connect(run, make_endpoint, agent, until, how: str) -> None:
    """A process is known when it has said HELLO on its control lane; its bulk lane may still be shaking hands."""
    dial = dial_of(agent[1], how)

    async def test() -> None:
        sender = await make_endpoint()
        host = await sender.connect(dial, make_hello("driver"), 5.0)
        others = [await make_endpoint() for _ in range(30)]
        for other in others:
            await other.connect(dial, make_hello("driver"), 5.0)
            sender.request(Address(host.id, other.peer), Kind.CALL, {}, [b"x" * 200_000], lambda message: None)
        await until(lambda: all(other.inbox for other in others))

    run(test())


@over_both
def test_killed_agent_is_lost_within_a_second_and_fails_what_waits(run, make_endpoint, agent, how: str) -> None:
    process, ready = agent
    dial = dial_of(ready, how)

    async def test() -> None:
        endpoint = await make_endpoint()
        host = await endpoint.connect(dial, make_hello("driver"), 5.0)
        assert (await endpoint.ask(Address(host.id), "state"))["cpus"] == 2.0
        lost: list[GPUlayerError] = []
        endpoint.on_host_lost = lambda host, error: lost.append(error)
        process.send_signal(signal.SIGSTOP)  # so that the questions wait
        questions = [asyncio.ensure_future(endpoint.ask(Address(host.id), "state")) for _ in range(3)]
        await asyncio.sleep(0)
        killed_s = time.monotonic()
        process.kill()
        results = await asyncio.wait_for(asyncio.gather(*questions, return_exceptions=True), 5.0)
        assert time.monotonic() - killed_s < 1.0
        assert [type(result) for result in results] == [HostLostError] * 3
        assert str(results[0]) == str(lost[0])
        assert "is lost: its agent has ended" in str(results[0])
        with pytest.raises(HostLostError):
            await asyncio.wait_for(endpoint.ask(Address(host.id), "state"), 5.0)

    run(test())
