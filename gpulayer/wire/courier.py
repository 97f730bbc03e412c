"""Sends and receives whole messages over lanes that carry frames.

Small messages of one loop turn leave in one pack per destination. A payload above `INLINE_BYTES` goes in 1 MiB chunks
on the bulk lane; at most `WINDOW_BYTES` are on the way to one destination, and the receiver's credits open the window
again, so memory along the way stays bounded and a relay never fills up. Ordered kinds are delivered in the order they were sent,
even when the payload of an earlier one takes longer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from gpulayer.errors import GPUlayerError, to_facts
from gpulayer.resources import Address
from gpulayer.wire.message import (
    CHUNK_BYTES,
    INLINE_BYTES,
    ORDERED,
    PACK_BYTES,
    Buffer,
    Kind,
    Message,
    WireError,
    chunk_header,
    encode,
    make_route,
    pack,
    read_chunk_header,
    unpack,
)

WINDOW_BYTES = 16 * CHUNK_BYTES
CREDIT_BYTES = 4 * CHUNK_BYTES
KEPT_ENDED = 1024

Transmit = Callable[[Address, bool, list[Buffer]], None]
"""(destination, bulk lane?, frames): hand one frame set to the right lane."""

_NOBODY = Address(bytes(8))


@dataclass(slots=True)
class _Outgoing:
    """What waits to go to one destination."""

    items: list[bytes] = field(default_factory=list[bytes])
    items_bytes: int = 0
    chunks: deque[tuple[int, int, memoryview]] = field(default_factory=deque[tuple[int, int, memoryview]])
    window_bytes: int = WINDOW_BYTES


@dataclass(slots=True)
class _Incoming:
    """What comes from one source: messages in order, and transfers not yet whole."""

    waiting: deque[Message] = field(default_factory=deque[Message])
    transfers: dict[int, _Transfer] = field(default_factory=dict[int, "_Transfer"])
    taken_bytes: int = 0
    early_bytes: int = 0


@dataclass(slots=True)
class _Transfer:
    """Buffers being filled. Chunks can overtake the message that announces them: they wait in `early`."""

    views: list[memoryview] | None = None  # None until it is announced
    missing_bytes: int = 0
    discarded: bool = False  # there is no memory for it: its chunks are taken, for the sender waits for credit, and dropped
    early: list[tuple[int, zmq.Frame]] = field(default_factory=list[tuple[int, zmq.Frame]])


class Courier:
    """The sending and receiving half of one process. All methods are for the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transmit: Transmit, deliver: Callable[[Address, Message], None]) -> None:
        self._loop = loop
        self._transmit = transmit
        self._deliver = deliver
        self._out: dict[Address, _Outgoing] = {}
        self._in: dict[Address, _Incoming] = {}
        self._ended: dict[Address, None] = {}  # the last processes that have, in that order
        self._next_transfer = 0
        self._flush_planned = False

    def send(self, destination: Address, message: Message) -> None:
        """Send one message; its frames must not change any more. Raises `WireError` if all but its frames is too large."""
        sizes = [len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in message.frames]
        if sum(sizes) > INLINE_BYTES:
            self._next_transfer += 1
            message.transfer = (self._next_transfer, sizes)
        item = encode(message)
        out = self._out.setdefault(destination, _Outgoing())
        if message.transfer:
            out.chunks.extend(_chunks(message.transfer[0], message.frames))
        if out.items and out.items_bytes + len(item) > PACK_BYTES:
            self._flush_one(destination, out)
        out.items.append(item)
        out.items_bytes += len(item)
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what waits now rather than at the end of this loop turn."""
        self._flush_planned = False
        for destination, out in list(self._out.items()):
            self._flush_one(destination, out)
            if out.chunks:
                self._pump(destination, out)

    def receive(self, source: Address, frames: list[zmq.Frame]) -> None:
        """Take what follows a route: `[pack]` or `[chunk header][data]`. Raises `WireError` for what it cannot take of it."""
        if len(frames) == 2:
            self._take_chunk(source, frames)
            return
        if len(frames) != 1:
            raise WireError(f"a route is followed by 1 or 2 frames, not {len(frames)}")
        failure: WireError | None = None
        for message in unpack(frames[0].buffer):
            try:
                self._take_message(source, message)
            except WireError as error:  # the other messages of the pack are not to blame
                failure = error
        if failure is not None:
            raise failure

    def forget(self, peer: Address, *, ended: bool = False) -> None:
        """Drop what waits for, or has come from, a peer; if its process has `ended`, also chunks of it that still come."""
        self._out.pop(peer, None)
        self._in.pop(peer, None)
        if ended:
            self._ended[peer] = None
            if len(self._ended) > KEPT_ENDED:
                del self._ended[next(iter(self._ended))]

    def forget_host(self, host: bytes) -> None:
        """`forget` every process of a host."""
        for peer in {*self._out, *self._in}:
            if peer.host == host:
                self.forget(peer)

    def _flush_one(self, destination: Address, out: _Outgoing) -> None:
        if out.items:
            items, out.items, out.items_bytes = out.items, [], 0
            self._transmit(destination, False, [make_route(destination, _NOBODY), pack(items)])

    def _pump(self, destination: Address, out: _Outgoing) -> None:
        route = make_route(destination, _NOBODY)
        while out.chunks and out.window_bytes >= len(out.chunks[0][2]):
            transfer_id, offset, data = out.chunks.popleft()
            out.window_bytes -= len(data)
            self._transmit(destination, True, [route, chunk_header(transfer_id, offset), data])

    def _take_message(self, source: Address, message: Message) -> None:
        if message.kind is Kind.CREDIT:
            out = self._out.get(source)
            if out is not None:
                out.window_bytes = min(WINDOW_BYTES, out.window_bytes + message.id)
                self._pump(source, out)
            return
        incoming = self._in.setdefault(source, _Incoming())
        if message.transfer:
            opened = self._open_transfer(source, incoming, message)
            if opened is None:
                return
            message = opened
        if not message.transfer and (message.kind not in ORDERED or not incoming.waiting):
            self._hand_over(source, message)
            return
        incoming.waiting.append(message)
        self._deliver_whole(source, incoming)

    def _open_transfer(self, source: Address, incoming: _Incoming, message: Message) -> Message | None:
        """Make room for a payload. What is to be delivered: the message, a failure if there is no memory, or nothing."""
        assert message.transfer is not None
        transfer_id, sizes = message.transfer
        transfer = incoming.transfers.setdefault(transfer_id, _Transfer())
        if transfer.views is not None:
            raise WireError(f"transfer {transfer_id} was announced before")
        delivered: Message | None = message
        try:
            message.frames = [bytearray(size) for size in sizes]
            transfer.views = [memoryview(buffer) for buffer in message.frames]
        except (MemoryError, OverflowError):
            transfer.views, transfer.discarded = [], True
            delivered = self._refuse(source, message, sum(sizes))
        transfer.missing_bytes = sum(sizes)
        early, transfer.early = transfer.early, []
        incoming.early_bytes -= sum(len(data) for _, data in early)
        try:
            for offset, data in early:
                self._fill(source, incoming, transfer, offset, data)
        except WireError:
            del incoming.transfers[transfer_id]
            raise
        self._end_discarded(incoming, transfer_id, transfer)
        return delivered

    def _refuse(self, source: Address, message: Message, size_bytes: int) -> Message | None:
        """There is no memory for a payload: its sender learns so if it waits for an answer, we do if it is one."""
        facts = to_facts(GPUlayerError(f"the receiver has no memory for a payload of {size_bytes} bytes"))
        if message.kind in (Kind.ASK, Kind.CALL):
            self.send(source, Message(Kind.FAIL, message.id, facts))
        elif message.kind in (Kind.REPLY, Kind.FAIL, Kind.YIELD):
            return Message(Kind.FAIL, message.id, facts)
        return None

    @staticmethod
    def _end_discarded(incoming: _Incoming, transfer_id: int, transfer: _Transfer) -> None:
        if transfer.discarded and not transfer.missing_bytes:
            del incoming.transfers[transfer_id]

    def _take_chunk(self, source: Address, frames: list[zmq.Frame]) -> None:
        transfer_id, offset = read_chunk_header(frames[0].buffer)
        data = frames[1]
        if source in self._ended:
            return
        incoming = self._in.setdefault(source, _Incoming())
        transfer = incoming.transfers.get(transfer_id)
        if transfer is not None and transfer.views is not None:
            self._fill(source, incoming, transfer, offset, data)
            self._end_discarded(incoming, transfer_id, transfer)
            if not transfer.missing_bytes:
                self._deliver_whole(source, incoming)
            return
        if not len(data) or incoming.early_bytes + len(data) > WINDOW_BYTES:
            raise WireError(f"an empty chunk, or more than {WINDOW_BYTES} bytes of chunks that no message has announced")
        incoming.early_bytes += len(data)
        incoming.transfers.setdefault(transfer_id, _Transfer()).early.append((offset, data))

    def _fill(self, source: Address, incoming: _Incoming, transfer: _Transfer, offset: int, data: zmq.Frame) -> None:
        assert transfer.views is not None
        view = data.buffer
        if len(view) > transfer.missing_bytes:
            raise WireError("a chunk with more bytes than its transfer misses")
        if not transfer.discarded:
            _copy_into(transfer.views, offset, view)
        transfer.missing_bytes -= len(view)
        incoming.taken_bytes += len(view)
        if incoming.taken_bytes >= CREDIT_BYTES or not transfer.missing_bytes:
            self.send(source, Message(Kind.CREDIT, incoming.taken_bytes, {}))
            incoming.taken_bytes = 0

    def _deliver_whole(self, source: Address, incoming: _Incoming) -> None:
        """Deliver from the front what is whole; unordered kinds that are whole leave from anywhere."""
        held: deque[Message] = deque()
        while incoming.waiting:
            message = incoming.waiting.popleft()
            whole = message.transfer is None or incoming.transfers[message.transfer[0]].missing_bytes == 0
            if not whole or (held and message.kind in ORDERED):
                held.append(message)
                continue
            if message.transfer is not None:
                del incoming.transfers[message.transfer[0]]
            self._hand_over(source, message)
        incoming.waiting = held

    def _hand_over(self, source: Address, message: Message) -> None:
        try:
            self._deliver(source, message)
        except Exception as error:  # noqa: BLE001 - a message that nobody can take must not lose those behind it
            what = f"a {message.kind.name} from {source} could not be taken"
            self._loop.call_exception_handler({"message": what, "exception": error})


def _chunks(transfer_id: int, frames: object) -> list[tuple[int, int, memoryview]]:
    """(transfer id, offset, data) for each chunk; a chunk never spans two buffers, so that no bytes are joined."""
    offset, found = 0, list[tuple[int, int, memoryview]]()
    for frame in frames:  # pyright: ignore[reportGeneralTypeIssues]
        view = memoryview(frame)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, len(view), CHUNK_BYTES):
            data = view[start : start + CHUNK_BYTES]
            found.append((transfer_id, offset, data))
            offset += len(data)
    return found


def _copy_into(views: list[memoryview], offset: int, data: memoryview) -> None:
    """Copy a chunk to where it belongs. Raises `WireError` unless that is inside one buffer."""
    for view in views:
        if offset < len(view):
            if offset + len(data) > len(view):
                break
            view[offset : offset + len(data)] = data
            return
        offset -= len(view)
    raise WireError("a chunk that does not lie inside one buffer of its transfer")
