"""Who is connected to this agent, and the forwarding of their frames: unopened, uncopied, with the sender's true address.

A peer is a driver, a worker, a viewer or another agent. Until it has said HELLO and been welcomed, nothing of it is
looked at but that HELLO. Over TCP a peer is its CURVE key, checked on every frame set; over ipc it is this user.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpulayer.agent.links import Link, Links
from gpulayer.errors import GPUlayerError, HostLostError, to_facts
from gpulayer.resources import AGENT_PEER, Address
from gpulayer.wire.channel import Frame, Lane, Socket
from gpulayer.wire.courier import Courier
from gpulayer.wire.message import Buffer, Kind, Message, WireError, encode, make_route, pack, read_route, unpack
from gpulayer.wire.rpc import BULK, CONTROL, Dial
from gpulayer.wire.security import sender_key

log = logging.getLogger("gpulayer.agent")

STRANGER_BYTES = 16 * 1024
"""Frames of those who may only ask or say hello: msgpack grows seventyfold when it is opened, so they are small."""
_NOWHERE = bytes(8)
_BULK_LANE_S = 5.0
_BULK_RETRY_S = 0.005


@dataclass(slots=True)
class Peer:
    """One welcomed process."""

    id: bytes
    kind: str  # "driver", "worker", "agent" or "viewer"
    lane: Lane
    key: str  # its public key, "" over ipc
    hello: dict[str, Any]
    heard_s: float = field(default_factory=time.monotonic)
    output_characters: int = 0  # of its workers' output, sent to it since its last ping
    connected_s: float = field(default_factory=time.monotonic)  # when its connection was last seen to stand
    callers: set[Address] = field(default_factory=set[Address])  # who has sent it anything: they learn of its end

    @property
    def name(self) -> str:
        """Who it is, for people."""
        return f"{self.hello.get('user', '?')}@{self.hello.get('hostname', '?')}:{self.hello.get('pid', '?')}"


Greet = Callable[[Lane, bytes, str, Message], "Peer | None"]
OnMessage = Callable[[Peer, Address, Message], None]


class Peers:
    """The switchboard of one agent. All methods are for the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: bytes, greet: Greet, on_message: OnMessage) -> None:
        self.known: dict[bytes, Peer] = {}
        self.obituary: Callable[[Address], GPUlayerError] = lambda address: GPUlayerError(f"{address} is unknown here")
        self.refused = 0
        self._loop = loop
        self._me = Address(host)
        self._greet = greet
        self._on_message = on_message
        self._courier = Courier(loop, self._transmit, lambda source, message: None)  # what comes goes by `_take_own`
        self._host_keys: dict[bytes, str] = {}  # whose the id of another host is
        self._lanes: list[Lane] = []
        self.links = Links(loop, self._me, self._take_link, self._link_lost)

    def listen(self, socket: Socket, *, secure: bool) -> None:
        """Serve a bound ROUTER; `secure` says that its frames carry the peer's key."""

        def on_frames(frames: list[Frame]) -> None:
            self._take(lane, secure, frames)

        lane = Lane(socket, self._loop, on_frames)
        self._lanes.append(lane)

    def send(self, destination: Address, message: Message) -> None:
        """Send a message of the agent's own."""
        self._courier.send(destination, message)

    def tell(self, destination: Address, topic: str, /, **params: Any) -> None:
        """Say something that needs no answer."""
        self.send(destination, Message(Kind.TELL, 0, {"m": topic, **params}))

    def answer(self, lane: Lane, peer_id: bytes, message: Message) -> None:
        """Answer a process that is not (yet) a peer."""
        route = make_route(Address(_NOWHERE, peer_id), self._me)
        lane.send([CONTROL + peer_id, route, pack([encode(message)])])

    def introduce(self, host: bytes, dial: Dial, hello: dict[str, Any]) -> None:
        """A driver says how to reach another host's agent, and with that, whose its id is."""
        self._host_keys[host] = dial.server_key or ""
        squatter = self.known.get(host)
        if squatter is not None and (squatter.kind != "agent" or squatter.key != self._host_keys[host]):
            self.forget(host)
        self.links.introduce(host, dial, hello)

    def is_connected(self, peer: Peer) -> bool:
        """Whether the connection of a peer stands, as libzmq knows without that peer's doing: what is sent there has a way."""
        route = make_route(_own_address(self._me.host, peer), self._me)
        nudge = pack([encode(Message(Kind.TELL, 0, {"m": "nudge"}))])
        return peer.lane.send([CONTROL + peer.id, route, nudge])

    def tell_all(self, topic: str) -> None:
        """Say something to every peer."""
        for peer in list(self.known.values()):
            self.tell(_own_address(self._me.host, peer), topic)

    def know(self, peer: Peer) -> None:
        """Welcome a peer: from now on its frames are looked at, and others may reach it."""
        self.known[peer.id] = peer

    def forget(self, peer_id: bytes) -> Peer | None:
        """A peer has gone."""
        self._courier.forget(Address(self._me.host, peer_id))
        return self.known.pop(peer_id, None)

    def close(self, linger_ms: int = 200) -> None:
        """Send what waits and close every socket."""
        self._courier.flush()
        self.links.close(linger_ms)
        for lane in self._lanes:
            lane.close(linger_ms)

    # --- frames in

    def _take(self, lane: Lane, secure: bool, frames: list[Frame]) -> None:
        try:
            identity = frames[0].bytes
            kind, peer_id = identity[:1], identity[1:]
            if kind not in (CONTROL, BULK) or len(peer_id) != 8 or len(frames) < 3:
                raise WireError("an identity is a lane and 8 bytes, followed by a route and at least one frame")
            if peer_id in (AGENT_PEER, self._me.host):
                raise WireError("an identity that stands for an agent")
            key = sender_key(frames[-1]) if secure else ""
            if key is None:
                raise WireError("a frame without the key of its sender")
            peer = self.known.get(peer_id)
            if (peer is None or peer.kind == "viewer") and sum(map(len, frames)) > STRANGER_BYTES:
                raise WireError("more bytes than a hello or a viewer's question has")
            if peer is None or peer.key != key or peer.lane is not lane:
                if kind == BULK:  # a process says hello on its control lane
                    raise WireError("bulk from a process that has not said hello")
                self._take_hello(lane, peer_id, key, frames)
                return
            peer.heard_s = time.monotonic()
            destination, source = read_route(frames[1].buffer)
            if peer.kind != "agent":
                source = Address(self._me.host, peer_id)
            elif source.host != peer_id:
                raise WireError("an agent speaks for its own host's processes only")
            self._forward(destination, source, kind == BULK, frames[2:], peer)
        except WireError as error:
            self.refused += 1
            log.warning("dropped a malformed frame set: %s", error)

    def _take_hello(self, lane: Lane, peer_id: bytes, key: str, frames: list[Frame]) -> None:
        messages = unpack(frames[2].buffer)
        if not messages or messages[0].kind is not Kind.HELLO or peer_id in self.known:
            self.refused += 1
            first = messages[0].kind.name if messages else "none"
            log.warning("refused a %s over %s from a process that has not said hello", first, "TCP" if key else "ipc")
            refusal = {"rows": [["first message", first, "HELLO"]]}
            self.answer(lane, peer_id, Message(Kind.REFUSED, 0, refusal))
            return
        owner = self._host_keys.get(peer_id)
        if owner is not None and (owner != key or messages[0].body.get("kind") != "agent"):
            self.refused += 1
            log.warning("refused a process that claims to be host %s, whose key it does not have", peer_id.hex())
            self.answer(lane, peer_id, Message(Kind.REFUSED, 0, {"rows": [["host id", peer_id.hex(), "one of its own"]]}))
            return
        peer = self._greet(lane, peer_id, key, messages[0])
        if peer is None:
            self.refused += 1
            return
        if peer.kind == "agent":
            self._host_keys[peer_id] = key
        self.know(peer)
        for message in messages[1:]:
            self._on_message(peer, Address(self._me.host, peer_id), message)

    def _take_link(self, host: bytes, lane: Lane, frames: list[Frame]) -> None:
        """Frames that another agent sent back over a connection that we dialled."""
        try:
            destination, source = read_route(frames[0].buffer)
            if source.host != host:
                self.links.lose(host, "another agent has taken its place")
                return
            self.links.heard(host)
            if destination.host == _NOWHERE:  # its answer to our HELLO
                self._take_greeting(host, frames[1:])
            else:
                other = Peer(host, "agent", lane, self._host_keys.get(host, ""), {"hostname": host.hex()})
                self._forward(destination, source, len(frames) == 3, frames[1:], other)
        except WireError as error:
            log.warning("dropped a malformed frame set from host %s: %s", host.hex(), error)

    # --- frames out

    def _forward(
        self, destination: Address, source: Address, bulk: bool, frames: Sequence[Frame | Buffer], sender: Peer | None
    ) -> None:
        """Pass on what `sender` sent, None if that is this agent."""
        if destination.peer == AGENT_PEER and destination.host in (self._me.host, _NOWHERE):
            if sender is not None:
                self._take_own(source, frames, sender)
            return
        if sender is not None and sender.kind == "viewer":
            self.refused += 1
            log.warning("refused: viewer %s tried to send to %s", sender.name, destination)
            return
        peer = self._find(destination)
        if peer is not None:
            if peer.kind == "worker" and source.peer != AGENT_PEER:
                peer.callers.add(source)
            outgoing = [(BULK if bulk else CONTROL) + peer.id, make_route(destination, source), *frames]
            if peer.lane.send(outgoing, copy=False):
                return
            if bulk:  # a peer says HELLO on its control lane, and the other may take longer to connect
                self._send_later(peer, outgoing, self._loop.time() + _BULK_LANE_S)
                return
            if peer.kind == "worker":  # it is ending: its callers, this one too, hear why once its exit has been seen
                return
        if destination.host != self._me.host and self.links.send(source, destination, bulk, frames):
            return
        if not bulk:
            self._bounce(source, frames[0], self.obituary(destination))

    def _find(self, destination: Address) -> Peer | None:
        """The process itself if it is a peer here, as a driver is on all its hosts, else the agent of its host."""
        peer = self.known.get(destination.peer)
        if peer is None:
            peer = self.known.get(destination.host)
            if peer is not None and peer.kind != "agent":
                return None
        return peer

    def _send_later(self, peer: Peer, frames: Sequence[Frame | Buffer], until_s: float) -> None:
        if self.known.get(peer.id) is peer and not peer.lane.send(frames, copy=False) and self._loop.time() < until_s:
            self._loop.call_later(_BULK_RETRY_S, self._send_later, peer, frames, until_s)

    def _take_own(self, source: Address, frames: Sequence[Frame | Buffer], sender: Peer) -> None:
        """What is for the agent itself: messages, and never a payload, so that nobody can make it hold one."""
        if len(frames) != 1:
            raise WireError("an agent takes no bulk data")
        for message in unpack(_data(frames[0])):
            if message.transfer is not None:
                raise WireError("an agent takes no bulk data")
            self._on_message(sender, source, message)

    def _take_greeting(self, host: bytes, frames: Sequence[Frame | Buffer]) -> None:
        for message in unpack(_data(frames[0])) if frames else ():
            if message.kind is Kind.WELCOME:
                self.links.welcomed(host)
            elif message.kind is Kind.REFUSED:
                self.links.lose(host, f"it refused this host's agent: {message.body.get('rows')}")

    def _link_lost(self, link: Link, error: HostLostError) -> None:
        """Requests that wait for the link fail at once; for those that went over it, their senders are told who is gone."""
        log.warning("%s", error)
        for bulk, frames in link.waiting:
            if not bulk:
                self._bounce(read_route(_data(frames[0]))[1], frames[1], error)
        for source, destination in link.used:
            if source != self._me:
                self.tell(source, "died", worker=destination.to_bytes(), **to_facts(error))

    def _bounce(self, source: Address, frame: Frame | Buffer, error: GPUlayerError) -> None:
        """Nobody there: whoever waits for an answer gets one."""
        if source == self._me:
            return
        for message in unpack(_data(frame)):
            if message.kind in (Kind.ASK, Kind.CALL):
                self.send(source, Message(Kind.FAIL, message.id, to_facts(error)))

    def _transmit(self, destination: Address, bulk: bool, frames: list[Buffer]) -> None:
        self._forward(destination, self._me, bulk, frames[1:], None)


def _own_address(host: bytes, peer: Peer) -> Address:
    """Where a peer takes what is for itself: an agent lives at its own host, all others at `host`, this agent's."""
    return Address(peer.id) if peer.kind == "agent" else Address(host, peer.id)


def _data(frame: Frame | Buffer) -> Buffer:
    return frame.buffer if isinstance(frame, Frame) else frame
