"""References to results that may not be there yet.

An `Entry` is the place in this process where a result arrives; an `ObjectRef` is what the user holds. Waiting costs one lock,
since a condition variable or a `concurrent.futures.Future` would add tens of microseconds to every call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpulayer.errors import GPUlayerError, RemoteError, RemoteTraceback, from_facts, to_facts
from gpulayer.resources import Address
from gpulayer.wire import serialize
from gpulayer.wire.message import Buffer, Kind, Message


class Entry:
    """A result's place: empty, then for ever a payload or a failure."""

    __slots__ = ("_callbacks", "_failure", "_frames", "_lock", "_mutex", "_taken", "cancel", "done")

    def __init__(self) -> None:
        self.done = False
        self.cancel: Callable[[bool], None] | None = None  # how to cancel what fills it
        self._frames: Sequence[Buffer] = ()
        self._failure: Message | None = None
        self._taken = False
        self._callbacks: list[Callable[[], object]] = []
        self._mutex = threading.Lock()
        self._lock = threading.Lock()
        self._lock.acquire()

    def fill(self, frames: Sequence[Buffer], *, shared: bool = False) -> None:
        """The result has arrived. `shared` frames are also used elsewhere, so that loading copies them."""
        self._finish(frames, shared, None)

    def fail(self, failure: Message) -> None:
        """A FAIL has arrived instead."""
        self._finish((), False, failure)

    def fail_with(self, error: GPUlayerError) -> None:
        """It failed on this side."""
        self.fail(failure_message(error))

    def take(self, message: Message) -> None:
        """Fill from a REPLY, fail from a FAIL."""
        if message.kind is Kind.FAIL:
            self.fail(message)
        else:
            self.fill(message.frames)

    def _finish(self, frames: Sequence[Buffer], shared: bool, failure: Message | None) -> None:
        with self._mutex:
            if self.done:  # the first outcome stays: a call cancelled here may still get an answer
                return
            self._frames, self._taken, self._failure = frames, shared, failure
            self.done = True
            self.cancel = None
            callbacks, self._callbacks = self._callbacks, []
        self._lock.release()
        for callback in callbacks:
            callback()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until done; False if `timeout_s` passed first."""
        if self.done:
            return True
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            return False
        self._lock.release()  # pass it on to the next who waits
        return True

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once done (at once if it is), from whichever thread finishes it."""
        with self._mutex:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    @property
    def failed(self) -> Message | None:
        """The failure, if it has failed."""
        return self._failure

    @property
    def frames(self) -> Sequence[Buffer]:
        """The payload of a result that has arrived; also used elsewhere from now on."""
        self._taken = True
        return self._frames

    def load(self) -> Any:
        """The value, or raise what the call raised. The first load takes the payload's memory over; later ones copy it."""
        if self._failure is not None:
            raise to_exception(self._failure)
        frames, taken, self._taken = self._frames, self._taken, True
        return serialize.loads([bytearray(frame) for frame in frames] if taken else frames)


def failure_message(error: GPUlayerError) -> Message:
    """One of our own errors as the FAIL that would have brought it."""
    return Message(Kind.FAIL, 0, to_facts(error))


def to_exception(failure: Message) -> BaseException:
    """The exception that a FAIL carries: one of ours, or the user's own with the remote traceback as its cause."""
    body = failure.body
    if body.get("error") != "user":
        return from_facts(body)
    trace = str(body["traceback"])
    if failure.frames:
        try:
            error = serialize.loads([bytearray(frame) for frame in failure.frames])
        except Exception:  # noqa: BLE001 - an exception class may fail in any way when it is rebuilt here; its text is kept
            error = None
        if isinstance(error, BaseException):
            error.__cause__ = RemoteTraceback(trace)
            return error
    return RemoteError(type_name=body["type"], text=body["text"], traceback=trace)


class ObjectRef:
    """A reference to a result: give it to `get`, `wait`, `cancel`, or to another remote call; or `await` it."""

    __slots__ = ("__weakref__", "_entry", "_export", "name")

    def __init__(self, entry: Entry, name: str, export: Callable[[Entry], tuple[Address, int]]) -> None:
        self._entry = entry
        self._export = export
        self.name = name

    def __repr__(self) -> str:
        entry = self._entry
        return f"ObjectRef({self.name}, {'failed' if entry.failed else 'ready' if entry.done else 'pending'})"

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._entry.done:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            self._entry.when_done(lambda: loop.call_soon_threadsafe(wake))
            with waiting():
                yield from arrived.__await__()
        return self._entry.load()

    def __reduce__(self) -> tuple[Any, ...]:
        owner, number = self._export(self._entry)
        return (_adopt, (owner.to_bytes(), number, self.name))


adopt: Callable[[Address, int, str], ObjectRef] | None = None
"""How this process turns a reference that arrived in a payload into its own; set by the session."""

waiting: Callable[[], AbstractContextManager[None]] = nullcontext
"""Around a wait for results: a worker that waits lends its CPUs to others; set by the session."""


def _adopt(owner: bytes, number: int, name: str) -> ObjectRef:
    if adopt is None:
        raise RemoteError(type_name="ObjectRef", text="a reference can only be unpickled in a driver or a worker", traceback="")
    return adopt(Address.from_bytes(owner), number, name)
