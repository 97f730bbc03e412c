"""Other agents as peers: what they may say, in whose name, and what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer.resources import Address, new_id
from gpulayer.wire import keys
from gpulayer.wire.keys import KeyPair
from gpulayer.wire.message import Kind, Message, read_route, unpack
from tests.agents import Client, Inside, inside, outside
from tests.conftest import wait_until


@pytest.fixture
def host(own_folders) -> Iterator[Inside]:
    with inside(port=0, cpus=2) as host:
        yield host


@pytest.fixture
def key(host, own_folders) -> KeyPair:
    return keys.load_identity(own_folders / "home")


@pytest.fixture
def driver(host, key) -> Iterator[Client]:
    with Client(f"tcp://127.0.0.1:{host.port}", key, key.public) as client:
        assert client.hello().kind is Kind.WELCOME
        yield client


@pytest.fixture
def agent_key(own_folders) -> KeyPair:
    return enrolled(own_folders, "agent")


@pytest.fixture
def other(host, key, agent_key) -> Iterator[Client]:
    """Another host's agent, as this one sees it."""
    with as_host(host, key, agent_key, new_id()) as client:
        assert client.hello("agent").kind is Kind.WELCOME
        yield client


def enrolled(own_folders: Path, role: str) -> KeyPair:
    pair = keys.new_pair()
    keys.authorize(own_folders / "home", pair.public, role)
    return pair


def as_host(host: Inside, key: KeyPair, own: KeyPair, host_id: bytes) -> Client:
    return Client(f"tcp://127.0.0.1:{host.port}", own, key.public, peer=host_id)


def introduce(driver: Client, host_id: bytes, key: KeyPair, port: int = 1) -> None:
    item = {"id": host_id, "name": "far", "endpoint": f"tcp://127.0.0.1:{port}", "key": key.public}
    assert driver.ask("peers", hosts=[item]).kind is Kind.REPLY


# --- a link that we dialled


@pytest.fixture
def far(host, driver, key) -> Iterator[tuple[Client, Address]]:
    """A driver of a real agent elsewhere, to which the agent under test has dialled; and its address."""
    with outside("--port", "0", "--name", "far") as agent, Client(f"tcp://127.0.0.1:{agent.port}", key, key.public) as client:
        address = Address(client.hello().body["host"]["id"], client.peer)
        introduce(driver, address.host, key, agent.port)
        driver.send(Message(Kind.CALL, 1, {}), to=address)
        assert client.receive()[0].id == 1
        client.agent = agent
        yield client, address


def test_question_that_comes_over_a_link_we_dialled_is_answered(host, driver, far):
    client, _ = far
    worker = driver.ask("lease", cpus=1, gpus=0, kind="actor", label="Bee", name="bee", meta=b"m").body["worker"]
    found = client.ask("named", to=host.address, name="bee", number=2)
    assert (found.kind, found.body["worker"]) == (Kind.REPLY, worker)
    assert client.ask("kill", to=host.address, worker=worker, number=3).body == {"found": True}
    wait_until(lambda: host.do(lambda: not host.agent.pool.workers), 5, "the end of the worker")


def test_question_over_a_link_has_the_rights_of_an_agent_only(host, driver, far):
    client, _ = far
    answer = client.ask("shutdown", to=host.address, number=2)
    assert (answer.kind, answer.body["error"]) == (Kind.FAIL, "AuthError")
    assert not host.agent.stopped.is_set()


def test_agent_that_closes_tells_the_hosts_that_dialled_it(host, driver, far):
    """And they tell whoever sent something there, at once."""
    client, address = far
    client.agent.process.terminate()
    (died,) = driver.receive(3)
    assert (died.body["m"], died.body["worker"], died.body["error"]) == ("died", address.to_bytes(), "HostLostError")
    assert "is shutting down" in died.body["message"]
    assert host.agent.peers.refused == 0


# --- an agent that dialled us


def test_agent_cannot_ask_as_another_process_of_this_host(host, driver, other):
    """Its rights are those of its key, whatever process it says that it speaks for."""
    source = Address(other.peer, driver.peer)
    body = {"m": "lease", "cpus": 1, "gpus": 0, "kind": "actor", "label": "x"}
    refused = host.agent.peers.refused
    other.send(Message(Kind.ASK, 1, body), to=host.address, source=source)
    wait_until(lambda: host.do(lambda: host.agent.peers.refused) > refused, 5, "the refusal")
    assert host.do(lambda: not host.agent.leases.active)


def test_closing_is_told_to_an_agent_under_its_own_address(host, other):
    host.do(host.agent.drain)
    route, data = other.socket.recv_multipart()
    assert read_route(route) == (Address(other.peer), host.address)
    assert unpack(data)[0].body == {"m": "closing"}


@pytest.mark.parametrize("topic", ["pong", "nudge", "closing"])
def test_notice_between_agents_is_nothing_to_refuse(host, other, topic):
    other.send(Message(Kind.TELL, 0, {"m": topic}), to=host.address, source=Address(other.peer))
    other.send(Message(Kind.ASK, 1, {"m": "named", "name": "x"}), to=host.address, source=Address(other.peer))
    assert other.receive()[0].kind is Kind.REPLY
    assert host.agent.peers.refused == 0


def test_agent_is_not_told_of_the_death_of_a_worker_to_which_it_said_something(host, driver, other):
    worker = driver.ask("lease", cpus=1, gpus=0, kind="actor", label="x").body["worker"]
    own = Address(other.peer)
    other.send(Message(Kind.FAIL, 99, {"error": "x"}), to=Address(host.address.host, worker), source=own)
    assert driver.ask("kill", worker=worker, number=2).kind is Kind.REPLY
    wait_until(lambda: host.do(lambda: not host.agent.pool.workers), 5, "the end of the worker")
    assert other.receive(0.2) == []


# --- whose id a host's is


def test_id_of_a_host_belongs_to_the_key_that_came_first(host, key, agent_key, own_folders):
    host_id = new_id()
    with as_host(host, key, agent_key, host_id) as first:
        assert first.hello("agent").kind is Kind.WELCOME
    host.do(lambda: host.agent.peers.forget(host_id))
    for role, kind in (("agent", "agent"), ("viewer", "viewer"), ("driver", "driver")):
        with as_host(host, key, enrolled(own_folders, role), host_id) as thief:
            assert thief.hello(kind).kind is Kind.REFUSED
    with as_host(host, key, agent_key, host_id) as again:
        assert again.hello("agent").kind is Kind.WELCOME


@pytest.mark.parametrize("kind", ["agent", "viewer"])
def test_id_of_a_host_belongs_to_the_key_that_a_driver_says(host, key, driver, agent_key, own_folders, kind):
    """Whoever has taken it before has to go."""
    host_id, true = new_id(), enrolled(own_folders, "agent")
    with as_host(host, key, agent_key, host_id) as squatter:
        assert squatter.hello(kind).kind is Kind.WELCOME
        introduce(driver, host_id, true)
        assert squatter.hello(kind).kind is Kind.REFUSED
        assert host.do(lambda: host_id not in host.agent.peers.known)
    with as_host(host, key, true, host_id) as owner:
        assert owner.hello("agent").kind is Kind.WELCOME


def test_viewer_with_the_id_of_a_host_gets_nothing_that_goes_there(host, key, driver, own_folders):
    host_id = new_id()
    with as_host(host, key, enrolled(own_folders, "viewer"), host_id) as viewer:
        assert viewer.hello("viewer").kind is Kind.WELCOME
        driver.send(Message(Kind.CALL, 5, {}), to=Address(host_id, new_id()))
        ((answer,)) = driver.receive()
        assert (answer.kind, answer.id) == (Kind.FAIL, 5)
        assert viewer.receive(0.1) == []


# --- vouching


def test_key_that_a_driver_vouches_for_is_let_in_until_that_driver_goes(host, key, driver):
    vouched, host_id = keys.new_pair(), new_id()
    introduce(driver, host_id, vouched)
    with as_host(host, key, vouched, host_id) as agent:
        assert agent.hello("agent").kind is Kind.WELCOME
        assert driver.ask("goodbye", number=2).kind is Kind.REPLY
        wait_until(lambda: host.do(lambda: host_id not in host.agent.peers.known), 5, "the end of the agent as a peer")
    with as_host(host, key, vouched, host_id) as again:
        assert not again.handshake()
