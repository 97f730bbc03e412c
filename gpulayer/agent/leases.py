"""Claims on this host's resources: asked for by drivers, granted in order of arrival, each with a worker of its own.

A lease belongs to the process that asked and ends with it. Its resources are free again when its worker has exited, not
before: GPU memory is held until then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpulayer.agent.hardware import visible_devices_env
from gpulayer.agent.pool import Pool, Worker
from gpulayer.errors import GPUlayerError, PlacementError, UsageError
from gpulayer.resources import Device, Host, Resources
from gpulayer.scheduler.ledger import Grant, Ledger, check_need

MAX_STARTING = 32

Answer = Callable[[dict[str, Any] | GPUlayerError], None]


@dataclass(slots=True)
class Lease:
    """One claim: waiting while it has no grant, then with a grant and a worker."""

    owner: bytes  # the peer that asked
    need: Resources
    kind: str  # "task", "actor" or "gang"
    label: str
    name: str
    modules: list[str]
    meta: bytes  # opaque to the agent: how to rebuild a named actor's handle
    answer: Answer
    threads: int
    grant: Grant | None = None
    worker: Worker | None = None
    blocked: bool = False
    devices: tuple[Device, ...] = field(default_factory=tuple[Device, ...])


class Leases:
    """Queue and table of one agent's leases. All methods are for the loop's thread."""

    def __init__(self, host: Host, pool: Pool, reclaim: Callable[[], None]) -> None:
        self.ledger = Ledger(host.cpus, len(host.gpus))
        self.queue: deque[Lease] = deque()
        self.active: dict[bytes, Lease] = {}  # by worker id
        self._starting: set[asyncio.Task[None]] = set()
        self._host = host
        self._pool = pool
        self._reclaim = reclaim

    def request(self, owner: bytes, body: dict[str, Any], answer: Answer) -> None:
        """Take a request; `answer` gets the worker's address, or an error."""
        try:
            lease = self._read(owner, body, answer)
        except GPUlayerError as error:
            answer(error)
            return
        if not body.get("wait", True):
            grant = None if self.queue or self._is_busy_starting() else self.ledger.grant(lease.need)
            if grant is None:
                answer(PlacementError(f"{self._host.name} has no room for {lease.need} now: {self.free_text()}", busy=True))
                return
            self._start(lease, grant)
            return
        self.queue.append(lease)
        self.pump()

    def pump(self) -> None:
        """Grant what fits, strictly in order, so that a large request is not starved by small ones."""
        while self.queue and not self._is_busy_starting():
            grant = self.ledger.grant(self.queue[0].need)
            if grant is None:
                self._reclaim()
                return
            self._start(self.queue.popleft(), grant)

    def _is_busy_starting(self) -> bool:
        """So many workers are on their way that the zygote's socket might fill up, and both sides wait for each other."""
        return len(self._starting) >= MAX_STARTING

    def release(self, owner: bytes, worker_id: bytes, reason: str) -> None:
        """End one lease of `owner`."""
        lease = self.active.get(worker_id)
        if lease is not None and lease.owner == owner and lease.worker is not None:
            self._pool.kill(lease.worker, reason)

    def withdraw(self, owner: bytes, need: Resources, count: int) -> int:
        """Drop up to `count` waiting requests of `owner` for `need`, the newest first; returns how many."""
        dropped = 0
        for lease in reversed(list(self.queue)):
            if dropped < count and lease.owner == owner and lease.need == need and lease.kind == "task":
                self.queue.remove(lease)
                lease.answer(PlacementError("withdrawn", withdrawn=True))
                dropped += 1
        if dropped:
            self.pump()
        return dropped

    def end_all_of(self, owner: bytes, reason: str) -> list[Worker]:
        """The owner has gone: drop what it waits for, end what it holds; returns the workers being ended."""
        self.queue = deque(lease for lease in self.queue if lease.owner != owner)
        ended = [lease.worker for lease in self.active.values() if lease.owner == owner and lease.worker is not None]
        for worker in ended:
            self._pool.kill(worker, reason)
        self.pump()
        return ended

    def worker_ended(self, worker: Worker) -> Lease | None:
        """A worker has exited: its resources are free."""
        lease = self.active.pop(worker.id, None)
        if lease is not None and lease.grant is not None:
            if lease.blocked:
                self.ledger.lend(lease.grant, False)
            self.ledger.release(lease.grant)
            self.pump()
        return lease

    def set_blocked(self, worker_id: bytes, blocked: bool) -> None:
        """A worker that waits for others lends its CPUs to them meanwhile, or nested tasks would wait for ever."""
        lease = self.active.get(worker_id)
        if lease is not None and lease.grant is not None and lease.blocked != blocked:
            lease.blocked = blocked
            self.ledger.lend(lease.grant, blocked)
            self.pump()

    def find(self, name: str) -> Lease | None:
        """The actor of that name."""
        return next((lease for lease in self.active.values() if name and lease.name == name), None)

    def free_text(self) -> str:
        """What is free, for an error message."""
        ledger = self.ledger
        text = f"{ledger.cpus_free:g} of {ledger.cpus:g} CPU free"
        return text + (f", {ledger.gpus_free:g} of {ledger.gpus} GPU free" if ledger.gpus else "")

    def _read(self, owner: bytes, body: dict[str, Any], answer: Answer) -> Lease:
        need = check_need(Resources(float(body["cpus"]), float(body["gpus"])))
        if not self.ledger.can_ever_grant(need):
            raise PlacementError(
                f"{self._host.name} can never hold {need}: it has {self.ledger.cpus:g} CPU and {self.ledger.gpus} GPU"
            )
        name = str(body.get("name", ""))
        taken = name and (self.find(name) or any(lease.name == name for lease in self.queue))
        if taken:
            raise UsageError(
                f"an actor named {name!r} exists already; get it with gpulayer.get_actor({name!r}), or choose another name"
            )
        modules = [str(module) for module in body.get("modules", [])]
        threads = int(body.get("threads", 0)) or max(1, int(need.cpus))
        return Lease(owner, need, str(body["kind"]), str(body["label"]), name, modules, body.get("meta", b""), answer, threads)

    def _start(self, lease: Lease, grant: Grant) -> None:
        """Everything up to the fork happens at once, so that the end of owner or worker finds the lease from here on."""
        lease.grant = grant
        lease.devices = tuple(self._host.gpus[index] for index in grant.gpus)
        threads = lease.threads
        env = {**visible_devices_env(lease.devices), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        try:
            worker = self._pool.fork(lease.label, env, threads, lease.modules)
        except GPUlayerError as error:
            self.ledger.release(grant)
            lease.answer(error)
            return
        lease.worker = worker
        self.active[worker.id] = lease
        task = asyncio.get_running_loop().create_task(self._answer_when_ready(lease, worker))
        self._starting.add(task)
        task.add_done_callback(self._has_started)

    def _has_started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        self.pump()

    async def _answer_when_ready(self, lease: Lease, worker: Worker) -> None:
        try:
            await self._pool.wait_ready(worker)
        except GPUlayerError as error:
            lease.answer(error)
        else:
            lease.answer({"worker": worker.id, "pid": worker.pid, "devices": [device.index for device in lease.devices]})
