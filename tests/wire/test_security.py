from __future__ import annotations

import asyncio
import logging
import os
import socket as plain_sockets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from gpulayer.errors import GPUlayerError, KeyFileError, UsageError
from gpulayer.wire import keys, security
from gpulayer.wire.authenticator import ZAP_DOMAIN, Authenticator
from gpulayer.wire.context import close_context, context
from gpulayer.wire.keys import AllowList

WAIT_MS = 10_000
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | REFUSED


_kept: list[zmq.Socket] = []
_monitors: dict[zmq.Socket, zmq.Socket] = {}


def keep(socket: zmq.Socket) -> zmq.Socket:
    """Close the socket at the end of the test, not as soon as nobody holds it."""
    _kept.append(socket)
    return socket


def watch(client: zmq.Socket) -> None:
    _monitors[client] = keep(client.get_monitor_socket())


@pytest.fixture(autouse=True)
def _closed_sockets() -> Iterator[None]:
    yield
    for socket in _kept:
        socket.close(0)
    _kept.clear()
    _monitors.clear()
    close_context()


class Site:
    """A host: its home, its authenticator on a loop in another thread, and the sockets that a test opens."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.identity = keys.make_identity(home)
        self.allow_list = AllowList(home)
        self.loop = asyncio.new_event_loop()
        self.authenticator = Authenticator(self.loop, self.allow_list)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.call(self.authenticator.start)

    def call(self, function) -> None:
        async def call():
            function()

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def close(self) -> None:
        self.call(self.authenticator.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def server(self, endpoint: str = "tcp://127.0.0.1:0") -> zmq.Socket:
        return keep(security.server_socket(endpoint, self.identity, authenticator=self.authenticator))

    def client(self, server: zmq.Socket, pair: keys.KeyPair | None = None, **changes) -> zmq.Socket:
        options = {"routing_id": os.urandom(8), "identity": pair or self.identity, "server_key": self.identity.public}
        return keep(security.client_socket(where(server), prepare=watch, **(options | changes)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "home")
    yield site
    site.close()


def where(server: zmq.Socket) -> str:
    return server.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    assert socket.poll(WAIT_MS), "no message came"
    return socket.recv_multipart(copy=False)


def is_let_in(client: zmq.Socket, server: zmq.Socket) -> bool:
    """Whether the client's handshake succeeds, and then its message arrives."""
    client.send(b"hello")
    if next_event(client, FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
        client.close()
        assert not server.poll(0)
        return False
    assert receive(server)[-1].bytes == b"hello"
    return True


def next_event(client: zmq.Socket, wanted: int) -> int:
    """Wait for one of the wanted events of a client."""
    while True:
        assert _monitors[client].poll(WAIT_MS), "the event did not come"
        event = recv_monitor_message(_monitors[client])["event"]
        if event & wanted:
            return event


# -- who gets in over tcp


def test_server_lets_our_own_key_in_and_answers(site):
    server = site.server()
    client = site.client(server, routing_id=b"me")
    client.send_multipart([b"a", b"b"])
    assert [frame.bytes for frame in receive(server)] == [b"me", b"a", b"b"]
    server.send_multipart([b"me", b"answer"])
    assert receive(client)[0].bytes == b"answer"


def test_sender_key_is_the_key_that_the_sender_holds(site):
    server, others = site.server(), [keys.new_pair() for _ in range(3)]
    for number, pair in enumerate(others):
        keys.authorize(site.home, pair.public, "agent")
        site.client(server, pair, routing_id=b"%d" % number).send(b"x")
    seen = {}
    for _ in others:
        routing_id, body = receive(server)
        seen[routing_id.bytes] = security.sender_key(body)
        assert body.get("User-Id") == seen[routing_id.bytes]
    assert seen == {b"%d" % number: pair.public for number, pair in enumerate(others)}


def test_server_refuses_an_unknown_key_and_logs_it(site, caplog):
    stranger = keys.new_pair()
    server = site.server()
    with caplog.at_level(logging.WARNING, "gpulayer.security"):
        assert not is_let_in(site.client(server, stranger), server)
    assert f"refused a connection from 127.0.0.1: unknown key {stranger.public[:8]}..." in caplog.text
    assert stranger.secret not in caplog.text
    assert site.identity.secret not in caplog.text


def test_server_refuses_a_key_once_it_is_revoked(site):
    pair, server = keys.new_pair(), site.server()
    keys.authorize(site.home, pair.public, "driver")
    assert is_let_in(site.client(server, pair), server)
    keys.revoke(site.home, pair.public)
    assert not is_let_in(site.client(server, pair), server)


def test_server_lets_in_whom_a_driver_vouches_for_until_it_is_taken_back(site):
    pair, server = keys.new_pair(), site.server()
    site.call(lambda: site.allow_list.allow(pair.public, "agent", b"one"))
    assert is_let_in(site.client(server, pair), server)
    site.call(lambda: site.allow_list.withdraw(b"one"))
    assert not is_let_in(site.client(server, pair), server)


def test_server_refuses_a_client_with_anothers_public_key(site):
    server = site.server()
    thief = keys.KeyPair(site.identity.public, keys.new_pair().secret)
    assert not is_let_in(site.client(server, thief), server)


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_server_refuses_a_client_without_curve(site, mechanism):
    server = site.server()
    with context().socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        if mechanism == "plain":
            client.set(zmq.PLAIN_USERNAME, b"admin")
            client.set(zmq.PLAIN_PASSWORD, b"admin")
        watch(client)
        client.connect(where(server))
        assert not is_let_in(client, server)


def test_client_does_not_talk_to_a_server_with_another_key(site):
    server = site.server()
    assert not is_let_in(site.client(server, server_key=keys.new_pair().public), server)


def test_server_refuses_everybody_while_the_authenticator_is_stopped(site):
    server = site.server()
    early = site.client(server)
    assert is_let_in(early, server)
    site.call(site.authenticator.stop)
    assert not is_let_in(site.client(server), server)
    early.send(b"open connections stay")
    assert receive(server)[-1].bytes == b"open connections stay"
    site.call(site.authenticator.start)
    assert is_let_in(site.client(server), server)


def test_server_lets_nobody_in_when_the_loop_of_the_authenticator_hangs(site, monkeypatch):
    monkeypatch.setattr(security, "_HANDSHAKE_MS", 200)
    server, release = site.server(), threading.Event()
    site.loop.call_soon_threadsafe(release.wait, 20)
    try:
        client = site.client(server)
        assert not is_let_in(client, server)
    finally:
        release.set()


def test_server_socket_refuses_to_bind_while_no_authenticator_runs(site):
    site.call(site.authenticator.stop)
    with pytest.raises(GPUlayerError, match="not running"):
        site.server()


def test_server_socket_refuses_an_authenticator_of_another_context(tmp_path):
    identity, loop = keys.make_identity(tmp_path / "home"), asyncio.new_event_loop()
    authenticator = Authenticator(loop, AllowList(tmp_path / "home"))
    authenticator.start()
    close_context()
    with pytest.raises(GPUlayerError, match="not running in this process's context"):
        security.server_socket("tcp://127.0.0.1:0", identity, authenticator=authenticator)
    authenticator.stop()
    loop.close()


def test_a_second_context_lets_nobody_in_with_our_options(site):
    with zmq.Context() as second, second.socket(zmq.ROUTER) as server:
        server.set(zmq.LINGER, 0)
        server.set(zmq.CURVE_SERVER, 1)
        server.set(zmq.CURVE_SECRETKEY, site.identity.secret.encode())
        server.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        server.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        server.bind("tcp://127.0.0.1:0")
        assert not is_let_in(site.client(server), server)


def test_server_stays_up_for_others_while_strangers_send_garbage_and_nothing(site):
    server = site.server()
    strangers = [plain_sockets.create_connection(("127.0.0.1", security.bound_port(server))) for _ in range(60)]
    for number, stranger in enumerate(strangers):
        if number % 3:
            stranger.sendall(os.urandom(64) if number % 3 == 1 else b"\xff" + b"\x00" * 7 + b"\x7f\x03")
    assert is_let_in(site.client(server), server)
    for stranger in strangers:
        stranger.close()


def test_server_drops_a_frame_above_the_limit_and_serves_the_next_client(site):
    server = site.server()
    client = site.client(server)
    assert is_let_in(client, server)
    client.send(bytes(security.MAX_FRAME_BYTES + 1))
    next_event(client, zmq.EVENT_DISCONNECTED)
    client.close()
    assert is_let_in(site.client(server), server)


def test_server_carries_a_frame_of_the_limit(site):
    server = site.server()
    site.client(server).send(bytes(security.MAX_FRAME_BYTES - 64))
    assert len(receive(server)[-1]) == security.MAX_FRAME_BYTES - 64


def test_client_cannot_take_over_the_routing_id_of_another(site):
    server, pair = site.server(), keys.new_pair()
    keys.authorize(site.home, pair.public, "viewer")
    first = site.client(server, routing_id=b"same")
    assert is_let_in(first, server)
    second = site.client(server, pair, routing_id=b"same")
    next_event(second, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    second.send(b"from the second")
    server.send_multipart([b"same", b"for the first"])
    assert receive(first)[0].bytes == b"for the first"
    first.send(b"from the first")
    assert receive(server)[-1].bytes == b"from the first"
    assert not second.poll(0)


def test_server_raises_when_it_sends_to_nobody(site):
    with pytest.raises(zmq.ZMQError) as caught:
        site.server().send_multipart([b"nobody", b"x"])
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_nothing_readable_crosses_the_wire(site):
    """A proxy between client and server sees neither the message nor the client's public key."""
    server, seen, marker = site.server(), bytearray(), b"MARKER-" * 20
    with plain_sockets.create_server(("127.0.0.1", 0)) as listener:
        proxy = threading.Thread(target=forward, args=(listener, security.bound_port(server), seen))
        proxy.start()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        options = {"routing_id": marker, "identity": site.identity, "server_key": site.identity.public}
        client = keep(security.client_socket(endpoint, **options))
        client.send(marker)
        assert [frame.bytes for frame in receive(server)] == [marker, marker]
        client.close()
        proxy.join(10)
    assert len(seen) > 500
    assert b"CURVE" in seen
    assert b"MARKER-" not in seen


def forward(listener: plain_sockets.socket, to_port: int, seen: bytearray) -> None:
    """Pass bytes on, both ways, until the first side closes."""
    left, _ = listener.accept()
    right = plain_sockets.create_connection(("127.0.0.1", to_port))
    poller = zmq.Poller()
    other = {left.fileno(): right, right.fileno(): left}
    for each in (left, right):
        poller.register(each.fileno(), zmq.POLLIN)
    with left, right:
        while True:
            for fd, _ in poller.poll(WAIT_MS):
                data = other[other[fd].fileno()].recv(65536)
                if not data:
                    return
                seen += data
                other[fd].sendall(data)


def test_secrets_stay_out_of_what_a_socket_shows(site):
    server = site.server()
    client = site.client(server)
    shown = f"{server!r} {server} {client!r} {client} {site.authenticator!r} {site.allow_list!r}"
    assert site.identity.secret not in shown


def test_client_waits_for_a_server_that_comes_back(site):
    server = site.server()
    endpoint, client = where(server), site.client(server)
    assert is_let_in(client, server)
    server.close()
    next_event(client, zmq.EVENT_DISCONNECTED)
    assert is_let_in(client, site.server(endpoint))


# -- options and endpoints


def test_sockets_carry_the_options_that_the_layers_above_rely_on(site):
    server = site.server()
    client = site.client(server, routing_id=b"id")
    for socket in (server, client):
        assert socket.get(zmq.LINGER) == 0
        assert socket.get(zmq.MAXMSGSIZE) == 4 << 20
        assert socket.get(zmq.HANDSHAKE_IVL) == 5000
        assert socket.get(zmq.SNDHWM) == socket.get(zmq.RCVHWM) == 0
        assert socket.get(zmq.TCP_KEEPALIVE) == 1
        assert socket.get(zmq.HEARTBEAT_IVL) == 0  # a heartbeat would cut a connection that carries one long frame
        assert socket.get(zmq.MECHANISM) == zmq.CURVE
    assert server.get(zmq.ZAP_DOMAIN) == ZAP_DOMAIN
    assert server.get(zmq.ZAP_ENFORCE_DOMAIN) == 1
    assert client.get(zmq.ROUTING_ID) == b"id"
    assert (client.get(zmq.RECONNECT_IVL), client.get(zmq.RECONNECT_IVL_MAX), client.get(zmq.IMMEDIATE)) == (100, 2000, 0)


def test_bound_port_is_the_port_that_was_chosen(site):
    server = site.server("tcp://127.0.0.1:0")
    port = security.bound_port(server)
    assert where(server) == f"tcp://127.0.0.1:{port}"
    plain_sockets.create_connection(("127.0.0.1", port)).close()


def test_server_binds_localhost_as_its_address(site):
    assert where(site.server("tcp://localhost:0")).startswith("tcp://127.0.0.1:")


def test_server_and_client_meet_on_ipv6(site):
    try:
        plain_sockets.create_server(("::1", 0), family=plain_sockets.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = site.server("tcp://[::1]:0")
    assert where(server).startswith("tcp://[::1]:")
    assert is_let_in(site.client(server), server)


def test_server_socket_names_the_endpoint_that_it_cannot_bind(site):
    taken = where(site.server())
    with pytest.raises(UsageError, match=f"cannot listen on {taken}: Address already in use"):
        site.server(taken)
    with pytest.raises(UsageError, match="cannot listen on"):
        site.server("tcp://no.such.name:0")
    with pytest.raises(UsageError, match="not of the form tcp://"):
        site.server("ipc:///tmp/x")


def test_client_socket_refuses_what_cannot_work(site):
    options = {"routing_id": b"x", "identity": site.identity, "server_key": site.identity.public}
    with pytest.raises(UsageError, match="not of the form tcp://"):
        security.client_socket("inproc://x", **options)
    with pytest.raises(UsageError, match="cannot connect to"):
        security.client_socket("tcp://127.0.0.1:notaport", **options)
    with pytest.raises(UsageError, match="not a public key"):
        security.client_socket("tcp://127.0.0.1:7770", **(options | {"server_key": "x"}))
    for routing_id in (b"", b"x" * 256):
        with pytest.raises(UsageError, match="1 to 255 bytes"):
            security.client_socket("tcp://127.0.0.1:7770", **(options | {"routing_id": routing_id}))


# -- where an agent may listen


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_check_bind_lets_loopback_through_without_a_key(tmp_path, host):
    security.check_bind(host, tmp_path / "home")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "*", "10.0.0.7", "2001:db8::1", "gpu1", "localhost.evil.com", "127.0.0.1.nip.io", ""]
)
def test_check_bind_wants_a_key_for_any_other_address(tmp_path, host):
    home = tmp_path / "home"
    with pytest.raises(UsageError, match="gpulayer keys make"):
        security.check_bind(host, home)
    keys.make_identity(home)
    security.check_bind(host, home)


def test_check_bind_refuses_a_key_that_others_can_read(tmp_path):
    keys.make_identity(tmp_path / "home")
    (tmp_path / "home" / "identity.key").chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        security.check_bind("0.0.0.0", tmp_path / "home")
