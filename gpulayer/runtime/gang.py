"""A gang: the workers of one distributed run, reserved all or none, each with a rank.

    with Gang.reserve(num_nodes=2, devices=1, accelerator="cpu", name="fit") as gang:
        results = gang.run(rank_main, [(rank,) for rank in range(2)], on_event=show)

Whatever ends the `with` block ends the workers. The first rank that fails decides the error; what the others report
because of it (a closed connection, an aborted collective) is set aside.
"""

from __future__ import annotations

import asyncio
import ipaddress
import queue
import socket
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gpulayer.errors import GPUlayerError, PlacementError, TrainingError, UsageError, VersionMismatchError, from_facts
from gpulayer.resources import Address, Host, Resources, new_id
from gpulayer.runtime import session as sessions
from gpulayer.runtime.actors import ActorQueue, release
from gpulayer.runtime.calls import Call, Shipped, pack_arguments
from gpulayer.runtime.connect import disconnect
from gpulayer.runtime.options import Options, lease_body
from gpulayer.runtime.refs import Entry
from gpulayer.runtime.session import Session
from gpulayer.scheduler.placement import place_gang
from gpulayer.wire import serialize
from gpulayer.wire.message import Kind, Message

RESERVE_TRIES = 6
RESERVE_PAUSE_S = 0.15
WHOLE_HOST_TRIES = 3
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


@dataclass(frozen=True, slots=True)
class _Seat:
    """One rank's worker, granted."""

    member: Member
    actor: ActorQueue


class _Reservation:
    """The seats of one gang: those granted so far, and how they are given back. For the IO thread.

    A grant that arrives after `release` (Ctrl-C came while the worker was starting) is given back at once.
    """

    def __init__(self, session: Session, name: str, modules: Sequence[str]) -> None:
        self.session = session
        self.name = name
        self.modules = list(modules)
        self.seats: dict[int, _Seat] = {}  # by rank
        self._released = ""

    def take(self, seat: _Seat) -> None:
        """A rank has its worker."""
        if self._released:
            release(self.session, seat.actor, self._released)
        else:
            self.seats[seat.member.rank] = seat

    def release(self, reason: str) -> None:
        """End every worker."""
        self._released = reason
        self.give_back(reason)

    def give_back(self, reason: str) -> None:
        """End the workers that are there, to reserve anew."""
        seats, self.seats = self.seats, {}
        for seat in seats.values():
            release(self.session, seat.actor, reason)


class Gang:
    """See the module's docstring. Made by `reserve`; one that nobody holds any more has ended, too."""

    def __init__(self, reservation: _Reservation) -> None:
        self.name = reservation.name
        self.members: tuple[Member, ...] = ()
        self._session = reservation.session
        self._queues: tuple[ActorQueue, ...] = ()
        self._id = new_id().hex()
        reason = f"the run {self.name!r} has ended"
        self._end = weakref.finalize(self, self._session.io.post, reservation.release, reason)
        self._end.atexit = False  # at exit the session ends everything

    @classmethod
    def reserve(
        cls,
        *,
        num_nodes: int,
        devices: int,
        accelerator: str,
        name: str = "fit",
        host: str | None = None,
        modules: Sequence[str] = ("torch",),
    ) -> Gang:
        """Workers on `num_nodes` hosts, `devices` on each: all, or none.

        They have imported `modules` before they begin; a host imports them once for all workers that come after. Connects to
        this machine if there is no session. Raises `PlacementError` (too few hosts or devices, with what each host has) or
        `VersionMismatchError` (torch differs); after that nothing is kept, a session made for this neither.
        """
        if num_nodes < 1 or devices < 1:
            raise UsageError(f"num_nodes={num_nodes} and devices={devices} must be at least 1")
        with session_for_run() as session:
            reservation = _Reservation(session, name, modules)
            gang = cls(reservation)
            try:
                session.io.run(_reserve(reservation, num_nodes, devices, accelerator, host))
            except BaseException:
                gang.stop()
                raise
        seats = [reservation.seats[rank] for rank in range(num_nodes * devices)]
        gang.members, gang._queues = tuple(seat.member for seat in seats), tuple(seat.actor for seat in seats)
        return gang

    def run(
        self,
        function: Callable[..., Any],
        args_per_rank: Sequence[tuple[Any, ...]],
        on_event: Callable[[int, Any], None] | None = None,
        *,
        common: tuple[Any, ...] = (),
    ) -> list[Any]:
        """Run `function(*common, *args)` once on every rank, at once; returns the results in rank order.

        Each of `common` is pickled once for all ranks: the place for what is large, and for what must keep its identities.
        `on_event(rank, value)` is called here for each `report(value)` in a worker. Raises `TrainingError` from the exception of
        the first rank that failed, after the whole gang has been stopped.
        """
        arrived: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        shipped = Shipped.of(function, self.name)
        shared = [self._session.put(serialize.dumps(value)) for value in common]
        entries: list[Entry] = []
        for rank, (args, actor) in enumerate(zip(args_per_rank, self._queues, strict=True)):
            arguments, refs = pack_arguments((*shared, *args), {})
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
        self._end()

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@contextmanager
def session_for_run() -> Generator[Session, None, None]:
    """The session, made if there is none; one that was made for this ends if the block fails, so that the caller can choose."""
    connected = sessions.current_or_none() is not None
    try:
        yield sessions.current()
    except BaseException:
        if not connected:
            disconnect()
        raise


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


_unanswered: weakref.WeakKeyDictionary[Session, set[asyncio.Future[None]]] = weakref.WeakKeyDictionary()
"""The questions for workers that each session's hosts have not answered yet."""


async def _reserve(reservation: _Reservation, num_nodes: int, devices: int, accelerator: str, host: str | None) -> None:
    session, name = reservation.session, reservation.name
    if earlier := _unanswered.get(session):
        await asyncio.wait(set(earlier))  # what a run that was interrupted has asked for is given back once it is there
    on_gpu = accelerator in ("gpu", "cuda", "rocm")
    need = Resources(float(devices), float(devices) if on_gpu else 0.0)
    chosen = place_gang(num_nodes, need, session.cluster(), host=host).hosts
    _check_torch(chosen)
    addresses = await _meeting_addresses(session, chosen)
    for attempt in range(RESERVE_TRIES):
        needs = [_seat_need(session, host_, devices, on_gpu, attempt) for host_ in chosen]
        errors = await _ask_leases(reservation, chosen, addresses, needs, devices)
        if not errors:
            return
        reservation.give_back("the gang is not complete")
        worst = next((error for _, error in errors if not error.facts.get("busy")), None)
        if worst is not None or attempt == RESERVE_TRIES - 1:
            raise worst or PlacementError(
                f"no room for the run {name!r} now: other work holds the hosts; wait for it, or end it (gpulayer top shows it)",
                rejected=[(host_.name, str(error)) for host_, error in errors],
            )
        await asyncio.sleep(RESERVE_PAUSE_S * 2**attempt)


async def _meeting_addresses(session: Session, hosts: Sequence[Host]) -> list[str]:
    """A numeric address of each host at which the others reach it: names may mean something else over there."""
    found: list[str] = []
    for host in hosts:
        channel = session.endpoint.channels.get(host.id)
        name = channel.reached_at if channel else host.address.rpartition(":")[0]
        try:
            answers = await session.io.loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"host {host.name}: {name!r} is no address any more ({error.strerror})") from None
        found.append(str(answers[0][4][0]))
    loopback = [ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found]
    if any(loopback) and not all(loopback):
        name = hosts[loopback.index(True)].name
        raise UsageError(
            f"{name} is connected at a loopback address, which the other hosts of the run cannot reach; connect to it by the "
            "address that they know it by: gpulayer.connect(['10.0.0.5', ...]) after `gpulayer up --bind 10.0.0.5`"
        )
    return found


def _seat_need(session: Session, host: Host, devices: int, on_gpu: bool, attempt: int) -> tuple[Resources, int]:
    """(what one rank claims, threads it should use). On CPUs that is its share of the host; beside a GPU one CPU will do.

    If the whole host is not to be had, also not after the time in which an earlier run's workers end, it is a share of the rest.
    """
    free = next((view.cpus_free for view in session.cluster().views if view.host.id == host.id), host.cpus)
    share = max(1, int((host.cpus if attempt < WHOLE_HOST_TRIES else free) // devices))
    return (Resources(1.0, 1.0), share) if on_gpu else (Resources(float(share)), share)


async def _ask_leases(
    reservation: _Reservation,
    hosts: Sequence[Host],
    addresses: Sequence[str],
    needs: Sequence[tuple[Resources, int]],
    devices: int,
) -> list[tuple[Host, GPUlayerError]]:
    """Ask for every seat at once; those granted go to the reservation, also after a Ctrl-C here. Returns who refused."""
    endpoint, loop = reservation.session.endpoint, reservation.session.io.loop
    refused: list[tuple[Host, GPUlayerError]] = []
    asks: set[asyncio.Future[None]] = set()
    unanswered = _unanswered.setdefault(reservation.session, set())
    for rank in range(len(hosts) * devices):
        node, local = divmod(rank, devices)
        host, answered = hosts[node], loop.create_future()
        member = Member(rank, local, node, host.name, addresses[node], ())

        def on_answer(
            answer: Message, host: Host = host, member: Member = member, answered: asyncio.Future[None] = answered
        ) -> None:
            if answer.kind is Kind.FAIL:
                refused.append((host, from_facts(answer.body)))
            else:
                actor = ActorQueue(reservation.session, Address(host.id, answer.body["worker"]))
                reservation.take(_Seat(replace(member, devices=tuple(answer.body["devices"])), actor))
            answered.set_result(None)
            unanswered.discard(answered)

        need, threads = needs[node]
        body = lease_body(Options(need), f"{reservation.name} rank {rank}", "gang", wait=False)
        body.update(modules=reservation.modules, threads=threads)
        endpoint.request(Address(host.id), Kind.ASK, body, (), on_answer)
        asks.add(answered)
        unanswered.add(answered)
    await asyncio.wait(asks)
    return refused


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
