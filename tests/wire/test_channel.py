"""A lane reads every message of a real socket, whatever the descriptor says, on both kinds of loop."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from gpulayer.wire import security
from gpulayer.wire.channel import TURN_MESSAGES, Lane
from gpulayer.wire.context import close_context
from gpulayer.wire.loop import new_loop


class Ends:
    """A ROUTER lane and any number of DEALER lanes, over ipc."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self.loop = loop
        self.problems: list[str] = []
        loop.set_exception_handler(lambda _, context: self.problems.append(str(context.get("exception"))))
        self.path = folder / "s.sock"
        self.got: list[list[bytes]] = []
        self.replies: list[bytes] = []
        self.on_frames: Callable[[list[zmq.Frame]], None] = lambda frames: None
        self.server = Lane(security.local_server_socket(self.path), loop, self._take)
        self.lanes = [self.server]

    def _take(self, frames: list[zmq.Frame]) -> None:
        self.got.append([frame.bytes for frame in frames])
        self.on_frames(frames)

    def socket(self, name: bytes) -> zmq.Socket[bytes]:
        return security.local_client_socket(self.path, routing_id=name)

    def client(self, name: bytes) -> Lane:
        self.lanes.append(Lane(self.socket(name), self.loop, lambda frames: self.replies.append(frames[0].bytes)))
        return self.lanes[-1]

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = self.loop.time() + timeout_s
        while not condition():
            assert self.loop.time() < deadline, "the condition did not hold in time"
            self.loop.run_until_complete(asyncio.sleep(0.001))


@pytest.fixture(params=[asyncio.new_event_loop, new_loop], ids=["asyncio", "uvloop"])
def ends(request: pytest.FixtureRequest, own_folders: Path) -> Iterator[Ends]:
    folder = own_folders / "run"
    folder.mkdir(mode=0o700)
    ends = Ends(request.param(), folder)
    yield ends
    for lane in ends.lanes:
        lane.close()
    ends.loop.close()
    close_context()
    assert ends.problems == []


def test_messages_arrive_in_order(ends: Ends) -> None:
    client = ends.client(b"c")
    for number in range(1000):
        assert client.send([b"%d" % number, b"", b"x" * number])
    ends.run_until(lambda: len(ends.got) == 1000)
    assert ends.got == [[b"c", b"%d" % number, b"", b"x" * number] for number in range(1000)]


def test_answers_arrive_when_both_sides_send_at_once(ends: Ends) -> None:
    def answer(frames: list[zmq.Frame]) -> None:
        ends.server.send([frames[0], frames[1]])

    ends.on_frames = answer
    clients = [ends.client(b"c%d" % number) for number in range(5)]
    for round_ in range(200):
        for client in clients:
            client.send([b"%d" % round_])
        if round_ % 20 == 0:
            ends.run_until(lambda seen=round_: len(ends.replies) >= 5 * seen)
    ends.run_until(lambda: len(ends.replies) == 1000)
    assert sorted(ends.replies) == sorted(b"%d" % number for number in range(200) for _ in range(5))


def test_messages_that_came_before_the_lane_are_read(ends: Ends) -> None:
    ends.client(b"c").send([b"hello"])
    ends.run_until(lambda: len(ends.got) == 1)
    late = ends.socket(b"late")
    for number in range(3):
        late.send(b"%d" % number)
    ends.run_until(lambda: len(ends.got) == 4)
    for number in range(3):
        ends.server.send([b"late", b"%d" % number])
    assert late.poll(5000)  # all are in the socket, and the edge is over
    ends.lanes.append(Lane(late, ends.loop, lambda frames: ends.replies.append(frames[0].bytes)))
    ends.run_until(lambda: len(ends.replies) == 3)


def test_flood_leaves_turns_for_others(ends: Ends) -> None:
    turns: list[int] = []

    def count() -> None:
        turns.append(len(ends.got))
        ends.loop.call_soon(count)

    ends.client(b"c").send([b"first"])
    ends.run_until(lambda: len(ends.got) == 1)
    for _ in range(10 * TURN_MESSAGES):
        ends.lanes[1].send([b"more"])
    ends.loop.call_soon(count)
    ends.run_until(lambda: len(ends.got) == 1 + 10 * TURN_MESSAGES)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 2 * TURN_MESSAGES


@pytest.mark.parametrize("copy", [True, False])
def test_any_buffer_can_be_sent(ends: Ends, copy: bool) -> None:
    client = ends.client(b"c")
    client.send([b"bytes", bytearray(b"array"), memoryview(b"xviewx")[1:-1], zmq.Frame(b"frame"), b"y" * 100_000], copy=copy)
    ends.run_until(lambda: len(ends.got) == 1)
    assert ends.got == [[b"c", b"bytes", b"array", b"view", b"frame", b"y" * 100_000]]


def test_received_frames_can_be_forwarded_uncopied(ends: Ends) -> None:
    def forward(frames: list[zmq.Frame]) -> None:
        ends.server.send([b"to", *frames[1:]], copy=False)

    ends.client(b"to").send([b"here"])
    ends.run_until(lambda: len(ends.got) == 1)
    ends.on_frames = forward
    payload = os.urandom(500_000)
    ends.client(b"from").send([payload])
    ends.run_until(lambda: len(ends.replies) == 1)
    assert ends.replies == [payload]


def test_send_says_that_the_addressee_is_unknown(ends: Ends) -> None:
    assert ends.server.send([b"nobody", b"hello"]) is False


def test_send_says_that_the_addressee_has_gone(ends: Ends) -> None:
    client = ends.client(b"c")
    client.send([b"hello"])
    ends.run_until(lambda: len(ends.got) == 1)
    assert ends.server.send([b"c", b"hello"]) is True
    client.close()
    ends.run_until(lambda: ends.server.send([b"c", b"hello"]) is False)


def test_callback_that_fails_does_not_stop_the_lane(ends: Ends) -> None:
    def fail(frames: list[zmq.Frame]) -> None:
        if frames[1].bytes in (b"0", b"5"):
            raise ValueError(f"message {frames[1].bytes.decode()}")

    ends.on_frames = fail
    client = ends.client(b"c")
    for number in range(10):
        client.send([b"%d" % number])
    ends.run_until(lambda: len(ends.got) == 10)
    assert ends.problems == ["message 0", "message 5"]
    ends.problems.clear()


def test_closed_lane_reads_and_sends_nothing(ends: Ends) -> None:
    client = ends.client(b"c")
    client.send([b"hello"])
    ends.run_until(lambda: len(ends.got) == 1)
    ends.server.send([b"c", b"never read"])
    client.close()
    client.close()
    assert client.closed
    assert client.send([b"never sent"]) is False
    ends.client(b"d").send([b"last"])
    ends.run_until(lambda: len(ends.got) == 2)
    assert ends.got[1] == [b"d", b"last"]
    assert ends.replies == []


def test_lane_may_be_closed_by_its_own_callback(ends: Ends) -> None:
    ends.on_frames = lambda frames: ends.server.close()
    client = ends.client(b"c")
    for _ in range(5):
        client.send([b"hello"])
    ends.run_until(lambda: ends.server.closed)
    ends.run_until(lambda: not client._look_planned)
    assert len(ends.got) == 1


def test_what_was_sent_before_close_arrives_within_the_linger_time(ends: Ends) -> None:
    client = ends.client(b"c")
    for number in range(100):
        client.send([b"%d" % number, b"x" * 10_000])
    client.close(linger_ms=5000)
    ends.run_until(lambda: len(ends.got) == 100)
