"""Nobody without an enrolled key gets anything run, looked at or unpickled, whatever he sends."""

from __future__ import annotations

import ast
import logging
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import gpulayer
from gpulayer.errors import AuthError
from gpulayer.resources import Address, new_id
from gpulayer.wire import keys
from gpulayer.wire.keys import KeyPair
from gpulayer.wire.message import Kind, Message, chunk_header, encode, make_route
from tests.agents import NOWHERE, Client, Inside, inside, outside, workers_of
from tests.conftest import ROOT, wait_until

AGENT_SOURCES = sorted((ROOT / "gpulayer" / "agent").glob("*.py"))


class Canary:
    """Whoever unpickles it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that betrays who loads it; nobody may have by the end of the test."""
    path = tmp_path / "unpickled"
    data = pickle.dumps(Canary(path))
    pickle.loads(data)
    assert path.exists(), "the canary sings"
    path.unlink()
    yield data
    assert not path.exists(), "somebody has unpickled what a stranger sent"


@pytest.fixture
def host(own_folders: Path) -> Iterator[Inside]:
    with inside(port=0) as host:
        yield host


@pytest.fixture
def own_key(host: Inside, own_folders: Path) -> KeyPair:
    return keys.load_identity(own_folders / "home")


def tcp(host: Inside) -> str:
    return f"tcp://127.0.0.1:{host.port}"


def enroll(own_folders: Path, role: str) -> KeyPair:
    pair = keys.new_pair()
    keys.authorize(own_folders / "home", pair.public, role)
    return pair


def everything(canary: bytes, to: Address = NOWHERE) -> list[Message]:
    """A message of every kind, with the canary wherever bytes can be."""
    bodies = [
        {"m": "lease", "cpus": 1, "gpus": 0, "kind": "task", "label": canary, "modules": [], "meta": canary},
        {"m": "shutdown", "kind": canary, "host": canary, "canary": canary},
        {"op": "task", "n": "x", "f": canary, "p": [1, 1]},
    ]
    return [Message(kind, number, body, (canary, canary)) for number, body in enumerate(bodies, 1) for kind in Kind]


def send_everything(client: Client, canary: bytes, to: Address = NOWHERE) -> None:
    for message in everything(canary):
        client.send(message, to=to)
    client.raw(make_route(to, NOWHERE), canary)
    client.raw(make_route(to, NOWHERE), chunk_header(1, 0), canary)


def nothing_happened(host: Inside, *, peers: int = 0) -> None:
    """No lease, no worker, no further peer, still running."""
    agent = host.agent
    seen = host.do(lambda: (len(agent.peers.known), len(agent.leases.active), len(agent.leases.queue), len(agent.pool.workers)))
    assert seen == (peers, 0, 0, 0)
    assert not agent.stopped.is_set()


def serves(host: Inside, own_key: KeyPair) -> bool:
    """Whether a legitimate driver gets its answer."""
    with Client(tcp(host), own_key, own_key.public) as driver:
        answer = driver.hello()
        assert answer is not None
        assert answer.kind is Kind.WELCOME
        state = driver.ask("state")
        driver.ask("goodbye", number=2)
        return state is not None and state.kind is Kind.REPLY


# --- who gets in


def refused_client(who: str, host: Inside, own_key: KeyPair, own_folders: Path) -> Client:
    if who == "no CURVE":
        return Client(tcp(host))
    if who == "unknown key":
        return Client(tcp(host), keys.new_pair(), own_key.public)
    if who == "wrong server key":
        return Client(tcp(host), own_key, keys.new_pair().public)
    pair = enroll(own_folders, "driver")
    keys.revoke(own_folders / "home", pair.public)
    return Client(tcp(host), pair, own_key.public)


@pytest.mark.parametrize("who", ["no CURVE", "unknown key", "wrong server key", "revoked key"])
def test_stranger_gets_no_message_through(host, own_key, own_folders, canary, caplog, who):
    with caplog.at_level(logging.WARNING), refused_client(who, host, own_key, own_folders) as client:
        send_everything(client, canary)
        assert not client.handshake()
        assert client.receive(0.3) == []
    assert host.do(lambda: host.agent.peers.refused) == 0, "not even a frame arrived"
    nothing_happened(host)
    if who in ("unknown key", "revoked key"):  # libzmq drops the others before it asks us
        assert "refused a connection from 127.0.0.1: unknown key" in caplog.text
    assert serves(host, own_key)


@pytest.mark.parametrize("lane", ["ipc", "tcp"])
def test_peer_that_has_not_said_hello_gets_nothing_done(host, own_key, canary, caplog, lane):
    client = Client(f"ipc://{host.socket}") if lane == "ipc" else Client(tcp(host), own_key, own_key.public)
    with client:
        for message in everything(canary):
            if message.kind is not Kind.HELLO:
                client.send(message)
                (answer,) = client.receive()
                assert answer.kind is Kind.REFUSED
                assert answer.body["rows"] == [["first message", message.kind.name, "HELLO"]]
    assert host.do(lambda: host.agent.peers.refused) == 3 * (len(Kind) - 1)
    assert caplog.text.count("from a process that has not said hello") == 3 * (len(Kind) - 1)
    nothing_happened(host)
    assert serves(host, own_key)


def test_worker_hello_over_tcp_is_refused_even_with_a_driver_key(host, own_key, canary, caplog):
    with caplog.at_level(logging.WARNING), Client(tcp(host), own_key, own_key.public) as client:
        answer = client.hello("worker", token=canary)
        assert answer is not None
        assert answer.kind is Kind.REFUSED
        assert answer.body["rows"] == [["worker token", "unknown", "one of this agent's"]]
    assert "refused worker" in caplog.text
    nothing_happened(host)


@pytest.mark.parametrize("token", ["", "0" * 32, "\N{SNOWMAN}", 7, None, ["x"]])
def test_worker_hello_with_a_wrong_token_is_refused(host, own_key, canary, caplog, token):
    """Over ipc too, where a real worker's id alone is not enough."""
    worker = host.do(lambda: host.agent.pool.fork("a worker", {}, 1, []))
    host.wait(host.agent.pool.wait_ready(worker))
    for peer in (worker.id, new_id()):
        with caplog.at_level(logging.WARNING), Client(f"ipc://{host.socket}", peer=peer) as client:
            send_everything(client, canary)
            client.hello("worker", 0.3, token=token)
    host.do(lambda: host.agent.pool.kill(worker, "enough"))
    wait_until(lambda: not host.agent.peers.known, 5, "the end of the worker")
    nothing_happened(host)


@pytest.mark.parametrize(("role", "kind"), [("viewer", "driver"), ("viewer", "agent"), ("agent", "driver")])
def test_key_of_a_lower_role_is_refused(host, own_key, own_folders, role, kind):
    with Client(tcp(host), enroll(own_folders, role), own_key.public) as client:
        answer = client.hello(kind)
        assert answer is not None
        assert answer.kind is Kind.REFUSED
        assert answer.body["rows"][0][:2] == ["role of the key", role]
    nothing_happened(host)


def test_revoked_key_loses_its_open_connection_too(host, own_key, own_folders):
    pair = enroll(own_folders, "driver")
    with Client(tcp(host), pair, own_key.public) as client:
        assert client.hello().kind is Kind.WELCOME
        keys.revoke(own_folders / "home", pair.public)
        wait_until(lambda: not host.agent.peers.known, 5, "the end of the peer")
        assert client.ask("state").kind is Kind.REFUSED
        assert client.hello().kind is Kind.REFUSED
    assert serves(host, own_key)


# --- what a lower role may do


def test_viewer_sees_the_state_and_nothing_else(host, own_key, own_folders, caplog):
    from gpulayer.agent.agent import _ANSWERS

    with Client(tcp(host), enroll(own_folders, "viewer"), own_key.public) as viewer:
        assert viewer.hello("viewer").kind is Kind.WELCOME
        assert viewer.ask("state", number=2).body["name"] == host.agent.host.name
        with caplog.at_level(logging.WARNING):
            for number, method in enumerate(sorted(set(_ANSWERS) - {"state"}), 3):
                answer = viewer.ask(method, number=number, cpus=1, gpus=0, kind="task", label="x", worker=b"", name="x", hosts=[])
                assert answer.kind is Kind.FAIL
                assert answer.body["error"] == "AuthError"
        assert caplog.text.count("may not ask") == len(_ANSWERS) - 1
    nothing_happened(host, peers=1)
    assert serves(host, own_key)


def test_viewer_reaches_no_worker(own_folders, canary):
    """Every kind of message to a worker that would run it."""
    with outside("--port", "0") as agent:
        own_key, viewer_key = keys.load_identity(own_folders / "home"), enroll(own_folders, "viewer")
        endpoint = f"tcp://127.0.0.1:{agent.port}"
        with Client(endpoint, own_key, own_key.public) as driver, Client(endpoint, viewer_key, own_key.public) as viewer:
            host = driver.hello().body["host"]["id"]
            answer = driver.ask("lease", cpus=0, gpus=0, kind="actor", label="target")
            worker = Address(host, answer.body["worker"])
            assert viewer.hello("viewer").kind is Kind.WELCOME
            send_everything(viewer, canary, to=worker)
            send_everything(viewer, canary, to=Address(host, driver.peer))
            send_everything(viewer, canary)
            assert viewer.ask("state", number=99).body["workers"][0]["calls"] == 0
            call = Message(Kind.CALL, 5, {"op": "method", "n": "x", "method": "x", "f": b"", "p": [0, 0]})
            driver.send(call, to=worker)
            (reply,) = driver.receive()
            assert (reply.kind, reply.id) == (Kind.FAIL, 5), "what the driver sends does arrive"
            assert len(workers_of(agent.pid)) == 1
        log = agent.end()
    assert len(re.findall(r"refused: viewer \S+ tried to send to ", log)) >= 2 * len(Kind)


def test_agent_key_gets_no_resources_and_vouches_for_nobody(host, own_key, own_folders):
    from gpulayer.agent.agent import _ANSWERS

    stranger = keys.new_pair()
    with Client(tcp(host), enroll(own_folders, "agent"), own_key.public) as other:
        assert other.hello("agent").kind is Kind.WELCOME
        mine = Address(other.peer)
        item = {"id": new_id(), "name": "x", "endpoint": "tcp://127.0.0.1:9", "key": stranger.public}
        params = {"cpus": 1, "gpus": 0, "kind": "task", "label": "x", "worker": b"", "name": "x", "hosts": [item]}
        for number, method in enumerate(sorted(set(_ANSWERS) - {"kill", "named"}), 1):
            other.send(Message(Kind.ASK, number, {"m": method, **params}), source=mine)
            (answer,) = other.receive()
            assert (answer.kind, answer.body["error"]) == (Kind.FAIL, "AuthError"), method
    nothing_happened(host, peers=1)
    with Client(tcp(host), stranger, own_key.public) as client:
        assert not client.handshake()


def test_agent_key_cannot_speak_for_this_host(host, own_key, own_folders):
    """Its frames carry a source of its choice, but not that of a driver or of the agent here."""
    with (
        Client(tcp(host), own_key, own_key.public) as driver,
        Client(tcp(host), enroll(own_folders, "agent"), own_key.public) as other,
    ):
        assert driver.hello().kind is Kind.WELCOME
        assert other.hello("agent").kind is Kind.WELCOME
        for source in (Address(host.address.host, driver.peer), host.address, NOWHERE):
            other.send(Message(Kind.TELL, 0, {"m": "closing"}), to=Address(host.address.host, driver.peer), source=source)
            other.send(Message(Kind.ASK, 1, {"m": "shutdown"}), source=source)
        other.send(Message(Kind.ASK, 2, {"m": "named", "name": "x"}), source=Address(other.peer))
        assert [message.id for message in other.receive()] == [2]
        assert driver.receive(0.2) == []
    nothing_happened(host, peers=2)


@pytest.mark.parametrize("peer", [bytes(8), None], ids=["agent peer", "host id"])
def test_identity_that_stands_for_an_agent_is_refused(host, own_key, peer):
    with Client(tcp(host), own_key, own_key.public, peer=peer if peer is not None else host.address.host) as client:
        assert client.hello("driver", 0.5) is None
    assert host.do(lambda: host.agent.peers.refused) == 1
    nothing_happened(host)


# --- versions


@pytest.mark.parametrize(
    ("more", "row"), [({"protocol": 99}, ["protocol", 99, 1]), ({"python": "2.7.18"}, ["python", "2.7", None])]
)
def test_other_versions_are_refused_with_a_table(host, own_key, more, row):
    with Client(tcp(host), own_key, own_key.public) as client:
        answer = client.hello("driver", **more)
        assert answer is not None
        assert answer.kind is Kind.REFUSED
        ours = row[2] or ".".join(host.agent.host.versions["python"].split(".")[:2])
        assert [*row[:2], ours] in answer.body["rows"]
        assert answer.body["rows"][-1][0] == "gpulayer"
    nothing_happened(host)


def test_viewer_may_run_another_python(host, own_key):
    with Client(tcp(host), own_key, own_key.public) as client:
        assert client.hello("viewer", python="3.99.0").kind is Kind.WELCOME


def test_driver_of_another_python_gets_the_table(own_folders, run_script):
    """The script says that it runs another Python, as one that does would."""
    with outside("--port", "0") as agent:
        done = run_script(
            f"""
import platform
platform.python_version = lambda: "3.99.1"
import gpulayer
try:
    gpulayer.connect(["127.0.0.1:{agent.port}"])
except gpulayer.errors.VersionMismatchError as error:
    print(error)
"""
        )
    assert done.stderr == ""
    message, header, *rows = done.stdout.splitlines()
    assert "versions" in message
    assert header.split() == ["here", "there"]
    assert ["python", "3.99", ".".join(map(str, sys.version_info[:2]))] in [row.split() for row in rows]


# --- what an enrolled but broken peer may send


def garbage(seed: int) -> Iterator[list[bytes]]:
    """Frame sets that are wrong in every part: count, route, pack, message."""
    rng = random.Random(seed)
    route, good = make_route(NOWHERE, NOWHERE), encode(Message(Kind.TELL, 0, {"m": "ping"}))
    yield from ([], [b""], [b"", b""], [route], [route, b""], [route[:-1], good], [route] * 5)
    for _ in range(300):
        yield [rng.choice([route, rng.randbytes(rng.choice([0, 16, 31, 32, 33]))]), rng.randbytes(rng.randrange(80))]
    items = [7, None, [], {}, [9], [9, 0, {}], [9, 0, {}, None], [99, 0, {}, None, None], [9, "x", {}, None, None]]
    items += [[9, 0, [], None, None], [9, 0, {}, 5, None], [4, 1, {"m": 5}, None, [1, [2**62]]], [4, 1, {}, None, [1, [-1]]]]
    items += [[9, 0, {"m": "run"}, None, None], [9, 0, {"m": "run", "run": 7}, None, None], [9, 0, {"m": ["x"]}, None, None]]
    items += [[9, 0, {b"\xff": 1}, None, None], [10, 2**40, {}, None, None], [10, -1, {}, None, None], [1, 0, {}, None, None]]
    import msgpack

    for item in items:
        yield [route, msgpack.packb([item])]
    yield [route, chunk_header(1, 0), rng.randbytes(1000)]
    yield [route, chunk_header(2**64 - 1, 2**64 - 1), b""]


def test_garbage_from_an_enrolled_peer_changes_nothing(host, own_key):
    with Client(tcp(host), own_key, own_key.public) as client:
        assert client.hello().kind is Kind.WELCOME
        for frames in garbage(seed=1):
            client.raw(*(frames or [b""]))
        answer = client.ask("state", number=77)
        assert answer is not None
        assert (answer.kind, answer.id) == (Kind.REPLY, 77)
    assert host.do(lambda: host.agent.peers.refused) > 200
    nothing_happened(host, peers=1)


def test_flood_of_hellos_is_survived_and_forgotten(host, own_key, monkeypatch):
    from gpulayer.agent import agent

    monkeypatch.setattr(agent, "DRIVER_LEASE_S", 1.0)
    with Client(tcp(host), own_key, own_key.public) as client:
        for _ in range(2000):
            client.send(Message(Kind.HELLO, 0, {"kind": "driver"}))
        assert client.hello() is not None
        assert client.ask("state") is not None
    clients = [Client(tcp(host), own_key, own_key.public) for _ in range(30)]
    for client in clients:
        assert client.hello().kind is Kind.WELCOME
    for client in clients:
        client.__exit__()
    wait_until(lambda: not host.agent.peers.known, 5, "the end of peers that say nothing more")
    assert serves(host, own_key)


@pytest.mark.parametrize(
    "change", [{"pid": "x"}, {"pid": None}, {"born_s": "now"}, {"born_s": []}, {"kind": []}, {"kind": "god"}]
)
def test_hello_that_lies_about_itself_is_refused(host, own_key, change):
    with Client(f"ipc://{host.socket}") as client:
        assert client.hello(**{"kind": "driver", **change}).kind is Kind.REFUSED
    nothing_happened(host)
    assert serves(host, own_key)


BAD_QUESTIONS = [
    ("nonsense", {}),
    (5, {}),
    (None, {}),
    ("lease", {}),
    ("lease", {"cpus": "many", "gpus": 0, "kind": "task", "label": "x"}),
    ("lease", {"cpus": 1, "gpus": float("inf"), "kind": "task", "label": "x"}),
    ("lease", {"cpus": -1, "gpus": 0, "kind": "task", "label": "x"}),
    ("lease", {"cpus": 1, "gpus": 1.5, "kind": "task", "label": "x"}),
    ("lease", {"cpus": 1, "gpus": 0, "kind": "task", "label": "x", "modules": 5}),
    ("release", {}),
    ("release", {"worker": []}),
    ("kill", {"worker": {}}),
    ("withdraw", {"cpus": 1, "gpus": 0, "count": "all"}),
    ("peers", {"hosts": 5}),
    ("peers", {"hosts": [{"id": 5}]}),
    ("peers", {"hosts": [{"id": b"12345678", "name": "x", "endpoint": "x", "key": "not a key"}]}),
]


def test_bad_questions_get_a_usage_error(host, own_key):
    with Client(tcp(host), own_key, own_key.public) as client:
        assert client.hello().kind is Kind.WELCOME
        for number, (method, params) in enumerate(BAD_QUESTIONS, 1):
            answer = client.ask(method, number=number, **params)
            assert answer is not None, (method, params)
            assert (answer.kind, answer.body["error"]) == (Kind.FAIL, "UsageError"), (method, params, answer)
    nothing_happened(host, peers=1)


# --- what is open, and what is loaded


def test_agent_listens_on_one_port_of_loopback_only(own_folders):
    with outside("--port", "0") as agent:
        listening = [c.laddr for pid in (agent.pid, *agent.below()) for c in psutil.Process(pid).net_connections() if c.laddr]
        assert [(address.ip, address.port) for address in listening if address.port] == [("127.0.0.1", agent.port)]


def test_embedded_agent_has_no_port(session):
    below = psutil.Process().children(recursive=True)
    assert [connection for process in below for connection in process.net_connections("inet")] == []


def test_runtime_folder_is_closed_to_others(own_folders):
    with outside("--port", "0") as agent:
        run = own_folders / "run"
        assert run.stat().st_mode & 0o777 == 0o700
        assert Path(agent.ready["socket"]).stat().st_mode & 0o777 == 0o600
        assert (own_folders / "home" / "identity.key").stat().st_mode & 0o777 == 0o600


def test_agent_reads_nothing_that_can_unpickle():
    """Neither its own files nor what it has loaded when it runs know a pickle of the user's."""
    for path in AGENT_SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in (module, *(f"{module}.{name}" for name in names), *names):
                assert name.split(".")[-1] not in ("serialize", "pickle", "cloudpickle", "dill", "marshal"), path


def test_agent_process_loads_no_unpickler(run_script):
    done = run_script(
        "import sys, gpulayer.agent.__main__\n"
        "print([name for name in ('gpulayer.wire.serialize', 'cloudpickle', 'torch') if name in sys.modules])"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_worker_sees_no_secret(session, own_folders):
    @gpulayer.remote
    def surroundings():
        return dict(os.environ), [Path(f"/proc/self/{name}").read_bytes() for name in ("environ", "cmdline")]

    environ, raw = gpulayer.get(surroundings.remote())
    secret = keys.load_or_make_identity(own_folders / "home").secret
    assert secret not in str(environ)
    assert not any(secret.encode() in data for data in raw)


def test_unknown_agent_key_is_an_auth_error(own_folders):
    with outside("--port", "0") as agent:
        keys.trust_host(own_folders / "home", f"127.0.0.1:{agent.port}", keys.new_pair().public)
        with pytest.raises(AuthError, match="gpulayer keys trust"):
            gpulayer.connect([f"127.0.0.1:{agent.port}"])
