"""Couriers and the wires between them, which a test carries by hand."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict, deque
from collections.abc import Callable

import zmq

from gpulayer.resources import Address
from gpulayer.wire.courier import Courier
from gpulayer.wire.message import INLINE_BYTES, Kind, Message, chunk_header, encode, pack

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


def waiting_bytes(courier: Courier) -> int:
    """Bulk bytes that wait for credit."""
    return sum(len(view) for out in courier._out.values() for _, _, view in out.chunks)


def is_kept(frames: list[zmq.Frame]) -> bool:
    """Whether somebody else than the list holds the last frame."""
    holders = sys.getrefcount(frames[-1])  # counts the list and the argument
    return holders > 2


def chunk(transfer: int, offset: int, data: bytes) -> list[zmq.Frame]:
    return [zmq.Frame(chunk_header(transfer, offset)), zmq.Frame(data)]


def announcement(*sizes: int, transfer: int = 1, number: int = 1) -> list[zmq.Frame]:
    return [zmq.Frame(pack([encode(Message(Kind.CALL, number, {}, (), (transfer, list(sizes))))]))]
