"""Whole messages over lanes that the test carries by hand: packs, chunks, order, credits, peers that go."""

from __future__ import annotations

import array
import random

import numpy
import pytest
import zmq

from gpulayer.resources import Address
from gpulayer.wire.courier import KEPT_ENDED, WINDOW_BYTES
from gpulayer.wire.message import (
    CHUNK_BYTES,
    INLINE_BYTES,
    MESSAGE_BYTES,
    ORDERED,
    PACK_BYTES,
    Kind,
    Message,
    WireError,
    encode,
    pack,
    unpack,
)
from tests.wire.office import BIG, BULK, CONTROL, A, B, C, Office, chunk, is_kept, waiting_bytes

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
    assert waiting_bytes(office.couriers[A]) == 0
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
    assert waiting_bytes(office.couriers[A]) == 0


# --- the window


def test_no_more_than_the_window_is_on_the_way_without_credit(office: Office) -> None:
    office.send(1, b"x" * (3 * WINDOW_BYTES))
    office.turn()
    assert office.on_the_way() == WINDOW_BYTES == 16 * 2**20
    assert waiting_bytes(office.couriers[A]) == 2 * WINDOW_BYTES
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
    assert waiting_bytes(office.couriers[A]) == 0
    office.settle()
    assert (office.numbers(B), office.numbers(C)) == ([], [2])


def test_forget_host_drops_what_waits_for_all_its_processes(office: Office) -> None:
    other = Address(B.host, b"another.")
    office.send(1, b"x" * (2 * WINDOW_BYTES))
    office.send(2, BIG, to=other)
    office.send(3, to=C)
    office.couriers[A].forget_host(B.host)
    assert waiting_bytes(office.couriers[A]) == 0
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
    assert waiting_bytes(office.couriers[A]) == 0


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
