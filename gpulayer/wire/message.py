"""What travels: messages, how they are packed into frames, and the route in front of them. No sockets here.

A control frame set is `[route][pack]`: the route is 32 bytes (destination address, source address); the pack is one
msgpack array of messages, so that all calls of one loop turn cost one ZeroMQ frame. A message whose payload is larger
than `INLINE_BYTES` leaves it out and names a transfer; the payload follows in chunks on the bulk lane, each
`[route][transfer id, offset][data]`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from gpulayer.resources import Address

PROTOCOL = 1
ROUTE_BYTES = 32
INLINE_BYTES = 64 * 1024
CHUNK_BYTES = 1024 * 1024
PACK_BYTES = 512 * 1024
MESSAGE_BYTES = 3 * 1024 * 1024
"""What one message may have without its chunks: libzmq cuts a connection on which a larger frame than its limit comes."""

Buffer = bytes | bytearray | memoryview

_CHUNK = struct.Struct(">QQ")


class Kind(IntEnum):
    """Every kind of message there is."""

    HELLO = 1  # first message of a peer: who it is, which versions it runs
    WELCOME = 2  # the agent's answer
    REFUSED = 3  # the agent's other answer, with a table of versions
    ASK = 4  # a request that the endpoint itself answers
    CALL = 5  # a request that user code answers
    REPLY = 6  # the answer to ASK or CALL
    FAIL = 7  # the other answer
    YIELD = 8  # one of several values on the way to a REPLY
    TELL = 9  # needs no answer
    CREDIT = 10  # the receiver of bulk data has taken so many bytes


ORDERED = frozenset({Kind.CALL, Kind.REPLY, Kind.FAIL, Kind.YIELD})
"""Kinds that arrive in the order they were sent (per sender); the others never wait behind bulk data."""


class WireError(Exception):
    """A frame that is not of this protocol."""


@dataclass(slots=True)
class Message:
    """One message. `body` holds plain values only; `frames` is an opaque payload (see wire/serialize.py)."""

    kind: Kind
    id: int
    body: dict[str, Any]
    frames: Sequence[Buffer] = field(default_factory=tuple[Buffer, ...])
    transfer: tuple[int, list[int]] | None = None  # (transfer id, sizes) of a payload that comes in chunks


def encode(message: Message) -> bytes:
    """One message as bytes, ready for `pack`. Raises `WireError` if it has more than `MESSAGE_BYTES`."""
    frames = None if message.transfer else list(message.frames)
    item = (int(message.kind), message.id, message.body, frames, message.transfer)
    data: bytes = msgpack.packb(item, use_bin_type=True)  # pyright: ignore[reportAssignmentType] - it is bytes
    if len(data) > MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes does not fit into one frame (at most {MESSAGE_BYTES})")
    return data


def pack(items: Sequence[bytes]) -> bytes:
    """Encoded messages as one frame: an array header, then the items as they are."""
    return msgpack.Packer().pack_array_header(len(items)) + b"".join(items)


def unpack(data: Buffer) -> list[Message]:
    """The messages of one frame. Raises `WireError` for anything else."""
    try:
        items = msgpack.unpackb(data, raw=False, strict_map_key=False)
        return [_message(*item) for item in items]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not a pack of messages: {error}") from error


def _message(kind: int, number: int, body: Any, frames: Any, transfer: Any) -> Message:
    if type(number) is not int or not isinstance(body, dict):
        raise WireError("a message is (kind, id, body, frames, transfer)")
    if transfer is None:
        if not isinstance(frames, list):
            raise WireError("frames are a list of bytes")
        for frame in frames:
            if type(frame) is not bytes:
                raise WireError("frames are a list of bytes")
        return Message(Kind(kind), number, body, frames)
    transfer_id, sizes = transfer
    if type(transfer_id) is not int or not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise WireError("a transfer is (id, sizes)")
    return Message(Kind(kind), number, body, (), (transfer_id, sizes))


def make_route(destination: Address, source: Address) -> bytes:
    """The frame in front of every pack and chunk."""
    return destination.to_bytes() + source.to_bytes()


def read_route(data: Buffer) -> tuple[Address, Address]:
    """(destination, source) of a route frame. Raises `WireError` if it is none."""
    if len(data) != ROUTE_BYTES:
        raise WireError(f"a route has {ROUTE_BYTES} bytes, not {len(data)}")
    return Address.from_bytes(data[:16]), Address.from_bytes(data[16:])  # pyright: ignore[reportArgumentType]


def chunk_header(transfer_id: int, offset: int) -> bytes:
    """The frame between route and data of a chunk; `offset` counts bytes over all buffers of the transfer."""
    return _CHUNK.pack(transfer_id, offset)


def read_chunk_header(data: Buffer) -> tuple[int, int]:
    """(transfer id, offset). Raises `WireError` if it is no chunk header."""
    if len(data) != _CHUNK.size:
        raise WireError(f"a chunk header has {_CHUNK.size} bytes, not {len(data)}")
    return _CHUNK.unpack(data)
