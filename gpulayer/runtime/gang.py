"""A gang: the workers of one distributed run, reserved all or none, each with a rank.

    with Gang.reserve(num_nodes=2, devices=1, accelerator="cpu", name="fit") as gang:
        results = gang.run(rank_main, [(rank,) for rank in range(2)], on_event=show)

Whatever ends the `with` block ends the workers. The first rank that fails decides the error; what the others report
because of it (a closed connection, an aborted collective) is set aside.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gpulayer.errors import GPUlayerError, PlacementError, TrainingError, UsageError, VersionMismatchError
from gpulayer.resources import Address, Host, Resources, new_id
from gpulayer.runtime import session as sessions
from gpulayer.runtime.actors import ActorQueue, lease_body, release
from gpulayer.runtime.calls import Call, Shipped, pack_arguments
from gpulayer.runtime.options import Options
from gpulayer.runtime.refs import Entry
from gpulayer.runtime.session import Session
from gpulayer.scheduler.placement import place_gang
from gpulayer.wire import serialize
from gpulayer.wire.message import Message

RESERVE_TRIES = 5
RESERVE_PAUSE_S = 0.3
ECHO_S = 3.0
"""How long a failure that looks like the echo of another rank's waits for that other one to show."""

_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "DistBackendError",
    "NCCL",
    "Broken pipe",
    "gloo",
    "Timed out",
)


@dataclass(frozen=True, slots=True)
class Member:
    """One rank: where it runs."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    ip: str  # an address at which the other hosts reach it
    devices: tuple[int, ...]


class Gang:
    """See the module's docstring. Made by `reserve`."""

    def __init__(self, session: Session, name: str, members: tuple[Member, ...], queues: tuple[ActorQueue, ...]) -> None:
        self.members = members
        self.name = name
        self._session = session
        self._queues = queues
        self._id = new_id().hex()
        self._stopped = False

    @classmethod
    def reserve(cls, *, num_nodes: int, devices: int, accelerator: str, name: str = "fit", host: str | None = None) -> Gang:
        """Workers on `num_nodes` hosts, `devices` on each: all, or none.

        Raises `PlacementError` (too few hosts or devices, with what each host has) or `VersionMismatchError` (torch differs).
        """
        if num_nodes < 1 or devices < 1:
            raise UsageError(f"num_nodes={num_nodes} and devices={devices} must be at least 1")
        session = sessions.current()
        members, queues = session.io.run(_reserve(session, num_nodes, devices, accelerator, name, host))
        return cls(session, name, members, queues)

    def run(
        self,
        function: Callable[..., Any],
        args_per_rank: Sequence[tuple[Any, ...]],
        on_event: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run `function(*args)` once on every rank, at once; returns the results in rank order.

        `on_event(rank, value)` is called here for each `report(value)` in a worker. Raises `TrainingError` from the exception of
        the first rank that failed, after the whole gang has been stopped.
        """
        arrived: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        shipped = Shipped.of(function, self.name)
        entries: list[Entry] = []
        for rank, (args, actor) in enumerate(zip(args_per_rank, self._queues, strict=True)):
            arguments, refs = pack_arguments(args, {})
            call = Call("rank", f"rank {rank}", shipped, arguments, [ref._entry for ref in refs], Entry())
            call.on_yield = lambda message, rank=rank: arrived.put((rank, message))
            call.entry.when_done(lambda rank=rank: arrived.put((rank, None)))
            entries.append(call.entry)
            actor.submit(call)
        left = set(range(len(entries)))
        while left:
            rank, event = arrived.get()
            if event is not None:
                if on_event is not None:
                    on_event(rank, serialize.loads(event.frames))
                continue
            left.discard(rank)
            if entries[rank].failed is not None:
                self._fail(entries, rank, left, arrived)
        return [entry.load() for entry in entries]

    def _fail(
        self, entries: list[Entry], rank: int, left: set[int], arrived: queue.SimpleQueue[tuple[int, Message | None]]
    ) -> None:
        deadline = time.monotonic() + ECHO_S
        while _is_echo(entries[rank]) and left and time.monotonic() < deadline:
            try:
                other, event = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if event is None:
                left.discard(other)
                if entries[other].failed is not None and not _is_echo(entries[other]):
                    rank = other
        self.stop()
        member = self.members[rank]
        try:
            entries[rank].load()
        except BaseException as cause:
            text = f"rank {rank} on host {member.host} failed: {type(cause).__name__}: {cause}"
            raise TrainingError(text, rank=rank, host=member.host) from cause

    def publish(self, status: dict[str, Any]) -> None:
        """Show the run's progress to `gpulayer top`."""
        publish_run(self._session, {"id": self._id, **status})

    def stop(self) -> None:
        """End the workers. More than once is fine."""
        if self._stopped:
            return
        self._stopped = True
        for actor in self._queues:
            self._session.io.post(release, self._session, actor, f"the run {self.name!r} has ended")

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def publish_run(session: Session, run: dict[str, Any]) -> None:
    """Tell one agent of a training run; everything that looks at the cluster sees it there."""
    if session.closed is None:
        session.io.post(lambda: session.endpoint.tell(session.endpoint.home, "run", run=run))


def _is_echo(entry: Entry) -> bool:
    failure = entry.failed
    if failure is None or failure.body.get("error") != "user":
        return False
    text = f"{failure.body.get('type')} {failure.body.get('text')}"
    return "torch.distributed" in text or any(mark in text for mark in _ECHOES)


async def _reserve(
    session: Session, num_nodes: int, devices: int, accelerator: str, name: str, host: str | None
) -> tuple[tuple[Member, ...], tuple[ActorQueue, ...]]:
    on_gpu = accelerator in ("gpu", "cuda", "rocm")
    chosen = place_gang(
        num_nodes, Resources(float(devices), float(devices) if on_gpu else 0.0), session.cluster(), host=host
    ).hosts
    _check_torch(chosen)
    for attempt in range(RESERVE_TRIES):
        answers = await _ask_leases(session, chosen, devices, on_gpu, name)
        errors = [answer for answer in answers if isinstance(answer, GPUlayerError)]
        if not errors:
            return _members(session, chosen, devices, [answer for answer in answers if isinstance(answer, dict)])
        await _give_back(session, chosen, devices, answers)
        worst = next((error for error in errors if not error.facts.get("busy")), None)
        if worst is not None or attempt == RESERVE_TRIES - 1:
            raise worst or PlacementError(
                f"no room for the run {name!r} now: other work holds the hosts; wait for it, or end it (gpulayer top shows it)",
                rejected=[(host_.name, str(error)) for host_, error in zip(chosen, errors, strict=False)],
            )
        await asyncio.sleep(RESERVE_PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")


async def _ask_leases(session: Session, hosts: Sequence[Host], devices: int, on_gpu: bool, name: str) -> list[Any]:
    async def ask(host: Host, rank: int) -> Any:
        cpus = 0.0 if on_gpu else max(1.0, host.cpus // devices)
        options = Options(Resources(cpus, 1.0 if on_gpu else 0.0))
        body = lease_body(options, f"{name} rank {rank}", "gang", wait=False)
        body.update(modules=["torch"], name="")
        del body["m"]
        try:
            return await session.endpoint.ask(Address(host.id), "lease", **body)
        except GPUlayerError as error:
            return error

    asks = [ask(host, node * devices + local) for node, host in enumerate(hosts) for local in range(devices)]
    return await asyncio.gather(*asks)


async def _give_back(session: Session, hosts: Sequence[Host], devices: int, answers: list[Any]) -> None:
    for position, answer in enumerate(answers):
        if isinstance(answer, dict):
            host = hosts[position // devices]
            await session.endpoint.ask(Address(host.id), "release", worker=answer["worker"], reason="the gang is not complete")


def _members(
    session: Session, hosts: Sequence[Host], devices: int, answers: list[dict[str, Any]]
) -> tuple[tuple[Member, ...], tuple[ActorQueue, ...]]:
    members: list[Member] = []
    queues: list[ActorQueue] = []
    for rank, answer in enumerate(answers):
        node, local = divmod(rank, devices)
        host = hosts[node]
        ip = session.endpoint.channels[host.id].reached_at
        members.append(Member(rank, local, node, host.name, ip, tuple(answer["devices"])))
        queues.append(ActorQueue(session, Address(host.id, answer["worker"])))
    return tuple(members), tuple(queues)


def _check_torch(hosts: Sequence[Host]) -> None:
    first = hosts[0]
    for host in hosts:
        ours, theirs = first.versions.get("torch", "not installed"), host.versions.get("torch", "not installed")
        if theirs == "not installed":
            raise PlacementError(f"torch is not installed on {host.name}; on that host, type: pip install torch")
        if ours.split("+")[0] != theirs.split("+")[0]:
            raise VersionMismatchError(
                f"the ranks of one run need the same torch; {first.name} (here) and {host.name} (there) differ",
                host=host.name,
                rows=[("torch", ours, theirs), ("python", first.versions.get("python"), host.versions.get("python"))],
            )
