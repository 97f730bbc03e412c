"""Whatever a courier is sent, it takes what is right of it, refuses the rest as a WireError, and keeps no more than a window."""

from __future__ import annotations

import random

import pytest
import zmq

from gpulayer.resources import Address
from gpulayer.wire import courier
from gpulayer.wire.courier import WINDOW_BYTES
from gpulayer.wire.message import CHUNK_BYTES, Kind, Message, WireError, chunk_header, encode, pack, read_chunk_header, unpack
from tests.wire.office import BIG, BULK, A, B, Office, announcement, chunk, is_kept


def raise_value_error(source: Address, message: Message) -> None:
    if message.id == 1:
        raise ValueError("cannot take this")


MALFORMED = {
    "no frames": [],
    "three frames": [b"a", b"b", b"c"],
    "no pack": [b"\xc1"],
    "no chunk header": [b"short", b"data"],
    "long chunk header": [b"x" * 17, b"data"],
    "empty chunk": [chunk_header(9, 0), b""],
    "chunk beyond its transfer": [chunk_header(1, 100), b"x"],
    "chunk far beyond its transfer": [chunk_header(1, 2**64 - 1), b"x"],
    "chunk over two buffers": [chunk_header(1, 40), b"x" * 20],
    "chunk over the end": [chunk_header(1, 90), b"x" * 20],
    "chunk larger than its transfer": [chunk_header(1, 0), b"x" * 200],
    "transfer announced twice": [announcement(10, number=9)[0].bytes],
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_malformed_frames_are_a_wire_error_and_spoil_nothing(office: Office, frames: list[bytes]) -> None:
    receiver = office.couriers[B]
    receiver.receive(A, announcement(50, 0, 50))
    with pytest.raises(WireError):
        receiver.receive(A, [zmq.Frame(frame) for frame in frames])
    assert office.numbers() == []
    receiver.receive(A, chunk(1, 50, b"b" * 50))
    receiver.receive(A, chunk(1, 0, b"a" * 50))
    receiver.receive(A, announcement(number=2, transfer=2))
    assert office.numbers() == [1, 2]
    assert office.payloads() == [[b"a" * 50, b"", b"b" * 50], []]


def test_chunk_that_comes_twice_never_makes_a_transfer_whole(office: Office) -> None:
    receiver = office.couriers[B]
    receiver.receive(A, announcement(50, 20))
    receiver.receive(A, chunk(1, 0, b"a" * 50))
    with pytest.raises(WireError):
        receiver.receive(A, chunk(1, 0, b"a" * 50))
    assert office.numbers() == []


def test_early_chunk_that_does_not_fit_its_message_drops_the_message(office: Office) -> None:
    receiver = office.couriers[B]
    receiver.receive(A, chunk(1, 40, b"x" * 20))
    with pytest.raises(WireError):
        receiver.receive(A, announcement(50, 50))
    receiver.receive(A, announcement(number=2, transfer=2))
    assert office.numbers() == [2]


def test_bad_message_of_a_pack_does_not_lose_the_others(office: Office) -> None:
    items = [Message(Kind.CALL, 1, {}), Message(Kind.CALL, 2, {}, (), (1, [2**62])), Message(Kind.CALL, 3, {})]
    items[1].transfer = (1, [2**62, 1])
    with pytest.raises(WireError, match="was announced before"):
        office.couriers[B].receive(A, [zmq.Frame(pack([encode(item) for item in (items[0], items[1], items[1], items[2])]))])
    assert office.numbers() == [1, 3]


def test_chunks_that_nobody_announces_are_kept_up_to_the_window(office: Office) -> None:
    receiver, data = office.couriers[B], b"x" * CHUNK_BYTES
    for number in range(16):
        receiver.receive(A, chunk(number, 0, data))
    late = chunk(99, 0, data)
    with pytest.raises(WireError, match="that no message has announced"):
        receiver.receive(A, late)
    assert not is_kept(late)
    receiver.receive(A, announcement(CHUNK_BYTES, transfer=0))
    receiver.receive(A, late)  # there is room again
    assert office.numbers() == [1]


def test_message_that_cannot_be_taken_does_not_lose_those_behind_it(office: Office) -> None:
    office.on_message = raise_value_error
    office.send(1)
    office.send(2)
    office.send(3, BIG)
    office.settle()
    assert office.numbers() == [1, 2, 3]
    assert [text.split(" from ")[0] for text in office.problems] == ["a CALL"]
    office.problems.clear()


def test_transfer_that_cannot_be_taken_does_not_lose_those_behind_it(office: Office) -> None:
    office.on_message = raise_value_error
    office.send(1, BIG)
    office.send(2)
    office.send(3, BIG)
    office.settle()
    assert office.numbers() == [1, 2, 3]
    assert office.payloads()[2] == [BIG]
    assert len(office.problems) == 1
    office.problems.clear()


@pytest.mark.parametrize("seed", range(3))
def test_receiver_survives_anything(office: Office, seed: int) -> None:
    rng = random.Random(seed)
    receiver = office.couriers[B]
    for _ in range(3000):
        numbers = [rng.choice([0, 1, 2, 3, 50, 2**40, 2**64 - 1]) for _ in range(2)]
        header = chunk_header(*numbers)
        sizes = [rng.choice([0, 1, 50, 1000, 2**63]) for _ in range(rng.randint(0, 3))]
        offer = pack([encode(Message(rng.choice(list(Kind)), 1, {}, (), (rng.randint(0, 3), sizes)))])
        frames = [rng.choice([header, offer, rng.randbytes(rng.randint(0, 60))]) for _ in range(rng.randint(0, 3))]
        try:
            receiver.receive(A, [zmq.Frame(frame) for frame in frames])
        except WireError:
            continue
        assert len(frames) != 2 or read_chunk_header(frames[0])
    receiver.forget(A)
    office.received[B].clear()
    office.send(7, BIG)
    office.settle()
    assert office.numbers() == [7]


# --- payloads that there is no memory for


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives none for a large payload, at the receiver."""

    def allocate(size: int) -> bytearray:
        if size > WINDOW_BYTES:
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr(courier, "bytearray", allocate, raising=False)


@pytest.mark.parametrize("sizes", [[2**62], [2**64 - 1], [2**62] * 9])
def test_transfer_larger_than_any_memory_is_refused_and_its_chunks_give_credit(office: Office, sizes: list[int]) -> None:
    receiver = office.couriers[B]
    receiver.receive(A, announcement(*sizes, transfer=9, number=9))
    for number in range(4):
        receiver.receive(A, chunk(9, number * CHUNK_BYTES, b"x" * CHUNK_BYTES))
    office.turn()
    (frames,) = office.wires[B, A, False]
    assert [(message.kind, message.id) for message in unpack(frames[0])] == [(Kind.FAIL, 9), (Kind.CREDIT, 4 * CHUNK_BYTES)]


@pytest.mark.parametrize("kind", [Kind.ASK, Kind.CALL])
@pytest.mark.parametrize("early", [False, True])
def test_request_without_memory_for_its_payload_fails_and_others_go_on(
    office: Office, no_memory, kind: Kind, early: bool
) -> None:
    office.send(1, b"x" * (3 * WINDOW_BYTES), kind=kind)
    office.send(2, b"y" * CHUNK_BYTES)
    if early:
        office.carry(A, B, BULK)
    office.settle()
    ((_, failure),) = office.received[A]
    assert (failure.kind, failure.id) == (Kind.FAIL, 1)
    assert f"no memory for a payload of {3 * WINDOW_BYTES} bytes" in failure.body["message"]
    assert office.payloads(B) == [[b"y" * CHUNK_BYTES]], "the chunks in front of it were taken, and dropped"
    assert office.couriers[B]._in[A].transfers == {}


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.FAIL, Kind.YIELD])
def test_answer_without_memory_for_its_payload_fails_what_waits_for_it_in_its_turn(office: Office, no_memory, kind: Kind) -> None:
    office.send(1, b"y" * CHUNK_BYTES)
    office.send(2, b"x" * (3 * WINDOW_BYTES), kind=kind)
    office.settle()
    assert [(message.kind, message.id) for _, message in office.received[B]] == [(Kind.CALL, 1), (Kind.FAIL, 2)]
    assert office.received[A] == []
    assert office.couriers[B]._in[A].transfers == {}


def test_notice_without_memory_for_its_payload_is_dropped(office: Office, no_memory) -> None:
    office.send(1, b"x" * (3 * WINDOW_BYTES), kind=Kind.TELL)
    office.send(2)
    office.settle()
    assert office.numbers(B) == [2]
    assert office.received[A] == []
