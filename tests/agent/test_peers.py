"""The switchboard: who reaches whom, with whose address on it, and who is told that there is nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpulayer.agent import agent
from gpulayer.resources import Address, new_id
from gpulayer.wire import keys
from gpulayer.wire.keys import KeyPair
from gpulayer.wire.message import Kind, Message, chunk_header, make_route, read_route, unpack
from tests.agents import NOWHERE, Client, Inside, inside, outside
from tests.conftest import wait_until


@pytest.fixture
def host(own_folders) -> Iterator[Inside]:
    with inside(port=0, cpus=2) as host:
        yield host


@pytest.fixture
def key(host, own_folders) -> KeyPair:
    return keys.load_identity(own_folders / "home")


@pytest.fixture
def pair(host, key) -> Iterator[tuple[Client, Client]]:
    """Two drivers, welcomed."""
    endpoint = f"tcp://127.0.0.1:{host.port}"
    with Client(endpoint, key, key.public) as one, Client(endpoint, key, key.public) as two:
        for client in (one, two):
            assert client.hello().kind is Kind.WELCOME
        yield one, two


def known(host: Inside) -> int:
    return host.do(lambda: len(host.agent.peers.known))


def test_frames_are_forwarded_unopened_with_the_true_source(host, pair):
    one, two = pair
    liar = Address(new_id(), new_id())
    target = Address(host.address.host, two.peer)
    for frames in ([b"not a pack at all"], [chunk_header(1, 0), b"x" * 100]):
        one.raw(make_route(target, liar), *frames)
        assert two.socket.poll(5000)
        route, *rest = two.socket.recv_multipart()
        assert read_route(route) == (target, Address(host.address.host, one.peer))
        assert rest == frames
    assert host.do(lambda: host.agent.peers.refused) == 0


def receive_raw(client: Client) -> list[bytes]:
    """The next frame set but its route."""
    assert client.socket.poll(5000)
    return client.socket.recv_multipart()[1:]


def open_bulk(port: int, key: KeyPair, owner: Address) -> Client:
    """The bulk lane of a peer that is welcome: what it sends to itself comes back over it."""
    bulk = Client(f"tcp://127.0.0.1:{port}", key, key.public, peer=owner.peer, lane=b"B")
    bulk.raw(make_route(owner, NOWHERE), chunk_header(9, 0), b"to myself")
    assert receive_raw(bulk) == [chunk_header(9, 0), b"to myself"]
    return bulk


def test_bulk_goes_over_the_bulk_lane_of_its_addressee(host, pair, key):
    one, two = pair
    target = Address(host.address.host, two.peer)
    with open_bulk(host.port, key, target) as bulk, open_bulk(host.port, key, Address(host.address.host, one.peer)) as mine:
        mine.raw(make_route(target, NOWHERE), chunk_header(1, 0), b"data")
        assert receive_raw(bulk) == [chunk_header(1, 0), b"data"]
    assert two.receive(0.1) == []


@pytest.mark.parametrize("kind", [Kind.ASK, Kind.CALL])
def test_request_to_nobody_fails_at_once(host, pair, kind):
    one, _ = pair
    for where in (Address(host.address.host, new_id()), Address(new_id(), new_id()), Address(new_id())):
        one.send(Message(kind, 5, {"m": "x"}), Message(Kind.TELL, 0, {"m": "x"}), Message(Kind.REPLY, 9, {}), to=where)
        ((answer,)) = one.receive()
        assert (answer.kind, answer.id, answer.body["error"]) == (Kind.FAIL, 5, "ActorDiedError")
    assert one.receive(0.1) == []


def test_request_to_a_dead_worker_says_how_it_ended(host, pair):
    one, _ = pair
    worker = one.ask("lease", cpus=1, gpus=0, kind="actor", label="short-lived").body
    one.send(Message(Kind.ASK, 2, {"m": "kill", "worker": worker["worker"], "reason": "it has had its day"}))
    wait_until(lambda: host.do(lambda: not host.agent.pool.workers), 5, "its end")
    seen: list[Message] = []
    one.send(Message(Kind.CALL, 7, {}), to=Address(host.address.host, worker["worker"]))
    while not any(message.id == 7 for message in seen):
        seen += one.receive()
    for message in (next(m for m in seen if m.body.get("m") == "died"), next(m for m in seen if m.id == 7)):
        facts = message.body["facts"]
        assert (facts["name"], facts["cause"], facts["pid"]) == ("short-lived", "it has had its day", worker["pid"])


def test_every_caller_of_a_worker_is_told_of_its_end(host, pair):
    one, two = pair
    worker = one.ask("lease", cpus=1, gpus=0, kind="actor", label="shared").body
    address = Address(host.address.host, worker["worker"])
    two.send(Message(Kind.CALL, 1, {"op": "method", "n": "x", "method": "x", "f": b"", "p": [0, 0]}), to=address)
    assert two.receive()[0].kind is Kind.FAIL
    one.send(Message(Kind.ASK, 2, {"m": "kill", "worker": worker["worker"]}))
    for client in (one, two):
        (died,) = client.receive()
        assert (died.kind, died.body["m"], died.body["worker"]) == (Kind.TELL, "died", address.to_bytes())


def test_hello_said_twice_changes_nothing(host, pair):
    one, _ = pair
    assert one.hello("viewer", 0.2) is None
    assert known(host) == 2
    assert one.ask("state").kind is Kind.REPLY


def test_other_key_cannot_speak_as_a_known_peer(host, pair, own_folders, key):
    """Not even by connecting over the other socket with its identity."""
    one, _ = pair
    with Client(f"ipc://{host.socket}", peer=one.peer) as thief:
        thief.send(Message(Kind.ASK, 1, {"m": "shutdown"}))
        assert thief.receive()[0].kind is Kind.REFUSED
        assert thief.hello().kind is Kind.REFUSED
    assert not host.agent.stopped.is_set()
    assert one.ask("state").kind is Kind.REPLY


@pytest.fixture
def short_leases(monkeypatch) -> None:
    for name, seconds in (("DRIVER_LEASE_S", 1.0), ("SILENT_S", 0.1), ("RECONNECT_S", 0.1)):
        monkeypatch.setattr(agent, name, seconds)


def test_peer_without_a_connection_that_says_nothing_for_the_lease_is_forgotten(host, key, short_leases):
    endpoint = f"tcp://127.0.0.1:{host.port}"
    with Client(endpoint, key, key.public) as talking:
        assert talking.hello().kind is Kind.WELCOME
        with Client(endpoint, key, key.public) as silent:
            assert silent.hello().kind is Kind.WELCOME
        start = time.monotonic()
        while known(host) == 2:
            assert time.monotonic() - start < 5
            talking.send(Message(Kind.TELL, 0, {"m": "ping"}))
            assert talking.receive()[0].body["m"] == "pong"
        assert time.monotonic() - start > 0.9
        assert talking.ask("state").kind is Kind.REPLY


def test_silent_peer_is_known_for_as_long_as_its_connection_stands(host, key, short_leases):
    """As that of a driver does whose user's code holds the GIL."""
    with Client(f"tcp://127.0.0.1:{host.port}", key, key.public) as silent:
        assert silent.hello().kind is Kind.WELCOME
        (peer,) = host.do(lambda: list(host.agent.peers.known.values()))
        wait_until(lambda: time.monotonic() - peer.heard_s > 3, 10, "three leases to pass")
        assert known(host) == 1
        assert silent.ask("state").kind is Kind.REPLY


def test_silent_peer_is_given_up_in_the_end_though_its_connection_stands(host, key, short_leases, monkeypatch):
    """As that of a stopped driver does."""
    monkeypatch.setattr(agent, "CONNECTED_LEASE_S", 2.0)
    with Client(f"tcp://127.0.0.1:{host.port}", key, key.public) as silent:
        assert silent.hello().kind is Kind.WELCOME
        wait_until(lambda: known(host) == 0, 5, "the end of the peer")
        assert silent.ask("state").kind is Kind.REFUSED


def test_silent_local_peer_is_known_for_as_long_as_its_process_runs(host, short_leases):
    with Client(f"ipc://{host.socket}") as silent:
        assert silent.hello().kind is Kind.WELCOME
        (peer,) = host.do(lambda: list(host.agent.peers.known.values()))
        wait_until(lambda: time.monotonic() - peer.heard_s > 2, 10, "two leases to pass")
        assert silent.ask("state").kind is Kind.REPLY


def test_time_in_which_the_agent_could_not_listen_does_not_count(host, key, short_leases):
    with Client(f"tcp://127.0.0.1:{host.port}", key, key.public) as client:
        assert client.hello().kind is Kind.WELCOME
        (peer,) = host.do(lambda: list(host.agent.peers.known.values()))
        peer.connected_s = 0.0
        now = time.monotonic()
        peer.heard_s = now - 10
        assert not host.do(lambda: host.agent._is_out_of_reach(peer, now, 9.95))
        assert peer.heard_s == pytest.approx(now - 0.05)


def test_local_peer_whose_process_has_ended_is_forgotten_at_once(host):
    with Client(f"ipc://{host.socket}") as client:
        assert client.hello(pid=2**22 - 1).kind is Kind.WELCOME
        wait_until(lambda: known(host) == 0, 2, "the end of the peer")


def test_pong_tells_the_load(host, pair):
    one, _ = pair
    one.ask("lease", cpus=2, gpus=0, kind="actor", label="x")
    one.send(Message(Kind.ASK, 9, {"m": "lease", "cpus": 1, "gpus": 0, "kind": "task", "label": "y"}))
    one.send(Message(Kind.TELL, 0, {"m": "ping"}))
    pong = next(message for message in one.receive() if message.body.get("m") == "pong")
    assert pong.body == {"m": "pong", "cpus_free": 0, "gpus_free": 0, "waiting": 1}


# --- other hosts


@pytest.fixture
def far(host, own_folders, monkeypatch) -> Iterator[tuple[Client, Address]]:
    """A driver of another host's agent, and its address; the two hosts share a home, as with `connect(local=2)`."""
    with outside("--port", "0", "--name", "far") as other:
        key = keys.load_identity(own_folders / "home")
        with Client(f"tcp://127.0.0.1:{other.port}", key, key.public) as client:
            far_host = client.hello().body["host"]["id"]
            client.agent = other
            yield client, Address(far_host, client.peer)


def introduce(near: Client, far: tuple[Client, Address], key: KeyPair) -> None:
    client, address = far
    item = {"id": address.host, "name": "far", "endpoint": f"tcp://127.0.0.1:{client.agent.port}", "key": key.public}
    assert near.ask("peers", hosts=[item]).kind is Kind.REPLY


def test_frames_are_relayed_to_another_host_and_back(host, pair, key, far):
    near, _ = pair
    client, address = far
    introduce(near, far, key)
    near.send(Message(Kind.CALL, 1, {"x": 1}), to=address)
    assert client.socket.poll(5000)
    route, data = client.socket.recv_multipart()
    source = read_route(route)[1]
    assert source == Address(host.address.host, near.peer)
    assert unpack(data)[0].body == {"x": 1}
    client.send(Message(Kind.REPLY, 1, {"y": 2}), to=source)
    (answer,) = near.receive()
    assert (answer.kind, answer.id, answer.body) == (Kind.REPLY, 1, {"y": 2})


def test_host_that_nobody_introduced_is_nobody(host, pair, key, far):
    near, _ = pair
    near.send(Message(Kind.ASK, 1, {"m": "x"}), to=far[1])
    assert near.receive()[0].kind is Kind.FAIL
    assert far[0].receive(0.1) == []


def test_bulk_that_follows_the_first_message_of_a_link_is_not_lost(host, pair, key, far):
    """It takes another connection than the HELLO, and must not arrive before it."""
    near, _ = pair
    client, address = far
    introduce(near, far, key)

    source = Address(host.address.host, near.peer)
    with open_bulk(client.agent.port, key, address) as bulk, open_bulk(host.port, key, source) as mine:
        for offset in range(20):
            mine.raw(make_route(address, NOWHERE), chunk_header(1, offset), b"x" * 100_000)
        near.send(Message(Kind.CALL, 1, {}), to=address)
        assert client.receive()[0].id == 1
        assert [receive_raw(bulk)[0] for _ in range(20)] == [chunk_header(1, offset) for offset in range(20)]


def test_idle_link_stays_known_on_the_other_side(host, pair, key, far, monkeypatch):
    """The agent that dialled pings, or its place would be given up like that of a silent driver."""
    monkeypatch.setattr(agent, "DRIVER_LEASE_S", 1.5)
    near, (client, _) = pair[0], far
    target = Address(host.address.host, near.peer)
    item = {"id": target.host, "name": "near", "endpoint": f"tcp://127.0.0.1:{host.port}", "key": key.public}
    client.ask("peers", hosts=[item], number=5)
    client.send(Message(Kind.CALL, 1, {}), to=target)
    assert near.receive()[0].id == 1
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        near.send(Message(Kind.TELL, 0, {"m": "ping"}))
        assert near.receive()[0].body["m"] == "pong"
        time.sleep(0.2)
    client.send(Message(Kind.CALL, 2, {}), to=target)
    assert near.receive()[0].id == 2


def test_end_of_the_other_agent_reaches_who_sent_something_there(host, pair, key, far):
    near, _ = pair
    client, address = far
    introduce(near, far, key)
    near.send(Message(Kind.CALL, 1, {}), to=address)
    assert client.receive()[0].id == 1
    client.agent.process.kill()
    (died,) = near.receive(3)
    assert (died.body["m"], died.body["worker"], died.body["error"]) == ("died", address.to_bytes(), "HostLostError")
    near.send(Message(Kind.CALL, 2, {}), to=address)
    assert near.receive(0.5) in ([], [died]), "it dials anew, and may find the host back"


@pytest.mark.parametrize("how", ["another agent", "refused key"])
def test_link_that_cannot_be_made_fails_what_waits_for_it(host, pair, key, far, how, own_folders):
    near, _ = pair
    client, address = far
    if how == "another agent":
        address = Address(new_id(), client.peer)
        introduce(near, (client, address), key)
    else:
        item = {"id": address.host, "name": "far", "endpoint": f"tcp://127.0.0.1:{client.agent.port}"}
        near.ask("peers", hosts=[{**item, "key": keys.new_pair().public}])
    near.send(Message(Kind.CALL, 1, {}), Message(Kind.ASK, 2, {"m": "x"}), to=address)
    answers: list[Message] = []
    while len([answer for answer in answers if answer.kind is Kind.FAIL]) < 2:
        more = near.receive(8)
        assert more, f"no answer after {answers}"
        answers += more
    fails = [answer for answer in answers if answer.kind is Kind.FAIL]
    assert [(answer.id, answer.body["error"]) for answer in fails] == [(1, "HostLostError"), (2, "HostLostError")]
