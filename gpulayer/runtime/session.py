"""One process's part in the cluster: its connection to agents, what it has called, and what it owns for others.

A driver has one session (made by `connect`), and so has each worker (made by its main), so that remote calls, references and
`get` work the same in both. All state belongs to the IO thread; public functions post to it and wait on entries.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from gpulayer.errors import GetTimeoutError, GPUlayerError, NotConnectedError, from_facts
from gpulayer.resources import AGENT_PEER, Address, Host, Link
from gpulayer.runtime import modules, refs
from gpulayer.runtime.io_thread import IOThread
from gpulayer.runtime.refs import Entry, ObjectRef
from gpulayer.runtime.tasks import TaskPool
from gpulayer.scheduler.cluster import Cluster, HostView
from gpulayer.wire.message import Kind, Message
from gpulayer.wire.rpc import PING_S, Endpoint

OnTell = Callable[[Address, dict[str, Any]], None]


class Session:
    """See the module's docstring. `role` is "driver" or "worker"."""

    def __init__(self, io: IOThread, peer: bytes, role: str) -> None:
        self.io = io
        self.role = role
        self.hosts: dict[bytes, Host] = {}  # in the order given to connect
        self.endpoint = Endpoint(io.loop, peer, self._on_message)
        self.endpoint.on_host_lost = self._on_host_lost
        self.tasks = TaskPool(self)
        self.closed: GPUlayerError | None = None
        self.on_call: Callable[[Address, Message], None] | None = None
        self.on_tell: dict[str, OnTell] = {"died": self._on_died, "reclaim": lambda *_: self.tasks.give_back_idle()}
        self.shipped_to: dict[Address, set[bytes]] = {}  # functions that a worker has
        self.named: dict[str, Any] = {}  # handles of the named actors made here: a name holds from the moment it is given
        self.output_context = contextvars.copy_context()  # of the last call: a notebook shows output by it, cell by cell
        self.waits_in_call = False  # a worker tells its agent when it waits, see `waiting`
        self.on_wait: Callable[[bool], None] = lambda waits: None
        self._waits = 0
        self._owned: dict[int, Entry] = {}
        self._numbers: dict[int, int] = {}  # id(entry) -> number, for entries in _owned
        self._next_number = itertools.count(1)

    # --- what runs where

    @property
    def address(self) -> Address:
        """How others reach this process."""
        return Address(self.endpoint.home.host, self.endpoint.peer)

    def cluster(self) -> Cluster:
        """The hosts with what is free on each, as last heard, and the links to them."""
        views: list[HostView] = []
        links: list[Link] = []
        here = "driver" if self.role == "driver" else "worker"
        for host_id, host in list(self.hosts.items()):
            channel = self.endpoint.channels.get(host_id)
            load = channel.load if channel else {}
            free = self.tasks.free_on(host, float(load.get("cpus_free", host.cpus)), float(load.get("gpus_free", len(host.gpus))))
            views.append(HostView(host, *free, int(load.get("waiting", 0)) + self.tasks.requested_on(host_id)))
            if channel is not None and channel.latency_s is not None:
                links.append(Link(here, host.name, channel.latency_s, age_s=time.monotonic() - channel.heard_s))
        return Cluster(tuple(views), tuple(links))

    def check_open(self) -> None:
        """Raise if the session has ended, with the reason."""
        if self.closed is not None:
            raise self.closed

    # --- references

    def new_ref(self, entry: Entry, name: str) -> ObjectRef:
        """A reference to an entry of this process."""
        return ObjectRef(entry, name, self._export)

    def put(self, frames: Sequence[Any]) -> ObjectRef:
        """A reference to a payload that is here already."""
        entry = Entry()
        entry.fill(frames, shared=True)
        return self.new_ref(entry, "put")

    def adopt(self, owner: Address, number: int, name: str) -> ObjectRef:
        """A reference that arrived in a payload: ours come home, others are fetched from their owner."""
        if owner.peer == self.endpoint.peer:
            entry = self._owned.get(number)
            if entry is not None:
                return self.new_ref(entry, name)
        entry = Entry()
        self.io.post(self.endpoint.request, owner, Kind.ASK, {"m": "fetch", "number": number}, (), entry.take)
        return ObjectRef(entry, name, lambda _: (owner, number))

    def _export(self, entry: Entry) -> tuple[Address, int]:
        """Give an entry a number under which others can fetch it; it is kept until the session ends."""
        number = self._numbers.get(id(entry))
        if number is None:
            number = next(self._next_number)
            self._numbers[id(entry)] = number
            self._owned[number] = entry
        return self.address, number

    def wait_for(self, entries: Sequence[Entry], timeout_s: float | None) -> None:
        """Block until all are done. Raises `GetTimeoutError`; Ctrl-C cancels what is waited for."""
        if all(entry.done for entry in entries):
            return
        if self.io.is_current():
            raise RuntimeError("get() from a callback would wait for itself; await the reference instead")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self.waiting():
                for entry in entries:
                    left = None if deadline is None else deadline - time.monotonic()
                    if not entry.wait(left):
                        raise GetTimeoutError(
                            f"no result within {timeout_s:g} s; the call goes on (gpulayer.cancel(ref) ends it)"
                        )
        except KeyboardInterrupt:
            for entry in entries:
                if entry.cancel is not None:
                    entry.cancel(False)
            raise

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Around a wait for results, on any thread: a worker that waits in a call lends its CPUs to others."""
        if not self.waits_in_call:
            yield
            return
        self.io.post(self._count_wait, 1)
        try:
            yield
        finally:
            self.io.post(self._count_wait, -1)

    def _count_wait(self, change: int) -> None:
        before, self._waits = self._waits, self._waits + change
        if not before or not self._waits:
            self.on_wait(bool(self._waits))
            self.endpoint.tell(self.endpoint.home, "blocked" if self._waits else "unblocked")

    # --- messages in

    def _on_message(self, source: Address, message: Message) -> None:
        if message.kind is Kind.TELL:
            handler = self.on_tell.get(str(message.body.get("m")))
            if handler is not None:
                handler(source, message.body)
        elif message.kind is Kind.CALL and self.on_call is not None:
            self.on_call(source, message)
        elif message.kind is Kind.ASK and message.body.get("m") == "fetch":
            self._answer_fetch(source, message)
        elif message.kind is Kind.ASK and message.body.get("m") == "module":
            body, frames = modules.answer(str(message.body["name"]))
            self.endpoint.reply(source, message.id, body, frames)
        elif message.kind in (Kind.ASK, Kind.CALL):
            error = GPUlayerError(f"a {self.role} does not answer {message.kind.name} {message.body.get('m')!r}")
            self.endpoint.fail(source, message.id, error)

    def _answer_fetch(self, source: Address, message: Message) -> None:
        entry = self._owned.get(int(message.body["number"]))
        if entry is None:
            self.endpoint.fail(source, message.id, GPUlayerError("this reference's value is gone: its owner has dropped it"))
            return

        def answer() -> None:
            failure = entry.failed
            if failure is not None:
                self.endpoint.reply(source, message.id, failure.body, failure.frames, kind=Kind.FAIL)
            else:
                self.endpoint.reply(source, message.id, {}, entry.frames)

        entry.when_done(lambda: self.io.post(answer))

    def _on_died(self, source: Address, body: dict[str, Any]) -> None:
        address = Address.from_bytes(body["worker"])
        if source.peer != AGENT_PEER or source.host not in (address.host, self.endpoint.home.host):
            return  # only its own agent knows, or ours, that the way there is lost
        self.shipped_to.pop(address, None)
        self.named = {name: handle for name, handle in self.named.items() if not handle.is_at(address)}
        last = body.get("last_number")  # None if it is unknown, as when only the way there is lost
        self.tasks.worker_died(address, last if last == 0 or body.get("last_caller") == self.endpoint.peer else None)
        self.endpoint.fail_pending(lambda destination: destination == address, from_facts(body))

    def _on_host_lost(self, host: Host, error: GPUlayerError) -> None:
        self.hosts.pop(host.id, None)
        self.tasks.host_lost(host.id)
        if not self.hosts:
            self.end(error)

    # --- life

    def start_pings(self) -> None:
        """Renew leases once a second, from the loop's thread."""
        self.endpoint.ping_all()
        if self.closed is None:
            self.io.loop.call_later(PING_S, self.start_pings)

    def end(self, error: GPUlayerError) -> None:
        """From the loop's thread: everything that waits fails with `error`."""
        self.closed = self.closed or error
        self.tasks.fail_all(error)  # first: what waits must not be sent to a worker that gets free by failing
        self.endpoint.fail_pending(lambda _: True, error)


_current: Session | None = None
_make: Callable[[], Session] | None = None


def set_current(session: Session | None) -> None:
    """Make `session` the one that the public functions use."""
    global _current
    _current = session
    refs.adopt = session.adopt if session is not None else None
    refs.waiting = session.waiting if session is not None else nullcontext


def on_missing(make: Callable[[], Session]) -> None:
    """How `current` makes a session when there is none."""
    global _make
    _make = make


def current() -> Session:
    """This process's session. Without one, a driver connects to this machine, as `connect()` does."""
    if _current is None:
        if _make is None:
            raise NotConnectedError("there is no session; type: gpulayer.connect()")
        return _make()
    _current.check_open()
    _current.output_context = contextvars.copy_context()
    return _current


def current_or_none() -> Session | None:
    """This process's session, if there is one."""
    return _current


def _forget_in_child() -> None:
    """A forked child (a DataLoader worker) must not touch its parent's sockets, nor connect unless it says so."""
    global _current, _make
    _current = _make = None
    refs.adopt = None
    refs.waiting = nullcontext


os.register_at_fork(after_in_child=_forget_in_child)
