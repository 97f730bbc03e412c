"""Connections to other hosts' agents, over which this agent relays for its own drivers and workers.

A link is dialled when something is to go there, and what is to go there waits until the other agent has welcomed us. A
link that fails or falls silent is lost: who sent something over it, or waits to, is told, and the next thing to go there
dials anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpulayer.errors import HostLostError
from gpulayer.resources import AGENT_PEER, Address
from gpulayer.wire import reach
from gpulayer.wire.channel import Frame, Lane
from gpulayer.wire.message import Buffer, Kind, Message, encode, make_route, pack
from gpulayer.wire.rpc import CONFIRM_PAUSE_S, CONFIRM_TRIES, HOST_LOST_S, Channel, Dial

Frames = Sequence[Frame | Buffer]
OnLost = Callable[["Link", HostLostError], None]


@dataclass(slots=True)
class Link:
    """One connection that this agent dialled."""

    host: bytes
    channel: Channel
    heard_s: float = field(default_factory=time.monotonic)
    welcomed: bool = False
    waiting: list[tuple[bool, Frames]] = field(default_factory=list[tuple[bool, Frames]])  # (bulk?, frames) until welcomed
    used: set[tuple[Address, Address]] = field(default_factory=set[tuple[Address, Address]])  # (source, destination)


class Links:
    """All links of one agent. All methods are for the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        me: Address,
        on_frames: Callable[[bytes, Lane, list[Frame]], None],
        on_lost: OnLost,
    ) -> None:
        self._loop = loop
        self._me = me
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._dials: dict[bytes, Dial] = {}
        self._open: dict[bytes, Link] = {}
        self._hello: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def introduce(self, host: bytes, dial: Dial, hello: dict[str, Any]) -> None:
        """Learn how to reach another host's agent."""
        self._hello = hello
        self._dials[host] = dial

    def send(self, source: Address, destination: Address, bulk: bool, frames: Frames) -> bool:
        """Send frames (without their route) to a process of another host; False if nobody told us of that host."""
        link = self._open.get(destination.host) or self._dial(destination.host)
        if link is None:
            return False
        link.used.add((source, destination))
        routed = [make_route(destination, source), *frames]
        if link.welcomed:
            link.channel.send(bulk, routed)  # pyright: ignore[reportArgumentType] - zmq takes its frames like buffers
        else:
            link.waiting.append((bulk, routed))
        return True

    def heard(self, host: bytes) -> None:
        """Frames have arrived over a link."""
        if host in self._open:
            self._open[host].heard_s = time.monotonic()

    def welcomed(self, host: bytes) -> None:
        """The other agent lets us in: what waits may go."""
        link = self._open.get(host)
        if link is not None and not link.welcomed:
            link.welcomed = True
            waiting, link.waiting = link.waiting, []
            for bulk, frames in waiting:
                link.channel.send(bulk, frames)  # pyright: ignore[reportArgumentType]

    def lose(self, host: bytes, why: str) -> None:
        """Give a link up."""
        link = self._open.pop(host, None)
        if link is not None:
            link.channel.close()
            name = link.channel.dial.name
            self._on_lost(link, HostLostError(f"host {name} is lost, as seen from the host that relays to it: {why}", host=name))

    def check(self, late_s: float = 0.0) -> None:
        """From time to time: renew our place with the other agents, and give up those that are silent.

        `late_s` is for how long this agent could not listen: that time does not count.
        """
        now = time.monotonic()
        for host, link in list(self._open.items()):
            link.heard_s = min(now, link.heard_s + late_s)
            if now - link.heard_s > HOST_LOST_S:
                self.lose(host, f"nothing was heard from it for {HOST_LOST_S:g} s")
            elif link.welcomed:
                self._say(link, Message(Kind.TELL, 0, {"m": "ping"}))

    def close(self, linger_ms: int) -> None:
        """Close every link."""
        for task in self._tasks:
            task.cancel()
        for link in self._open.values():
            link.channel.close(linger_ms)
        self._open.clear()

    def _dial(self, host: bytes) -> Link | None:
        dial = self._dials.get(host)
        if dial is None:
            return None
        channel = Channel(self._loop, dial, self._me.host, lambda frames: self._on_frames(host, channel.control, frames))
        link = self._open[host] = Link(host, channel)
        channel.monitor.on_disconnect = lambda: self._spawn(self._confirm_loss(link))
        channel.monitor.failure.add_done_callback(lambda failure: self._handshake_failed(link, failure))
        self._say(link, Message(Kind.HELLO, 0, self._hello))
        return link

    def _say(self, link: Link, message: Message) -> None:
        route = make_route(Address(link.host if link.welcomed else AGENT_PEER), self._me)
        link.channel.send(False, [route, pack([encode(message)])])

    def _handshake_failed(self, link: Link, failure: asyncio.Future[reach.Handshake]) -> None:
        if not failure.cancelled() and self._open.get(link.host) is link:
            self.lose(link.host, reach.explain_handshake(link.channel.dial.name, failure.result()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _confirm_loss(self, link: Link) -> None:
        """As a session does: a dropped connection is not yet a lost host, a port that refuses is."""
        for _ in range(CONFIRM_TRIES):
            if self._open.get(link.host) is not link:
                return
            if await reach.refuses(link.channel.dial.endpoint):
                self.lose(link.host, "its agent has ended")
                return
            await asyncio.sleep(CONFIRM_PAUSE_S)
