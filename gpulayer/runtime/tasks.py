"""Tasks and the leased workers they run on, from the caller's side.

Tasks that need the same resources share a queue. For each queue the pool asks agents for as many workers as there are
tasks waiting, sends tasks to workers as these get free, and gives workers back when nothing waits. Short tasks are sent
ahead of their turn, so that a worker need not wait for the next one to travel. All methods are for the IO thread.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpulayer.errors import GPUlayerError, HostLostError, PlacementError, TaskCancelledError, from_facts
from gpulayer.resources import Address, Host, Resources
from gpulayer.runtime.calls import HANDED_BACK, Call
from gpulayer.runtime.options import Options, lease_body
from gpulayer.scheduler.placement import place
from gpulayer.wire.message import Kind, Message

if TYPE_CHECKING:
    from gpulayer.runtime.session import Session

MAX_REQUESTS = 64
"""Lease requests of one queue that wait at agents at a time."""
LINGER_S = 1.0
"""How long an idle worker is kept in case more of the same comes."""
SHORT_S = 0.005
AHEAD = 32
"""So many tasks that usually take less than `SHORT_S` are sent to a worker ahead of their turn."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What makes tasks interchangeable for a worker."""

    need: Resources
    host: str | None
    modules: tuple[str, ...]


@dataclass(slots=True)
class _Worker:
    address: Address
    running: dict[int, Call] = field(default_factory=dict[int, Call])
    idle_since_s: float = 0.0
    waits: bool = False  # what it runs waits for others: nothing may queue behind that


@dataclass(slots=True)
class _Queue:
    shape: Shape
    waiting: deque[Call] = field(default_factory=deque[Call])
    workers: list[_Worker] = field(default_factory=list[_Worker])
    requested: dict[bytes, int] = field(default_factory=dict[bytes, int])  # by host

    @property
    def requests(self) -> int:
        """Lease requests on their way."""
        return sum(self.requested.values())


class TaskPool:
    """All task queues of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queues: dict[Shape, _Queue] = {}
        self._usual_s: dict[bytes, float] = {}  # by function: how long it usually takes

    def submit(self, shape: Shape, call: Call) -> None:
        """Queue a call; it waits for its arguments first."""
        call.entry.cancel = lambda force: self._session.io.post(self._cancel, shape, call, force)
        call.when_ready(lambda: self._session.io.post(self._ready, shape, call))

    def _ready(self, shape: Shape, call: Call) -> None:
        failure = call.failure()
        closed = self._session.closed
        if call.cancelled or failure is not None or closed is not None:
            call.entry.fail(failure) if failure else call.entry.fail_with(closed or _cancelled(call))
            return
        queue = self._queues.setdefault(shape, _Queue(shape))
        queue.waiting.append(call)
        self._dispatch(queue)

    def _dispatch(self, queue: _Queue) -> None:
        """Send what can be sent, then ask for workers for what cannot."""
        for worker in sorted(queue.workers, key=lambda worker: len(worker.running)):
            while queue.waiting and not worker.waits and len(worker.running) < self._depth(queue):
                self._send(queue, worker, queue.waiting.popleft())
        while queue.waiting and queue.requests < min(len(queue.waiting), MAX_REQUESTS):
            if not self._request_worker(queue):
                return

    def _depth(self, queue: _Queue) -> int:
        shipped = queue.waiting[0].shipped
        usual_s = self._usual_s.get(shipped.digest, SHORT_S) if shipped else SHORT_S
        return AHEAD if usual_s < SHORT_S else 1

    def _send(self, queue: _Queue, worker: _Worker, call: Call) -> None:
        session = self._session
        body, frames = call.message_parts(session.shipped_to.setdefault(worker.address, set()))
        started_s = time.monotonic()

        def on_reply(message: Message) -> None:
            worker.running.pop(number, None)
            worker.waits = bool(worker.running) and (worker.waits or message.body.get("error") == HANDED_BACK)
            if message.body.get("error") == HANDED_BACK and not call.cancelled:
                call.sent = None
                queue.waiting.appendleft(call)
                self._dispatch(queue)
                return
            self._note_time(call, message, time.monotonic() - started_s)
            if message.body.get("error") == "ActorDiedError":  # the worker is named after its first task, not this one
                message.body["facts"]["name"] = call.name
            call.settle(message)
            if not worker.running:
                worker.idle_since_s = time.monotonic()
            if queue.waiting:
                self._dispatch(queue)
            elif not worker.running:
                self._nothing_waits(queue)

        number = session.endpoint.request(worker.address, Kind.CALL, body, frames, on_reply, call.on_yield)
        call.sent = (worker.address, number)
        worker.running[number] = call

    def _note_time(self, call: Call, message: Message, elapsed_s: float) -> None:
        if call.shipped is not None and message.kind is Kind.REPLY:
            took_s = float(message.body.get("s", elapsed_s))
            old = self._usual_s.get(call.shipped.digest, took_s)
            self._usual_s[call.shipped.digest] = max(took_s, 0.8 * old + 0.2 * took_s)  # one long run counts at once

    # --- workers

    def _request_worker(self, queue: _Queue) -> bool:
        session, shape = self._session, queue.shape
        try:
            host = place(shape.need, session.cluster(), host=shape.host).hosts[0]
        except GPUlayerError as error:
            for call in queue.waiting:
                call.entry.fail_with(error)
            queue.waiting.clear()
            return False
        queue.requested[host.id] = queue.requested.get(host.id, 0) + 1
        body = lease_body(Options(shape.need), queue.waiting[0].name, "task")
        body["modules"] = list(shape.modules)
        session.endpoint.request(Address(host.id), Kind.ASK, body, (), lambda answer: self._got_answer(queue, host, answer))
        return True

    def _got_answer(self, queue: _Queue, host: Host, answer: Message) -> None:
        queue.requested[host.id] -= 1
        if answer.kind is Kind.FAIL:
            error = from_facts(answer.body)
            withdrawn = isinstance(error, PlacementError) and error.facts.get("withdrawn")
            elsewhere = isinstance(error, HostLostError) and self._session.hosts
            if not withdrawn and not elsewhere and queue.waiting:
                queue.waiting.popleft().entry.fail_with(error)
            self._dispatch(queue)
            return
        worker = _Worker(Address(host.id, answer.body["worker"]), idle_since_s=time.monotonic())
        queue.workers.append(worker)
        self._dispatch(queue)
        if not worker.running:
            self._nothing_waits(queue)

    def _nothing_waits(self, queue: _Queue) -> None:
        self._withdraw(queue)
        self._session.io.loop.call_later(LINGER_S, self._give_back, queue, LINGER_S)
        if any(other.waiting for other in self._queues.values() if other is not queue):
            self._give_back(queue, 0.0)

    def _withdraw(self, queue: _Queue) -> None:
        need = queue.shape.need
        for host_id, count in queue.requested.items():
            if count and host_id in self._session.endpoint.channels:
                body: dict[str, Any] = {"m": "withdraw", "cpus": need.cpus, "gpus": need.gpus, "count": count}
                self._session.endpoint.request(Address(host_id), Kind.ASK, body, (), lambda _: None)

    def _give_back(self, queue: _Queue, idle_s: float) -> None:
        if queue.waiting:
            return
        now = time.monotonic()
        for worker in list(queue.workers):
            if not worker.running and now - worker.idle_since_s >= idle_s * 0.99:
                queue.workers.remove(worker)
                body = {"m": "release", "worker": worker.address.peer, "reason": "idle"}
                self._session.endpoint.request(Address(worker.address.host), Kind.ASK, body, (), lambda _: None)

    def give_back_idle(self) -> None:
        """Somebody else waits for resources: return every worker that has nothing to do."""
        for queue in self._queues.values():
            self._give_back(queue, 0.0)

    # --- what goes wrong

    def _cancel(self, shape: Shape, call: Call, force: bool) -> None:
        call.cancelled = True
        queue = self._queues.get(shape)
        if queue is not None and call in queue.waiting:
            queue.waiting.remove(call)
        if call.sent is None:
            call.entry.fail_with(_cancelled(call))
            return
        cancel_sent(self._session, call, force and self._is_running(call))

    def _is_running(self, call: Call) -> bool:
        """Whether a call is the one that its worker runs; others sent ahead can be dropped without ending the worker."""
        firsts = (next(iter(worker.running.values()), None) for queue in self._queues.values() for worker in queue.workers)
        return any(first is call for first in firsts)

    def worker_died(self, address: Address, started_last: int | None) -> None:
        """A worker has exited. What it never started (numbers above `started_last`, if that is known) runs elsewhere."""
        for queue in self._queues.values():
            for worker in [worker for worker in queue.workers if worker.address == address]:
                queue.workers.remove(worker)
                for number, call in reversed(list(worker.running.items())):
                    if started_last is not None and number > started_last and not call.cancelled:
                        self._session.endpoint.withdraw(number)
                        call.sent = None
                        queue.waiting.appendleft(call)
                self._dispatch(queue)

    def host_lost(self, host_id: bytes) -> None:
        """A host is gone with all its workers."""
        for queue in self._queues.values():
            queue.workers = [worker for worker in queue.workers if worker.address.host != host_id]

    def fail_all(self, error: GPUlayerError) -> None:
        """The session ends: what waits fails."""
        for queue in self._queues.values():
            for call in queue.waiting:
                call.entry.fail_with(error)
            queue.waiting.clear()

    # --- what the placement needs to know

    def requested_on(self, host_id: bytes) -> int:
        """Lease requests of ours that wait on a host."""
        return sum(queue.requested.get(host_id, 0) for queue in self._queues.values())

    def free_on(self, host: Host, cpus_free: float, gpus_free: float) -> tuple[float, float]:
        """What is free on a host: as it last said, and never more than what our own requests leave of it."""
        cpus = gpus = 0.0
        for queue in self._queues.values():
            mine = sum(worker.address.host == host.id for worker in queue.workers) + queue.requested.get(host.id, 0)
            cpus += mine * queue.shape.need.cpus
            gpus += mine * queue.shape.need.gpus
        return min(cpus_free, host.cpus - cpus), min(gpus_free, len(host.gpus) - gpus)


def cancel_sent(session: Session, call: Call, force: bool) -> None:
    """Cancel a call that a worker has: kindly, or with `force` by ending the worker."""
    assert call.sent is not None
    address, number = call.sent
    if force:
        body = {"m": "kill", "worker": address.peer, "reason": f"{call.name} was cancelled with force=True"}
        session.endpoint.request(Address(address.host), Kind.ASK, body, (), lambda _: None)
    else:
        session.endpoint.tell(address, "cancel", number=number)


def _cancelled(call: Call) -> TaskCancelledError:
    return TaskCancelledError(f"{call.name} was cancelled before it ran")
