"""Whole messages over lanes that the test carries by hand: order, chunks, credits, and what a stranger may send."""

from __future__ import annotations

import array
import asyncio
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy
import pytest
import zmq

from gpulayer.resources import Address
from gpulayer.wire.courier import KEPT_ENDED, WINDOW_BYTES, Courier
from gpulayer.wire.message import (
    CHUNK_BYTES,
    INLINE_BYTES,
    MESSAGE_BYTES,
    ORDERED,
    PACK_BYTES,
    Kind,
    Message,
    WireError,
    chunk_header,
    encode,
    pack,
    read_chunk_header,
    unpack,
)

A, B, C = (Address(letter * 8, b"12345678") for letter in (b"a", b"b", b"c"))
BIG = b"x" * (INLINE_BYTES + 1)
CONTROL, BULK = False, True


class Office:
    """Couriers at some addresses, and between each two of them a control and a bulk wire that carry when they are told to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.problems: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context["message"]))
        self.wires: dict[tuple[Address, Address, bool], deque[list[bytes]]] = defaultdict(deque)
        self.couriers: dict[Address, Courier] = {}
        self.received: dict[Address, list[tuple[Address, Message]]] = defaultdict(list)
        self.on_message: Callable[[Address, Message], None] = lambda source, message: None
        for address in (A, B, C):
            self._open(address)

    def _open(self, me: Address) -> None:
        def transmit(destination: Address, bulk: bool, frames: list) -> None:
            self.wires[me, destination, bulk].append([bytes(frame) for frame in frames[1:]])

        def deliver(source: Address, message: Message) -> None:
            self.received[me].append((source, message))
            self.on_message(source, message)

        self.couriers[me] = Courier(self.loop, transmit, deliver)

    def send(self, number: int, *frames: object, kind: Kind = Kind.CALL, source: Address = A, to: Address = B) -> Message:
        message = Message(kind, number, {}, frames)
        self.couriers[source].send(to, message)
        return message

    def turn(self) -> None:
        """One turn of the loop."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def carry(self, source: Address, destination: Address, bulk: bool, count: int | None = None) -> int:
        """Let the oldest frame sets of one wire arrive, `count` of them at most; returns how many bytes of frames did."""
        self.turn()
        wire, size = self.wires[source, destination, bulk], 0
        while wire and count != 0:
            frames = wire.popleft()
            size += len(frames[-1])
            count = None if count is None else count - 1
            self.couriers[destination].receive(source, [zmq.Frame(frame) for frame in frames])
        return size

    def settle(self) -> None:
        """Carry until nothing moves any more."""
        self.turn()
        while any(self.wires.values()):
            for source, destination, bulk in list(self.wires):
                self.carry(source, destination, bulk)
            self.turn()

    def on_the_way(self, source: Address = A, destination: Address = B) -> int:
        """Bytes on the bulk wire."""
        return sum(len(frames[1]) for frames in self.wires[source, destination, BULK])

    def numbers(self, address: Address = B) -> list[int]:
        return [message.id for _, message in self.received[address]]

    def payloads(self, address: Address = B) -> list[list[bytes]]:
        return [[bytes(frame) for frame in message.frames] for _, message in self.received[address]]


@pytest.fixture
def office() -> Iterator[Office]:
    office = Office()
    yield office
    office.loop.close()
    assert office.problems == []


def raise_value_error(source: Address, message: Message) -> None:
    if message.id == 1:
        raise ValueError("cannot take this")


def is_kept(frames: list[zmq.Frame]) -> bool:
    """Whether somebody else than the list holds the last frame."""
    holders = sys.getrefcount(frames[-1])  # counts the list and the argument
    return holders > 2


def chunk(transfer: int, offset: int, data: bytes) -> list[zmq.Frame]:
    return [zmq.Frame(chunk_header(transfer, offset)), zmq.Frame(data)]


def announcement(*sizes: int, transfer: int = 1, number: int = 1) -> list[zmq.Frame]:
    return [zmq.Frame(pack([encode(Message(Kind.CALL, number, {}, (), (transfer, list(sizes))))]))]


# --- packs


def test_messages_of_one_turn_leave_in_one_pack_in_order(office: Office) -> None:
    for number in range(100):
        office.send(number, b"payload")
    assert not office.wires[A, B, CONTROL]
    office.turn()
    assert [len(unpack(frames[0])) for frames in office.wires[A, B, CONTROL]] == [100]
    office.settle()
    assert office.numbers() == list(range(100))
    assert office.payloads() == [[b"payload"]] * 100


def test_packs_are_split_by_size_and_keep_the_order(office: Office) -> None:
    for number in range(100):
        office.send(number, b"x" * (INLINE_BYTES - 1))
    office.turn()
    sizes = [len(frames[0]) for frames in office.wires[A, B, CONTROL]]
    assert len(sizes) > 10
    assert max(sizes) <= PACK_BYTES + 16
    office.settle()
    assert office.numbers() == list(range(100))


def test_each_destination_gets_its_own_pack(office: Office) -> None:
    office.send(1)
    office.send(2, to=C)
    office.send(3)
    office.settle()
    assert (office.numbers(B), office.numbers(C)) == ([1, 3], [2])


def test_flush_sends_without_waiting_for_the_turn_to_end(office: Office) -> None:
    office.send(1)
    office.couriers[A].flush()
    assert len(office.wires[A, B, CONTROL]) == 1
    office.settle()
    assert office.numbers() == [1]


def test_message_too_large_for_a_frame_is_refused_and_leaves_nothing_behind(office: Office) -> None:
    with pytest.raises(WireError, match="does not fit into one frame"):
        office.couriers[A].send(B, Message(Kind.CALL, 1, {"text": "x" * MESSAGE_BYTES}, [BIG]))
    assert office.couriers[A].waiting_bytes() == 0
    office.send(2, BIG)
    office.settle()
    assert office.numbers() == [2]


# --- payloads


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES])
def test_small_payload_travels_in_its_message(office: Office, size: int) -> None:
    office.send(1, b"x" * size)
    office.turn()
    assert office.on_the_way() == 0
    office.settle()
    assert office.payloads() == [[b"x" * size]]


@pytest.mark.parametrize("size", [INLINE_BYTES + 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7])
def test_large_payload_travels_in_chunks(office: Office, size: int) -> None:
    data = random.Random(size).randbytes(size)
    office.send(1, data)
    office.turn()
    assert len(office.wires[A, B, BULK]) == -(-size // CHUNK_BYTES)
    office.settle()
    assert office.payloads() == [[data]]


@pytest.mark.parametrize(
    "frames",
    [
        [b"", BIG],
        [BIG, b""],
        [b"", b"", BIG, b"", b"y" * CHUNK_BYTES, b""],
        [b"a" * 40_000, b"b" * 40_000, b"c"],
        [bytearray(BIG), memoryview(BIG)],
        [memoryview(BIG)[10:-10]],
        [memoryview(array.array("i", range(50_000)))],
        [memoryview(numpy.arange(60_000.0).reshape(200, 300)), memoryview(numpy.zeros((5, 0))), memoryview(numpy.array(2.5))],
    ],
    ids=["empty first", "empty last", "empty between", "small ones", "writable", "slice", "ints", "shapes"],
)
def test_payload_of_any_buffers_arrives_as_it_was(office: Office, frames: list) -> None:
    office.send(1, *frames)
    office.settle()
    assert office.payloads() == [[bytes(memoryview(frame)) for frame in frames]]


def test_inline_payload_of_any_buffers_arrives_as_it_was(office: Office) -> None:
    office.send(1, memoryview(numpy.arange(6).reshape(2, 3)), memoryview(numpy.array(2.5)), b"")
    office.settle()
    assert [len(frame) for frame in office.payloads()[0]] == [48, 8, 0]


def test_chunk_carries_no_bytes_of_two_buffers(office: Office) -> None:
    office.send(1, b"a" * 700_000, b"b" * 700_000)
    office.turn()
    assert [set(frames[1]) for frames in office.wires[A, B, BULK]] == [{97}, {98}]


def test_received_buffers_are_writable(office: Office) -> None:
    office.send(1, BIG)
    office.settle()
    office.received[B][0][1].frames[0][0] = 7  # type: ignore[index]


def test_chunks_may_arrive_before_their_message(office: Office) -> None:
    data = random.Random(1).randbytes(3 * CHUNK_BYTES + 5)
    office.send(1, b"head", data)
    office.send(2, BIG)
    office.carry(A, B, BULK)
    assert office.numbers() == []
    office.settle()
    assert office.numbers() == [1, 2]
    assert office.payloads()[0] == [b"head", data]


def test_some_chunks_may_arrive_before_their_message_and_in_another_order(office: Office) -> None:
    data = random.Random(1).randbytes(4 * CHUNK_BYTES)
    office.send(1, data)
    office.turn()
    random.Random(2).shuffle(office.wires[A, B, BULK])  # a way that changes meanwhile
    office.carry(A, B, BULK, 2)
    office.settle()
    assert office.payloads() == [[data]]


def test_transfers_of_two_senders_are_kept_apart(office: Office) -> None:
    one, two = b"1" * (2 * CHUNK_BYTES), b"2" * (2 * CHUNK_BYTES)
    office.send(1, one, to=C)
    office.send(2, two, source=B, to=C)
    office.carry(B, C, BULK, 1)
    office.carry(A, C, BULK, 1)
    office.settle()
    assert sorted(zip(office.numbers(C), office.payloads(C), strict=True)) == [(1, [one]), (2, [two])]


# --- order


@pytest.mark.parametrize("kind", sorted(ORDERED))
def test_ordered_kind_waits_behind_a_transfer(office: Office, kind: Kind) -> None:
    office.send(1, BIG)
    office.send(2, kind=kind)
    office.send(3, BIG, kind=kind)
    office.send(4, kind=kind)
    office.carry(A, B, CONTROL)
    assert office.numbers() == []
    office.carry(A, B, BULK, 1)
    assert office.numbers() == [1, 2]
    office.settle()
    assert office.numbers() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", sorted(set(Kind) - ORDERED - {Kind.CREDIT}))
def test_unordered_kind_overtakes_a_transfer(office: Office, kind: Kind) -> None:
    office.send(1, BIG)
    office.send(2)
    office.send(3, kind=kind)
    office.carry(A, B, CONTROL)
    assert office.numbers() == [3]
    office.settle()
    assert office.numbers() == [3, 1, 2]


def test_unordered_transfer_overtakes_one_that_is_not_whole(office: Office) -> None:
    office.send(1, b"x" * 4 * CHUNK_BYTES)
    office.send(2, BIG, kind=Kind.ASK)
    office.carry(A, B, CONTROL)
    office.turn()
    wire = office.wires[A, B, BULK]
    wire.appendleft(wire.pop())
    office.carry(A, B, BULK, 1)
    assert office.numbers() == [2]
    office.settle()
    assert office.numbers() == [2, 1]


def test_other_senders_do_not_wait_for_a_transfer(office: Office) -> None:
    office.send(1, BIG, to=C)
    office.carry(A, C, CONTROL)
    office.send(2, source=B, to=C)
    office.carry(B, C, CONTROL)
    assert office.numbers(C) == [2]


@pytest.mark.parametrize("seed", range(6))
def test_order_and_window_hold_however_the_wires_carry(office: Office, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [*ORDERED, Kind.TELL, Kind.ASK]
    blob = rng.randbytes(6 * CHUNK_BYTES)
    sent: list[Message] = []
    while len(sent) < 60 or any(office.wires.values()):
        for _ in range(rng.randint(0, 5) if len(sent) < 60 else 0):
            sizes = [rng.choice([0, 10, 5000, 70_000, CHUNK_BYTES, rng.randrange(len(blob))]) for _ in range(rng.randint(0, 2))]
            sent.append(office.send(len(sent), *(memoryview(blob)[:size] for size in sizes), kind=rng.choice(kinds)))
        office.turn()
        assert office.on_the_way() <= WINDOW_BYTES
        source, destination, bulk = rng.choice([(A, B, CONTROL), (A, B, BULK), (A, B, BULK), (B, A, CONTROL)])
        office.carry(source, destination, bulk, rng.randint(1, 4))
    got = {message.id: message for _, message in office.received[B]}
    assert sorted(office.numbers()) == list(range(len(sent)))
    ordered = [number for number in office.numbers() if got[number].kind in ORDERED]
    assert ordered == sorted(ordered)
    for message in sent:
        assert [bytes(frame) for frame in got[message.id].frames] == [bytes(frame) for frame in message.frames]
    assert office.couriers[A].waiting_bytes() == 0


# --- the window


def test_no_more_than_the_window_is_on_the_way_without_credit(office: Office) -> None:
    office.send(1, b"x" * (3 * WINDOW_BYTES))
    office.turn()
    assert office.on_the_way() == WINDOW_BYTES == 16 * 2**20
    assert office.couriers[A].waiting_bytes() == 2 * WINDOW_BYTES
    office.turn()
    assert office.on_the_way() == WINDOW_BYTES
    office.settle()
    assert office.payloads() == [[b"x" * (3 * WINDOW_BYTES)]]


def test_window_holds_for_chunks_of_uneven_size(office: Office) -> None:
    size = 3 * CHUNK_BYTES // 4  # does not divide the window
    for number in range(40):
        office.send(number, b"x" * size)
    office.turn()
    assert WINDOW_BYTES - size < office.on_the_way() <= WINDOW_BYTES
    office.settle()
    assert office.numbers() == list(range(40))


def test_credit_opens_the_window_by_what_was_taken(office: Office) -> None:
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    office.carry(A, B, CONTROL)
    taken = office.carry(A, B, BULK, 4)
    assert office.on_the_way() == WINDOW_BYTES - taken
    office.carry(B, A, CONTROL)
    assert office.on_the_way() == WINDOW_BYTES


def test_chunks_that_nobody_announced_earn_no_credit(office: Office) -> None:
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    assert office.carry(A, B, BULK) == WINDOW_BYTES
    office.turn()
    assert not office.wires[B, A, CONTROL]
    office.settle()
    assert office.numbers() == [1]


def test_forged_credit_opens_no_more_than_the_window(office: Office) -> None:
    office.send(1, b"x" * (3 * WINDOW_BYTES))
    office.turn()
    office.wires[A, B, BULK].clear()
    office.couriers[A].receive(B, [zmq.Frame(pack([encode(Message(Kind.CREDIT, 2**63, {}))]))])
    assert office.on_the_way() == WINDOW_BYTES


def test_many_transfers_share_the_window_and_all_arrive(office: Office) -> None:
    rng = random.Random(3)
    sizes = [rng.randint(INLINE_BYTES + 1, 2 * CHUNK_BYTES) for _ in range(60)]
    for number, size in enumerate(sizes):
        office.send(number, b"%d" % (number % 10) * size)
    office.turn()
    most = office.on_the_way()
    while any(office.wires.values()):
        office.carry(A, B, BULK, 1)
        office.carry(A, B, CONTROL)
        office.carry(B, A, CONTROL)
        most = max(most, office.on_the_way())
    assert WINDOW_BYTES - CHUNK_BYTES < most <= WINDOW_BYTES
    assert office.numbers() == list(range(60))
    assert [len(payload[0]) for payload in office.payloads()] == sizes


def test_each_destination_has_a_window_of_its_own(office: Office) -> None:
    for to in (B, C):
        office.send(1, b"x" * (2 * WINDOW_BYTES), to=to)
    office.turn()
    assert office.on_the_way(A, B) == office.on_the_way(A, C) == WINDOW_BYTES


def test_control_messages_do_not_wait_for_the_window(office: Office) -> None:
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    office.turn()
    office.send(2, kind=Kind.TELL)
    office.carry(A, B, CONTROL)
    assert office.numbers() == [2]


def test_window_is_whole_again_after_transfers(office: Office) -> None:
    for number in range(30):
        office.send(number, b"x" * (CHUNK_BYTES + number))
        office.settle()
    office.send(30, b"x" * (2 * WINDOW_BYTES))
    office.turn()
    assert office.on_the_way() == WINDOW_BYTES


# --- peers that go


def test_forget_drops_what_waits_for_a_peer(office: Office) -> None:
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    office.send(2, to=C)
    office.couriers[A].forget(B)
    assert office.couriers[A].waiting_bytes() == 0
    office.settle()
    assert (office.numbers(B), office.numbers(C)) == ([], [2])


def test_forget_host_drops_what_waits_for_all_its_processes(office: Office) -> None:
    other = Address(B.host, b"another.")
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    office.send(2, BIG, to=other)
    office.send(3, to=C)
    office.couriers[A].forget_host(B.host)
    assert office.couriers[A].waiting_bytes() == 0
    office.turn()
    assert not office.wires[A, B, CONTROL]
    assert not office.wires[A, other, CONTROL]
    assert office.wires[A, C, CONTROL]


def test_forget_drops_half_a_transfer_and_what_waited_behind_it(office: Office) -> None:
    office.send(1, b"x" * (4 * CHUNK_BYTES))
    office.send(2)
    office.carry(A, B, CONTROL)
    office.carry(A, B, BULK, 2)
    office.couriers[B].forget(A)
    office.carry(A, B, BULK)
    assert office.numbers() == []


def test_forgotten_peer_may_speak_again(office: Office) -> None:
    office.send(1, BIG)
    office.settle()
    for me, other in ((A, B), (B, A)):
        office.couriers[me].forget(other)
    office.send(2, b"x" * (2 * WINDOW_BYTES))
    office.settle()
    assert office.numbers() == [1, 2]


def test_late_credit_of_a_forgotten_peer_is_ignored(office: Office) -> None:
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    office.carry(A, B, CONTROL)
    office.carry(A, B, BULK)
    office.couriers[A].forget(B)
    office.settle()
    assert office.couriers[A].waiting_bytes() == 0


def test_late_chunks_of_an_ended_process_are_not_kept(office: Office) -> None:
    office.couriers[B].forget(A, ended=True)
    late = chunk(1, 0, BIG)
    office.couriers[B].receive(A, late)
    assert not is_kept(late)
    office.couriers[B].receive(C, late)
    assert is_kept(late)


def test_only_the_last_ended_processes_are_remembered(office: Office) -> None:
    for number in range(3 * KEPT_ENDED):
        office.couriers[B].forget(Address(number.to_bytes(8, "big")), ended=True)
    assert len(office.couriers[B]._ended) == KEPT_ENDED


# --- what a stranger may send


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
    "transfer larger than any memory": [announcement(2**62, transfer=9, number=9)[0].bytes],
    "transfer larger than any number": [announcement(2**64 - 1, transfer=9, number=9)[0].bytes],
    "transfer of too many bytes": [announcement(*[2**62] * 9, transfer=9, number=9)[0].bytes],
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
    with pytest.raises(WireError, match="no memory for a transfer of"):
        office.couriers[B].receive(A, [zmq.Frame(pack([encode(item) for item in items]))])
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
