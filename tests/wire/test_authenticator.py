from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
import zmq
from zmq.utils import z85

from gpulayer.errors import GPUlayerError
from gpulayer.wire import keys
from gpulayer.wire.authenticator import ZAP_DOMAIN, ZAP_ENDPOINT, Authenticator
from gpulayer.wire.context import close_context, context
from gpulayer.wire.keys import AllowList

WAIT_MS = 10_000


class Guard:
    """An authenticator on a loop of its own thread, as in an agent."""

    def __init__(self, home: Path, new_loop=asyncio.new_event_loop) -> None:
        self.home = home
        self.loop = new_loop()
        self.authenticator = Authenticator(self.loop, AllowList(home))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, function) -> None:
        async def call():
            function()

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def close(self) -> None:
        self.call(self.authenticator.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def guard(tmp_path: Path, request) -> Iterator[Guard]:
    guard = Guard(tmp_path / "home", request.param)
    guard.call(guard.authenticator.start)
    yield guard
    guard.close()
    close_context()


@pytest.fixture
def asker(guard: Guard) -> Iterator[zmq.Socket]:
    """Where libzmq asks, for questions that libzmq would not ask."""
    socket = context().socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(ZAP_ENDPOINT)
    yield socket
    socket.close()


def question(public: str = "", **changes: bytes) -> list[bytes]:
    parts = {
        "envelope": b"",
        "version": b"1.0",
        "request": b"7",
        "domain": ZAP_DOMAIN,
        "address": b"10.0.0.9",
        "routing_id": b"",
        "mechanism": b"CURVE",
        "key": z85.decode(public) if public else b"",
    }
    return list((parts | changes).values())


def ask(socket: zmq.Socket, frames: list[bytes]) -> list[bytes]:
    socket.send_multipart(frames)
    assert socket.poll(WAIT_MS)
    return socket.recv_multipart()


def test_authenticator_answers_with_the_key_as_user_id(guard, asker):
    public = keys.make_identity(guard.home).public
    assert ask(asker, question(public)) == [b"", b"1.0", b"7", b"200", b"OK", public.encode(), b""]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": b"2.0"},
        {"domain": b""},
        {"domain": b"other"},
        {"mechanism": b"NULL"},
        {"mechanism": b"PLAIN"},
        {"mechanism": b"curve"},
        {"key": b""},
        {"key": b"x" * 31},
        {"key": b"x" * 64},
        {"extra": b"credential"},
    ],
)
def test_authenticator_refuses_a_known_key_in_any_other_form(guard, asker, changes):
    public = keys.make_identity(guard.home).public
    assert ask(asker, question(public, **changes)) == [b"", b"1.0", b"7", b"400", b"refused", b"", b""]


def test_authenticator_refuses_an_unknown_key_and_logs_who_it_was(guard, asker, caplog):
    public = keys.new_pair().public
    with caplog.at_level(logging.WARNING, "gpulayer.security"):
        assert ask(asker, question(public))[3] == b"400"
    assert "10.0.0.9" in caplog.text
    assert public[:8] in caplog.text
    assert public[:9] not in caplog.text


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b""], [b"x", b"1.0", b"7"], [b""] * 100, [b"\xff" * 100] * 9, [b"", b"1.0", b"7"], [b"x" * 100_000]]
)
def test_authenticator_survives_malformed_questions(guard, asker, frames):
    public = keys.make_identity(guard.home).public
    for _ in range(3):
        asker.send_multipart(frames)
    asker.send_multipart(question(public, request=b"good"))
    answers = []
    while not answers or answers[-1][2] != b"good":
        assert asker.poll(WAIT_MS)
        answers.append(asker.recv_multipart())
    assert [answer[3] for answer in answers] == [b"400"] * (len(answers) - 1) + [b"200"]


def test_authenticator_refuses_and_goes_on_when_its_list_fails(tmp_path, caplog):
    class Broken(AllowList):
        def role(self, public_key: str) -> str | None:
            if public_key.startswith("a"):
                raise OSError("disk on fire")
            return "viewer"

    guard = Guard(tmp_path)
    guard.authenticator = Authenticator(guard.loop, Broken(tmp_path))
    try:
        guard.call(guard.authenticator.start)
        with context().socket(zmq.DEALER) as asker:
            asker.connect(ZAP_ENDPOINT)
            assert ask(asker, question("a" + "0" * 39))[3] == b"400"
            assert ask(asker, question("b" + "0" * 39))[3] == b"200"
    finally:
        guard.close()
        close_context()
    assert "disk on fire" in caplog.text


def test_authenticator_answers_a_burst(guard, asker):
    public = keys.make_identity(guard.home).public
    for number in range(2000):
        asker.send_multipart(question(public, request=b"%d" % number))
    answers = []
    while len(answers) < 2000:
        assert asker.poll(WAIT_MS)
        answers.append(asker.recv_multipart()[2:4])
    assert answers == [[b"%d" % number, b"200"] for number in range(2000)]


def test_authenticator_runs_from_start_to_stop_and_again(guard):
    seen = []
    for step in ("start", "stop", "stop", "start", "start", "stop"):
        guard.call(getattr(guard.authenticator, step))
        seen.append(guard.authenticator.running)
    assert seen == [True, False, False, True, True, False]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_authenticator_is_not_running_once_its_loop_is_closed(tmp_path, new_loop):
    loop = new_loop()
    authenticator = Authenticator(loop, AllowList(tmp_path))
    authenticator.start()
    assert authenticator.running
    loop.close()
    assert not authenticator.running
    authenticator.stop()
    close_context()


def test_another_authenticator_can_start_as_soon_as_the_first_has_stopped(guard):
    second = Authenticator(guard.loop, AllowList(guard.home))
    for _ in range(50):
        guard.call(guard.authenticator.stop)
        guard.call(second.start)
        guard.call(second.stop)
        guard.call(guard.authenticator.start)
    assert guard.authenticator.running


def test_start_refuses_a_second_authenticator(guard):
    second = Authenticator(guard.loop, AllowList(guard.home))
    with pytest.raises(GPUlayerError, match="has an authenticator already"):
        guard.call(second.start)
    assert not second.running
    assert guard.authenticator.running
