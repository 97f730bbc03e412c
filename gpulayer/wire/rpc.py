"""Requests and answers between processes: what a driver and a worker use to talk to agents and, through them, to anyone.

    endpoint = Endpoint(loop, new_id(), on_message)
    host = await endpoint.connect(Dial("gpu1:7770", "tcp://gpu1:7770", identity, server_key), hello)
    answer = await endpoint.ask(Address(host.id), "state")

An endpoint keeps one channel (a control lane and a bulk lane) to each agent it dialled. Addresses on other hosts are
reached through the first agent dialled, which relays.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from gpulayer.errors import (
    ActorDiedError,
    AuthError,
    ConnectError,
    GPUlayerError,
    HostLostError,
    UsageError,
    VersionMismatchError,
    from_facts,
    to_facts,
)
from gpulayer.resources import AGENT_PEER, Address, Host
from gpulayer.wire import reach, security
from gpulayer.wire.channel import Lane
from gpulayer.wire.courier import Courier
from gpulayer.wire.keys import KeyPair
from gpulayer.wire.message import Buffer, Kind, Message, WireError, read_route

CONTROL, BULK = b"C", b"B"
NOWHERE = Address(bytes(8))
"""Where a HELLO goes: to the agent that is being dialled, whose id only its answer tells."""
CONNECT_TIMEOUT_S = 10.0
HOST_LOST_S = 15.0
PING_S = 1.0
CONFIRM_TRIES = 5
CONFIRM_PAUSE_S = 0.1
KEPT_TEXT = 64 * 1024
"""Characters that are kept of each text in a failure that would not fit into one frame."""

log = logging.getLogger("gpulayer.wire")

OnReply = Callable[[Message], None]
OnFrames = Callable[[list[zmq.Frame]], None]


@dataclass(frozen=True, slots=True)
class Dial:
    """How to reach an agent. `name` is what the user wrote; `server_key` is None for an ipc endpoint."""

    name: str
    endpoint: str
    identity: KeyPair | None = None
    server_key: str | None = None


@dataclass(slots=True)
class _Pending:
    destination: Address
    on_reply: OnReply
    on_yield: OnReply | None


def open_socket(dial: Dial, routing_id: bytes, prepare: security.Prepare = lambda _: None) -> zmq.Socket[bytes]:
    """A socket on its way to an agent: with CURVE over TCP, guarded by the folder's mode over ipc."""
    if dial.server_key is None or dial.identity is None:
        path = dial.endpoint.removeprefix("ipc://")
        return security.local_client_socket(path, routing_id=routing_id, prepare=prepare)
    return security.client_socket(
        dial.endpoint, routing_id=routing_id, identity=dial.identity, server_key=dial.server_key, prepare=prepare
    )


class Channel:
    """The two lanes to one agent, and what is known of its health."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dial: Dial, peer: bytes, on_frames: OnFrames) -> None:
        self.dial = dial
        self.host: Host | None = None
        self.heard_s = time.monotonic()
        self.latency_s: float | None = None
        self.load: dict[str, Any] = {}
        self._pinged_s = 0.0
        self.monitor = reach.Monitor(loop)
        control = open_socket(dial, CONTROL + peer, self.monitor.watch)
        self.control = Lane(control, loop, on_frames)
        self._lanes = (self.control, Lane(open_socket(dial, BULK + peer), loop, on_frames))

    @property
    def reached_at(self) -> str:
        """The address at which the host was reached; loopback over ipc."""
        if self.dial.endpoint.startswith("ipc://"):
            return "127.0.0.1"
        return self.dial.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def send(self, bulk: bool, frames: Sequence[Buffer]) -> None:
        """Hand one frame set to a lane."""
        self._lanes[bulk].send(frames, copy=not bulk)

    def ping_sent(self) -> None:
        """Note when the ping left, for the latency that the pong gives."""
        self._pinged_s = time.monotonic()

    def pong(self, load: dict[str, Any]) -> None:
        """Note an answer to a ping."""
        self.heard_s = time.monotonic()
        self.latency_s = self.heard_s - self._pinged_s
        self.load = load

    def close(self, linger_ms: int = 0) -> None:
        """Close both lanes."""
        self.monitor.close()
        for lane in self._lanes:
            lane.close(linger_ms)


def _refusal(name: str, rows: list[Any]) -> ConnectError:
    """What a REFUSED means: a key whose role is too small, or versions that do not fit."""
    roles = next((row for row in rows if row[0] == "role of the key"), None)
    if roles is not None:
        return AuthError(
            f"{name} knows this machine's key as {roles[1]}, and this needs {roles[2]}; "
            "there, type: gpulayer keys add PUBLIC-KEY --role driver",
            host=name,
        )
    return VersionMismatchError(f"{name} runs versions that do not fit ours", host=name, rows=rows)


class Endpoint:
    """One process's end of the wire. Every method is for the loop's thread, except `post`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: bytes, on_message: Callable[[Address, Message], None]) -> None:
        self.peer = peer
        self.loop = loop
        self.channels: dict[bytes, Channel] = {}
        self.on_host_lost: Callable[[Host, GPUlayerError], None] = lambda host, error: None
        self._on_message = on_message
        self._courier = Courier(loop, self._transmit, self._deliver)
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._dialling: Channel | None = None
        self._speaking: Channel | None = None  # whose frames are being read
        self._greeting: asyncio.Future[Message] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._home: bytes | None = None
        self._lost: dict[bytes, HostLostError] = {}
        self._pinged_s = time.monotonic()

    # --- connecting

    async def connect(self, dial: Dial, hello: dict[str, Any], timeout_s: float = CONNECT_TIMEOUT_S) -> Host:
        """Shake hands with one agent (one at a time). Raises a `ConnectError` that says what is wrong."""
        await reach.check(dial.name, dial.endpoint, timeout_s)
        channel = Channel(self.loop, dial, self.peer, lambda frames: self._on_frames(channel, frames))
        self._dialling, self._greeting = channel, self.loop.create_future()
        try:
            self._courier.send(NOWHERE, Message(Kind.HELLO, 0, hello))
            host = await self._wait_greeting(channel, dial, timeout_s)
        except BaseException:
            channel.close()
            if channel.host is not None:
                self.channels.pop(channel.host.id, None)
            raise
        finally:
            self._dialling = self._greeting = None
            self._courier.forget(NOWHERE)
        channel.monitor.on_disconnect = lambda: self._spawn(self._confirm_loss(channel))
        return host

    async def _wait_greeting(self, channel: Channel, dial: Dial, timeout_s: float) -> Host:
        assert self._greeting is not None
        failed = channel.monitor.failure
        await asyncio.wait({self._greeting, failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._greeting.done():
            answer = self._greeting.result()
            if channel.host is not None:
                return channel.host
            raise _refusal(dial.name, answer.body.get("rows", []))
        if failed.done():
            raise AuthError(reach.explain_handshake(dial.name, failed.result()), host=dial.name)
        raise ConnectError(
            f"{dial.name} accepted the connection but did not answer within {timeout_s:g} s; is it overloaded, "
            + (
                "is a firewall in between, or is it connected already under another name?"
                if self.channels
                else "or is a firewall in between?"
            ),
            host=dial.name,
        )

    async def _confirm_loss(self, channel: Channel) -> None:
        """A dropped connection is not yet a lost host; a port that refuses is. A process that ends may close that one last."""
        assert channel.host is not None
        for _ in range(CONFIRM_TRIES):
            if await reach.refuses(channel.dial.endpoint):
                self.lose(channel.host.id, "its agent has ended")
                return
            await asyncio.sleep(CONFIRM_PAUSE_S)

    def lose(self, host_id: bytes, why: str) -> None:
        """Give a host up: every request that waits for it fails with `HostLostError`."""
        channel = self.channels.pop(host_id, None)
        if channel is None or channel.host is None:
            return
        channel.close()
        name = channel.host.name
        error = HostLostError(f"host {name} ({channel.dial.name}) is lost: {why}", host=name)
        self._lost[host_id] = error
        relayed = self._home == host_id
        if relayed:
            self._home = next(iter(self.channels), host_id)
        self.on_host_lost(channel.host, error)  # first: nothing that fails now may be sent there again
        self.fail_pending(lambda to: to.host == host_id or (relayed and to.host not in self.channels), error)
        self._courier.forget_host(host_id)

    def ping_all(self) -> None:
        """Renew this process's lease with every agent, and give up agents that have been silent for too long.

        Called every `PING_S`. Time in which it was not, because this process did not get to it, tells nothing of the agents.
        """
        now = time.monotonic()
        late_s, self._pinged_s = now - self._pinged_s - PING_S, now
        if late_s > PING_S:
            for channel in self.channels.values():
                channel.heard_s = min(now, channel.heard_s + late_s)
        for host_id, channel in list(self.channels.items()):
            if now - channel.heard_s > HOST_LOST_S:
                self.lose(host_id, f"nothing was heard from it for {HOST_LOST_S:g} s")
                continue
            channel.ping_sent()
            self.tell(Address(host_id), "ping")

    # --- asking and answering

    def request(
        self,
        destination: Address,
        kind: Kind,
        body: dict[str, Any],
        frames: Sequence[Buffer],
        on_reply: OnReply,
        on_yield: OnReply | None = None,
    ) -> int:
        """Send a request; `on_reply` gets its REPLY or FAIL, in a later turn of the loop. Returns the request's id."""
        number = next(self._ids)
        self._pending[number] = _Pending(destination, on_reply, on_yield)
        if self._way(destination) is None:
            name = destination.host.hex()
            unknown = HostLostError(f"no agent is connected that leads to host {name}", host=name)
            self.loop.call_soon(self._fail_one, number, self._lost.get(destination.host, unknown))
            return number
        try:
            self._courier.send(destination, Message(kind, number, body, frames))
        except WireError as error:
            self.loop.call_soon(self._fail_one, number, UsageError(f"the request cannot be sent: {error}"))
        return number

    async def ask(self, destination: Address, method: str, /, **params: Any) -> dict[str, Any]:
        """Ask an agent (or another process) something, and wait. Raises what the other side raised."""
        answer: asyncio.Future[Message] = self.loop.create_future()

        def on_reply(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        self.request(destination, Kind.ASK, {"m": method, **params}, (), on_reply)
        message = await answer
        if message.kind is Kind.FAIL:
            raise from_facts(message.body)
        return message.body

    def tell(self, destination: Address, topic: str, /, **params: Any) -> None:
        """Say something that needs no answer."""
        self._courier.send(destination, Message(Kind.TELL, 0, {"m": topic, **params}))

    def reply(
        self, destination: Address, number: int, body: dict[str, Any], frames: Sequence[Buffer] = (), kind: Kind = Kind.REPLY
    ) -> None:
        """Answer request `number` of `destination`. Too long texts of a failure are cut."""
        try:
            self._courier.send(destination, Message(kind, number, body, frames))
        except WireError as error:
            if kind is Kind.FAIL:
                self._courier.send(destination, Message(kind, number, _shortened(body), frames))
            else:
                self.fail(destination, number, UsageError(f"the answer cannot be sent: {error}"))

    def fail(self, destination: Address, number: int, error: GPUlayerError) -> None:
        """Answer request `number` with an error of our own tree."""
        self.reply(destination, number, to_facts(error), kind=Kind.FAIL)

    def withdraw(self, number: int) -> None:
        """Expect no answer to a request any more."""
        self._pending.pop(number, None)

    def fail_pending(self, concerns: Callable[[Address], bool], error: GPUlayerError) -> None:
        """Fail every request whose destination is concerned."""
        for number, pending in list(self._pending.items()):
            if concerns(pending.destination):
                self._courier.forget(pending.destination, ended=isinstance(error, ActorDiedError))
                self._fail_one(number, error)

    def _fail_one(self, number: int, error: GPUlayerError) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:  # another's failure may have taken it along
            pending.on_reply(Message(Kind.FAIL, number, to_facts(error)))

    @property
    def home(self) -> Address:
        """The agent that relays for this process."""
        if self._home is None:
            raise ConnectError("this process is not connected to any agent")
        return Address(self._home)

    async def close(self, linger_ms: int = 200) -> None:
        """Send what waits, then close every channel."""
        self._courier.flush()
        for task in self._tasks:
            task.cancel()
        for channel in self.channels.values():
            channel.close(linger_ms)
        self.channels.clear()

    # --- lanes

    def _way(self, destination: Address) -> Channel | None:
        if destination == NOWHERE:
            return self._dialling
        return self.channels.get(destination.host) or self.channels.get(self._home or b"")

    def _transmit(self, destination: Address, bulk: bool, frames: list[Buffer]) -> None:
        channel = self._way(destination)
        if channel is not None:
            channel.send(bulk, frames)

    def _on_frames(self, channel: Channel, frames: list[zmq.Frame]) -> None:
        self._speaking = channel
        try:
            _, source = read_route(frames[0].buffer)
            self._courier.receive(source, frames[1:])
        except WireError as error:
            self.loop.call_exception_handler({"message": f"dropped a malformed frame: {error}"})

    def _deliver(self, source: Address, message: Message) -> None:
        if message.kind in (Kind.REPLY, Kind.FAIL, Kind.YIELD):
            self._take_answer(source, message)
        elif message.kind in (Kind.WELCOME, Kind.REFUSED):
            self._take_greeting(message)
        elif message.kind is Kind.TELL and message.body.get("m") == "pong" and source.peer == AGENT_PEER:
            channel = self.channels.get(source.host)
            if channel is not None:
                channel.pong(message.body)
        else:
            self._on_message(source, message)

    def _take_answer(self, source: Address, message: Message) -> None:
        pending = self._pending.get(message.id)
        if pending is None:
            return
        if not self._may_answer(source, pending.destination):
            log.warning("dropped a %s of %s to a request that went to %s", message.kind.name, source, pending.destination)
        elif message.kind is not Kind.YIELD:
            del self._pending[message.id]
            pending.on_reply(message)
        elif pending.on_yield is not None:
            pending.on_yield(message)

    def _may_answer(self, source: Address, asked: Address) -> bool:
        """The process that was asked and the agents on the way there may; agents see to it that nobody else's name is used.

        A driver is at home on several hosts: its answer comes by way of our own agent under that one's address.
        """
        if source.host not in (asked.host, self._home):
            return False
        return source.peer in (AGENT_PEER, asked.peer)

    def _take_greeting(self, message: Message) -> None:
        channel = self._speaking
        if channel is self._dialling and self._greeting is not None:
            if not self._greeting.done():
                if message.kind is Kind.WELCOME:
                    self._use(channel, Host.from_plain(message.body["host"]))
                self._greeting.set_result(message)
        elif message.kind is Kind.REFUSED and channel is not None and channel.host is not None:
            self.lose(
                channel.host.id, "its agent does not know us any more: it was restarted, or heard nothing from us for too long"
            )

    def _use(self, channel: Channel | None, host: Host) -> None:
        """A channel is open: at once, for what comes behind the WELCOME may have to be answered before `connect` goes on."""
        assert channel is not None
        channel.host = host
        self.channels[host.id] = channel
        self._home = self._home or host.id

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _shortened(value: Any) -> Any:
    """The same plain value with each long text cut in its middle."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > KEPT_TEXT:
        half = KEPT_TEXT // 2
        return f"{value[:half]}\n... {len(value) - KEPT_TEXT} characters left out ...\n{value[-half:]}"
    return value
