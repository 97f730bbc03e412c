"""Frames: what is packed comes out again in order, and anything else is a WireError and nothing worse."""

from __future__ import annotations

import random

import msgpack
import pytest

from gpulayer.resources import Address, new_id
from gpulayer.wire.message import (
    CHUNK_BYTES,
    INLINE_BYTES,
    MESSAGE_BYTES,
    ORDERED,
    PACK_BYTES,
    ROUTE_BYTES,
    Kind,
    Message,
    WireError,
    chunk_header,
    encode,
    make_route,
    pack,
    read_chunk_header,
    read_route,
    unpack,
)
from gpulayer.wire.security import MAX_FRAME_BYTES

BODY = {"m": "state", "n": None, "x": [1, -2.5, True], "b": b"\0\xff", "d": {"k": "\N{SNOWMAN}"}, 7: "number"}


def raw(*items: object) -> bytes:
    return msgpack.packb(list(items))


def one(kind: object = 4, number: object = 1, body: object = None, frames: object = (), transfer: object = None) -> bytes:
    return raw([kind, number, {} if body is None else body, frames, transfer])


@pytest.mark.parametrize("kind", Kind)
def test_message_comes_back_from_its_pack(kind: Kind) -> None:
    message = Message(kind, 2**40, BODY, [b"", b"payload", b"\0" * 100])
    assert unpack(pack([encode(message)])) == [message]


def test_messages_of_a_pack_keep_their_order() -> None:
    messages = [Message(Kind.CALL, number, {"n": number}, [str(number).encode()]) for number in range(1000)]
    assert unpack(pack([encode(message) for message in messages])) == messages


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_pack_holds_any_number_of_messages(count: int) -> None:
    assert len(unpack(pack([encode(Message(Kind.CREDIT, 1, {}))] * count))) == count


@pytest.mark.parametrize("payload", [b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"xabcx")[1:4]])
def test_inline_payload_may_be_any_buffer(payload: bytes) -> None:
    assert unpack(pack([encode(Message(Kind.CALL, 1, {}, (payload,)))]))[0].frames == [b"abc"]


def test_announced_transfer_leaves_the_payload_out() -> None:
    data = encode(Message(Kind.CALL, 1, {}, [b"x" * 1000], transfer=(7, [1000, 0])))
    assert len(data) < 100
    (message,) = unpack(pack([data]))
    assert (message.frames, message.transfer) == ((), (7, [1000, 0]))


def test_message_that_would_not_fit_into_a_frame_is_refused() -> None:
    with pytest.raises(WireError, match=r"3145\d+ bytes does not fit into one frame"):
        encode(Message(Kind.TELL, 0, {"text": "x" * MESSAGE_BYTES}))


def test_what_may_be_packed_fits_into_a_frame() -> None:
    assert max(PACK_BYTES + INLINE_BYTES, MESSAGE_BYTES, CHUNK_BYTES) + 1024 < MAX_FRAME_BYTES


def test_answers_to_calls_are_ordered_and_heartbeats_are_not() -> None:
    assert {Kind.CALL, Kind.REPLY, Kind.FAIL, Kind.YIELD} == ORDERED


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        pack([encode(Message(Kind.ASK, 1, {}))])[:-1],
        pack([encode(Message(Kind.ASK, 1, {}))]) + b"\0",
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million items
        b"\x91" * 3000,  # arrays in arrays
        msgpack.packb(None),
        msgpack.packb(5),
        msgpack.packb(2.5),
        msgpack.packb("text"),
        msgpack.packb(b"bytes"),
        msgpack.packb({"a": 1}),
        msgpack.packb(msgpack.ExtType(5, b"abcde")),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        raw(None),
        raw(1),
        raw("abcde"),
        raw(b"abcde"),
        raw({1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
        raw([]),
        raw([4, 1, {}, []]),
        raw([4, 1, {}, [], None, 6]),
        one(kind=0),
        one(kind=11),
        one(kind="ASK"),
        one(kind=None),
        one(kind=[4]),
        one(kind={}),
        one(number="1"),
        one(number=1.0),
        one(number=True),
        one(number=None),
        one(body=[]),
        one(body="m"),
        one(body=0),
        one(frames=None),
        one(frames=5),
        one(frames=b"bytes"),
        one(frames="text"),
        one(frames={}),
        one(frames=["text"]),
        one(frames=[5]),
        one(frames=[None]),
        one(frames=[[b"x"]]),
        one(transfer=5),
        one(transfer="ab"),
        one(transfer=[1]),
        one(transfer=[1, [2], 3]),
        one(transfer=["1", [2]]),
        one(transfer=[1, 2]),
        one(transfer=[1, "2"]),
        one(transfer=[1, {"2": 2}]),
        one(transfer=[1, {2: 2}]),
        one(transfer=[1, b"\2"]),
        one(transfer=[1, [-1]]),
        one(transfer=[1, [1.0]]),
        one(transfer=[1, [None]]),
        b"\x91\x95\x04\x01\x81\x90\x01\x90\xc0",  # a dict whose key is a list
        b"\x91\x95\x04\x01\x81\xa2\xff\xff\x01\x90\xc0",  # a string that is not UTF-8
    ],
)
def test_malformed_pack_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(data)


def test_bad_message_spoils_no_pack_of_others() -> None:
    good = encode(Message(Kind.ASK, 1, {}))
    with pytest.raises(WireError):
        unpack(pack([good, msgpack.packb([4, 2])]))
    assert len(unpack(pack([good]))) == 1


@pytest.mark.parametrize("seed", range(5))
def test_damaged_pack_gives_messages_or_a_wire_error(seed: int) -> None:
    rng = random.Random(seed)
    messages = [Message(kind, 5, BODY, [b"abc", b""]) for kind in Kind] + [Message(Kind.CALL, 1, {}, (), (3, [9]))]
    good = pack([encode(message) for message in messages])
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.choice([len(data), rng.randrange(len(data))])]
        try:
            messages = unpack(data)
        except WireError:
            continue
        assert all(type(message.id) is int and type(message.body) is dict for message in messages)
        assert all(type(frame) is bytes for message in messages for frame in message.frames)


def test_route_comes_back_from_its_frame() -> None:
    there, here = Address(new_id(), new_id()), Address(new_id())
    route = make_route(there, here)
    assert len(route) == ROUTE_BYTES
    assert read_route(route) == read_route(memoryview(route)) == (there, here)


@pytest.mark.parametrize("size", [0, 1, 16, 31, 33, 1000])
def test_malformed_route_is_a_wire_error(size: int) -> None:
    with pytest.raises(WireError, match=f"a route has 32 bytes, not {size}"):
        read_route(b"x" * size)


@pytest.mark.parametrize(("transfer", "offset"), [(0, 0), (1, 2), (2**64 - 1, 2**64 - 1)])
def test_chunk_header_comes_back_from_its_frame(transfer: int, offset: int) -> None:
    assert read_chunk_header(memoryview(chunk_header(transfer, offset))) == (transfer, offset)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_malformed_chunk_header_is_a_wire_error(size: int) -> None:
    with pytest.raises(WireError, match=f"a chunk header has 16 bytes, not {size}"):
        read_chunk_header(b"x" * size)
