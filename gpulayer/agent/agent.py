"""The agent: start, serve, drain, stop.

    agent = Agent(settings, AgentOptions(port=7770))
    await agent.start();  await agent.stopped.wait();  await agent.stop()

It welcomes peers, forwards their frames (peers), grants leases (leases), keeps workers (pool), and answers the
questions in `_ANSWERS`. What a question may do depends on the asker's role.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpulayer.agent import hardware, state
from gpulayer.agent.leases import Leases
from gpulayer.agent.peers import Peer, Peers
from gpulayer.agent.pool import Pool, Worker
from gpulayer.agent.welcome import Doorkeeper
from gpulayer.config import Settings
from gpulayer.errors import ActorDiedError, AuthError, GPUlayerError, UsageError, to_facts
from gpulayer.resources import Address, Host, Resources, new_id
from gpulayer.runtime import records
from gpulayer.wire import keys, security
from gpulayer.wire.authenticator import Authenticator
from gpulayer.wire.channel import Lane
from gpulayer.wire.keys import AllowList
from gpulayer.wire.message import Kind, Message
from gpulayer.wire.rpc import Dial

log = logging.getLogger("gpulayer.agent")

DRIVER_LEASE_S = 8.0
"""A driver without a connection that says nothing for so long is gone, and all it ran ends: inside the promised 10 s."""
CONNECTED_LEASE_S = 120.0
"""One whose connection stands may be busy so long; then it has been stopped, or is gone behind a proxy that is not."""
SILENT_S = 2.0
"""After so long without a word, see whether its connection stands."""
RECONNECT_S = 1.0
"""A connection that drops may come back within so long."""
CHECK_S = 0.5
KEPT_OBITUARIES = 1000
KEPT_RUNS = 20
MAX_RUN_TEXT = 16_384
MAX_OUTPUT_CHARACTERS = 16 * 1024 * 1024
"""Output that an agent sends a driver between two of its pings; beyond that the workers wait in `print`."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How to start an agent. `port` None: no TCP at all (an embedded agent); 0: any free port."""

    bind: str = "127.0.0.1"
    port: int | None = None
    name: str = ""  # what the host is called; "" for its hostname
    record: str = ""  # name of its record and socket in the runtime folder; "" for agent-PORT
    zone: str = ""
    cpus: float | None = None
    share: tuple[int, int] = (1, 1)  # the n-th of so many agents that divide this machine between them
    preload: tuple[str, ...] = ()
    embedded: bool = False


class Agent:
    """One host's agent."""

    def __init__(self, settings: Settings, options: AgentOptions) -> None:
        self.settings = settings
        self.options = options
        self.stopped = asyncio.Event()
        self.id = new_id()
        self.started_s = time.time()
        self._obituaries: dict[bytes, ActorDiedError] = {}
        self._obituary_order: deque[bytes] = deque()
        self.runs: dict[bytes, dict[str, dict[str, Any]]] = {}
        self._authenticator: Authenticator | None = None
        self._lease_check: asyncio.TimerHandle | None = None
        self._checked_s = time.monotonic()

    # --- start, serve, drain, stop

    async def start(self) -> None:
        """Open the sockets, start the zygote, leave a record for others to find."""
        self._loop = asyncio.get_running_loop()
        runtime_dir = self.settings.private_dir(self.settings.runtime_dir)
        keys_of_mine = AllowList(self.settings.home)
        self._allowed = keys_of_mine
        tcp, port = self._open_tcp()
        self._record = self.options.record or f"agent-{port}"
        self._socket_path = str(runtime_dir / f"{self._record}.sock")
        local = security.local_server_socket(self._socket_path)
        self.host = self._describe(port)
        self.sensors = hardware.Sensors(self.host.devices)
        self._doorkeeper = Doorkeeper(self.host, keys_of_mine)
        self.peers = Peers(self._loop, self.id, self._greet, self._on_message)
        self.peers.obituary = self._obituary
        self.pool = Pool(
            self._loop, runtime_dir / f"{self._record}.work", self._socket_path, self._on_lines, self._on_worker_exit
        )
        self.leases = Leases(self.host, self.pool, self._reclaim)
        if self.options.preload:
            self.pool.preload(list(self.options.preload))
        self.peers.listen(local, secure=False)
        if tcp is not None:
            self.peers.listen(tcp, secure=True)
        records.write(runtime_dir, self._record, self.host, self._socket_path, port, self.options.embedded)
        self._check_leases()
        log.info("agent %s of host %s is ready: %s", self.id.hex(), self.host.name, self.host.address or self._socket_path)

    def ready_line(self) -> dict[str, Any]:
        """What whoever started the agent needs to know."""
        port = self.host.address.rpartition(":")[2]
        return {"socket": self._socket_path, "port": int(port) if port else None, "pid": os.getpid()}

    def _open_tcp(self) -> tuple[Any, int | None]:
        if self.options.port is None:
            return None, None
        security.check_bind(self.options.bind, self.settings.home)
        identity = keys.load_or_make_identity(self.settings.home)
        self._authenticator = Authenticator(self._loop, self._allowed)
        self._authenticator.start()
        bind = f"[{self.options.bind}]" if ":" in self.options.bind else self.options.bind
        endpoint = f"tcp://{bind}:{self.options.port}"
        tcp = security.server_socket(endpoint, identity, authenticator=self._authenticator)
        return tcp, int(security.bound_port(tcp))

    def _describe(self, port: int | None) -> Host:
        address = f"{self.options.bind}:{port}" if port else ""
        host = hardware.describe(self.id, self.options.name, address, cpus=self.options.cpus)
        number, count = self.options.share
        mine = (*host.gpus[number - 1 :: count], *(device for device in host.devices if not device.is_gpu))
        cpus = max(1.0, host.cpus // count) if count > 1 else host.cpus
        return replace(host, devices=mine, cpus=cpus, pid=os.getpid(), zone=self.options.zone)

    def drain(self) -> None:
        """Tell every peer that this host is going."""
        self.peers.tell_all("closing")

    async def stop(self) -> None:
        """End all workers, close the sockets, remove the record."""
        self.drain()
        if self._lease_check is not None:
            self._lease_check.cancel()
        await self.pool.close()
        self.peers.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        records.remove(self.settings.runtime_dir, self._record)
        self.stopped.set()

    # --- peers come and go

    def _greet(self, lane: Lane, peer_id: bytes, key: str, message: Message) -> Peer | None:
        """Welcome a process, or refuse it with a reason."""
        body = message.body
        if body.get("kind") == "worker":
            worker = self.pool.welcome(peer_id, str(body.get("token", ""))) if not key else None
            refusal = None if worker else {"rows": [("worker token", "unknown", "one of this agent's")]}
        else:
            refusal = self._doorkeeper.refusal(key, body)
        if refusal is not None:
            log.warning("refused %.40s %.80r: %.300r", repr(body.get("kind")).strip("'"), body.get("hostname"), refusal)
            self.peers.answer(lane, peer_id, Message(Kind.REFUSED, 0, {**refusal, "port": self.host.address.rpartition(":")[2]}))
            return None
        peer = Peer(peer_id, str(body["kind"]), lane, key, {name: body[name] for name in _KEPT_OF_HELLO if name in body})
        self.peers.answer(lane, peer_id, Message(Kind.WELCOME, 0, {"host": self.host.to_plain()}))
        log.log(_level(peer), "welcome %s %s", peer.kind, peer.name)
        return peer

    def _peer_gone(self, peer: Peer, why: str) -> list[Worker]:
        log.log(_level(peer), "%s %s is gone: %s", peer.kind, peer.name, why)
        self.peers.forget(peer.id)
        self._allowed.withdraw(peer.id)
        self.runs.pop(peer.id, None)
        return self.leases.end_all_of(peer.id, f"its owner {peer.name} is gone ({why})")

    def _check_leases(self) -> None:
        """Twice a second: drivers that are out of reach, whose process has ended or whose key is trusted no more lose all.

        A driver may say nothing for long, as when its user's code holds the GIL: then it is its process that counts, or
        over TCP its connection: the kernel over there ends it with the process, and acknowledges what is sent until then.
        """
        self._lease_check = self._loop.call_later(CHECK_S, self._check_leases)
        now = time.monotonic()
        late_s, self._checked_s = max(0.0, now - self._checked_s - CHECK_S), now
        for peer in list(self.peers.known.values()):
            if peer.kind == "worker":
                continue
            if not peer.key:
                if not records.is_running(peer.hello["pid"], peer.hello["born_s"]):
                    self._peer_gone(peer, "its process has ended")
            elif self._is_out_of_reach(peer, now, late_s):
                self._peer_gone(peer, f"silent for {now - peer.heard_s:.0f} s")
            elif not self._doorkeeper.knows(peer.kind, peer.key):
                self._peer_gone(peer, "its key is trusted no more")
        self.peers.links.check(late_s)

    def _is_out_of_reach(self, peer: Peer, now: float, late_s: float) -> bool:
        """Over TCP. `late_s` is for how long this agent could not listen: that time does not count."""
        peer.heard_s = min(now, peer.heard_s + late_s)
        if now - peer.heard_s < SILENT_S or self.peers.is_connected(peer):
            peer.connected_s = now
        silent_s = now - peer.heard_s
        return silent_s > CONNECTED_LEASE_S or (silent_s > DRIVER_LEASE_S and now - peer.connected_s > RECONNECT_S)

    def _on_worker_exit(self, worker: Worker) -> None:
        address = Address(self.id, worker.id)
        error = ActorDiedError(
            name=worker.label, host=self.host.name, pid=worker.pid, cause=worker.cause, stderr=self.pool.stderr(worker)
        )
        self._obituaries[worker.id] = error
        self._obituary_order.append(worker.id)
        if len(self._obituary_order) > KEPT_OBITUARIES:
            del self._obituaries[self._obituary_order.popleft()]
        lease = self.leases.worker_ended(worker)
        peer = self.peers.forget(worker.id)
        concerned = set(peer.callers if peer else ())
        if lease is not None:
            concerned.add(Address(self.id, lease.owner))
        caller_last, number = worker.started_last or (Address(bytes(8)), 0)
        news = {"worker": address.to_bytes(), "last_caller": caller_last.peer, "last_number": number, **to_facts(error)}
        for caller in concerned:
            self.peers.tell(caller, "died", **news)
        self.leases.end_all_of(worker.id, f"its owner {worker.label} died")

    def _obituary(self, address: Address) -> GPUlayerError:
        if address.peer in self._obituaries:
            return self._obituaries[address.peer]
        return ActorDiedError(name=str(address), host=self.host.name, pid="?", cause="there is no such process on this host")

    def _on_lines(self, worker: Worker, stream: str, lines: list[str]) -> None:
        lease = self.leases.active.get(worker.id)
        if lease is not None:
            owner = Address(self.id, lease.owner)
            peer = self.peers.known.get(lease.owner)
            if peer is not None:
                peer.output_characters += sum(map(len, lines))
                self.pool.pause_output(worker, peer.output_characters > MAX_OUTPUT_CHARACTERS)
            running = worker.mark.name if worker.mark is not None and lease.kind == "task" else ""
            self.peers.tell(
                owner, "log", label=running or worker.label, pid=worker.pid, host=self.host.name, stream=stream, lines=lines
            )

    def _take_output_again(self, peer: Peer) -> None:
        """The driver is there and takes what it is sent: its workers may print on."""
        peer.output_characters = 0
        for lease in self.leases.active.values():
            if lease.owner == peer.id and lease.worker is not None:
                self.pool.pause_output(lease.worker, False)

    def _reclaim(self) -> None:
        """Somebody waits: ask drivers to give back workers that idle."""
        for owner in {lease.owner for lease in self.leases.active.values() if lease.kind == "task"}:
            self.peers.tell(Address(self.id, owner), "reclaim")

    # --- questions

    def _on_message(self, peer: Peer, source: Address, message: Message) -> None:
        if message.kind is Kind.TELL:
            try:
                self._on_tell(peer, source, str(message.body.get("m")), message.body)
            except _MALFORMED as error:
                self.peers.refused += 1
                log.warning("dropped a malformed message of %s: %r", peer.name, error)
        elif message.kind is Kind.ASK:
            try:
                result = self._find_answer(peer, message)(self, peer, source, message)
            except GPUlayerError as error:
                self.peers.send(source, Message(Kind.FAIL, message.id, to_facts(error)))
            except _MALFORMED as error:
                malformed = UsageError(f"question {message.body.get('m')!r} is malformed: {error!r}")
                self.peers.send(source, Message(Kind.FAIL, message.id, to_facts(malformed)))
            else:
                if result is not None:
                    self.peers.send(source, Message(Kind.REPLY, message.id, result))
        elif message.kind is Kind.CALL:
            self.peers.send(source, Message(Kind.FAIL, message.id, to_facts(UsageError("an agent runs no calls, a worker does"))))

    def _find_answer(self, peer: Peer, message: Message) -> _Answer:
        method = str(message.body.get("m"))
        answer = _ANSWERS.get(method)
        if answer is None:
            raise UsageError(f"the agent knows no question {method!r}; it knows: {', '.join(sorted(_ANSWERS))}")
        if method not in _MAY_ASK.get(peer.kind, _ANSWERS):
            self.peers.refused += 1
            log.warning("refused: %s %s may not ask %r", peer.kind, peer.name, method)
            raise AuthError(f"a key enrolled as {peer.kind} may not ask {method!r}; that takes the role driver")
        return answer

    def _on_tell(self, peer: Peer, source: Address, topic: str, body: dict[str, Any]) -> None:
        if peer.kind == "agent" and topic != "ping":
            if topic == "closing":
                self.peers.links.lose(peer.id, "its agent is shutting down")
            elif topic not in ("pong", "nudge"):
                self._refuse_tell(peer, topic)
        elif topic == "ping":
            self._take_output_again(peer)
            ledger = self.leases.ledger
            load = {"cpus_free": ledger.cpus_free, "gpus_free": ledger.gpus_free, "waiting": len(self.leases.queue)}
            self.peers.tell(source, "pong", **load)
        elif peer.kind in _MAY_ASK:
            self._refuse_tell(peer, topic)
        elif topic in ("blocked", "unblocked"):
            self.leases.set_blocked(peer.id, topic == "blocked")
        elif topic == "status" and (worker := self.pool.workers.get(peer.id)) is not None:
            worker.status = body
        elif topic == "run":
            if len(repr(body["run"])) > MAX_RUN_TEXT:
                raise ValueError("a run's status is a few numbers")
            runs = self.runs.setdefault(peer.id, {})
            runs[str(body["run"]["id"])] = {**body["run"], "driver": peer.name}
            if len(runs) > KEPT_RUNS:
                del runs[next(iter(runs))]

    def _refuse_tell(self, peer: Peer, topic: str) -> None:
        self.peers.refused += 1
        log.warning("refused: %s %s may not tell %r", peer.kind, peer.name, topic)

    def _answer_lease(self, peer: Peer, source: Address, message: Message) -> None:
        def answer(result: dict[str, Any] | GPUlayerError) -> None:
            if isinstance(result, GPUlayerError):
                self.peers.send(source, Message(Kind.FAIL, message.id, to_facts(result)))
            else:
                self.peers.send(source, Message(Kind.REPLY, message.id, result))

        self.leases.request(peer.id, message.body, answer)

    def _answer_release(self, peer: Peer, source: Address, message: Message) -> dict[str, Any]:
        self.leases.release(peer.id, message.body["worker"], str(message.body.get("reason", "released")))
        return {}

    def _answer_withdraw(self, peer: Peer, source: Address, message: Message) -> dict[str, Any]:
        need = Resources(float(message.body["cpus"]), float(message.body["gpus"]))
        return {"dropped": self.leases.withdraw(peer.id, need, int(message.body["count"]))}

    def _answer_kill(self, peer: Peer, source: Address, message: Message) -> dict[str, Any] | None:
        """End a worker; the answer comes when its process has ended, so that its name and its GPU are free by then."""
        worker = self.pool.workers.get(message.body["worker"])
        if worker is None:
            return {"found": False}
        reply = Message(Kind.REPLY, message.id, {"found": True})
        worker.ended.add_done_callback(lambda _: self.peers.send(source, reply))
        self.pool.kill(worker, str(message.body.get("reason", "killed")))
        return None

    def _answer_named(self, peer: Peer, source: Address, message: Message) -> dict[str, Any]:
        lease = self.leases.find(str(message.body["name"]))
        if lease is None or lease.worker is None or lease.worker.pid == 0:
            return {"found": False}
        return {"found": True, "worker": lease.worker.id, "meta": lease.meta, "label": lease.label}

    def _answer_peers(self, peer: Peer, source: Address, message: Message) -> dict[str, Any]:
        """A driver vouches for other agents: their keys are let in as agents, and how to dial them is known."""
        hello = self._doorkeeper.hello("agent")
        identity = keys.load_identity(self.settings.home) if any(item["key"] for item in message.body["hosts"]) else None
        for item in message.body["hosts"]:
            if item["id"] == self.id:
                continue
            if item["key"]:
                self._allowed.allow(item["key"], "agent", peer.id)
            self.peers.introduce(item["id"], Dial(item["name"], item["endpoint"], identity, item["key"] or None), hello)
        return {}

    def _answer_goodbye(self, peer: Peer, source: Address, message: Message) -> None:
        """A driver leaves: its workers end, what they printed last reaches it, then it gets its answer."""
        ended = self._peer_gone(peer, "it said goodbye")
        self.peers.know(peer)
        self._loop.create_task(self._finish_goodbye(peer, source, message.id, ended))

    async def _finish_goodbye(self, peer: Peer, source: Address, number: int, ended: list[Worker]) -> None:
        gone = [worker.gone for worker in ended]
        if gone:
            await asyncio.wait(gone, timeout=2.0)
        self.peers.send(source, Message(Kind.REPLY, number, {}))
        self._loop.call_later(0.5, self._peer_gone, peer, "it said goodbye")  # again, should it have asked for more meanwhile

    def _answer_state(self, peer: Peer, source: Address, message: Message) -> dict[str, Any]:
        return state.snapshot(self)

    def _answer_shutdown(self, peer: Peer, source: Address, message: Message) -> dict[str, Any]:
        self._loop.call_later(0.05, self.stopped.set)
        return {"pid": os.getpid()}


def _level(peer: Peer) -> int:
    """`gpulayer top` comes and goes every second: that is no news."""
    return logging.DEBUG if peer.kind == "viewer" else logging.INFO


_Answer = Callable[[Agent, Peer, Address, Message], "dict[str, Any] | None"]
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
"""What code meets that expects one plain value in a body and finds another."""
_KEPT_OF_HELLO = ("pid", "born_s", "user", "hostname")
_MAY_ASK = {"viewer": {"state"}, "agent": {"kill", "named"}}
"""What kinds of peer that are limited may ask. An agent asks for its own host's processes, which hold handles of actors here."""
_ANSWERS: dict[str, _Answer] = {
    "goodbye": Agent._answer_goodbye,
    "kill": Agent._answer_kill,
    "lease": Agent._answer_lease,
    "named": Agent._answer_named,
    "peers": Agent._answer_peers,
    "release": Agent._answer_release,
    "shutdown": Agent._answer_shutdown,
    "state": Agent._answer_state,
    "withdraw": Agent._answer_withdraw,
}
