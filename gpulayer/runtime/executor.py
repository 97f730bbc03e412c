"""Runs the calls that reach a worker, one after another, on the worker's main thread.

The IO thread puts calls in with `submit` and may cancel them; everything of the user's (unpickling included) happens in
`run`. A running call is cancelled by a signal to the main thread, whose handler raises in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from gpulayer.errors import ActorDiedError, GPUlayerError, TaskCancelledError, to_facts
from gpulayer.resources import Address
from gpulayer.runtime import context
from gpulayer.runtime.calls import HANDED_BACK, split_payloads, unpack_arguments
from gpulayer.wire import serialize
from gpulayer.wire.message import Buffer, Kind, Message

Reply = Callable[[Address, int, Kind, dict[str, Any], Sequence[Buffer]], None]
OnStart = Callable[[Address, int, str], None]
CANCEL_SIGNAL = signal.SIGUSR1
MAX_TEXT = 100_000


class Executor:
    """The queue and the state of one worker: the functions it has, its actor if it is one."""

    def __init__(self, reply: Reply, on_start: OnStart = lambda caller, number, name: None) -> None:
        self._reply = reply
        self._on_start = on_start
        self._calls: queue.SimpleQueue[tuple[Address, Message] | None] = queue.SimpleQueue()
        self._shipped: dict[bytes, Sequence[Buffer]] = {}  # functions that have arrived and were not called yet
        self._functions: dict[bytes, Any] = {}
        self._actor: Any = None
        self._cancelled: set[tuple[Address, int]] = set()
        self._running: tuple[Address, int] | None = None
        self._pid = os.getpid()
        self._interruptible = False
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = False  # the running call waits for others
        self._keeps_order = False  # an actor's and a gang's calls are not interchangeable
        self._coroutine: asyncio.Task[Any] | None = None
        self._own: GPUlayerError | None = None  # the last error that is the executor's own, not user code's
        self._broken = ""  # why the actor's constructor failed
        self.host = ""
        self.caller: Address | None = None
        self.status: dict[str, Any] = {"what": "", "busy_since_s": None, "calls": 0}

    # --- from the IO thread

    def submit(self, source: Address, message: Message) -> None:
        """Queue one call. The function that it brings is kept in any case: its caller will not send that again."""
        function = split_payloads(message)[0]
        if function:
            self._shipped[message.body["f"]] = function
        if message.body["op"] != "task":
            self._keeps_order = True
        if self._waiting and message.body["op"] == "task":
            self._hand_back(source, message)
        else:
            self._calls.put((source, message))

    def set_waiting(self, waits: bool) -> None:
        """The running call waits for others: tasks sent ahead go back to their callers, for they may be what it waits for."""
        self._waiting = waits
        while waits and not self._keeps_order:
            try:
                item = self._calls.get_nowait()
            except queue.Empty:
                return
            if item is None:
                self._calls.put(item)
                return
            self._hand_back(*item)

    def _hand_back(self, source: Address, message: Message) -> None:
        self._reply(source, message.id, Kind.FAIL, {"error": HANDED_BACK}, ())

    def cancel(self, source: Address, number: int, *, again: bool = False) -> bool:
        """Cancel a call, queued or running; one that has finished is left alone.

        True if it runs: a signal that comes just before a system call does not interrupt that, so cancel it `again` soon.
        """
        key = (source, number)
        with self._mutex:
            if self._running == key:
                self._cancelled.add(key)
                if signal.getsignal(CANCEL_SIGNAL) == self._interrupt:  # else user code took the signal: it would end the process
                    signal.pthread_kill(threading.main_thread().ident or 0, CANCEL_SIGNAL)
            elif not again:
                self._cancelled.add(key)
            return self._running == key

    def stop(self) -> None:
        """End `run` after the call that runs now."""
        self._calls.put(None)

    # --- on the main thread

    def run(self) -> None:
        """Serve until `stop`."""
        signal.signal(CANCEL_SIGNAL, self._interrupt)
        while (item := self._calls.get()) is not None:
            self._serve(*item)

    def _serve(self, source: Address, message: Message) -> None:
        key = (source, message.id)
        started_s = time.perf_counter()
        self.caller = source
        self._on_start(source, message.id, message.body["n"])
        with self._mutex:
            dropped = key in self._cancelled
            self._running = None if dropped else key
        self.status.update(what=message.body["n"], busy_since_s=time.time(), calls=self.status["calls"] + 1)
        context.enter(lambda value: self._reply(source, message.id, Kind.YIELD, {}, serialize.dumps(value)))
        signal.signal(CANCEL_SIGNAL, self._interrupt)  # user code may have put its own handler there
        try:
            if dropped:
                raise self._mine(TaskCancelledError(f"{message.body['n']} was cancelled before it ran"))
            frames = self._call(message)
        except SystemExit:  # ends the process, and its callers hear that from the agent
            raise
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is its caller's
            if os.getpid() != self._pid:
                sys.excepthook(type(error), error, error.__traceback__)
                os._exit(1)
            self._finish(key)
            if message.body["op"] == "create":
                self._broken = f"its constructor failed with {type(error).__name__}: {_text(error)}"
            where = f"in {message.body['n']}, pid {os.getpid()} on host {self.host}"
            self._reply(source, message.id, Kind.FAIL, *describe_failure(error, where, own=error is self._own))
        else:
            self._finish(key)
            self._reply(source, message.id, Kind.REPLY, {"s": time.perf_counter() - started_s}, frames)
        finally:
            context.leave()
            self.status.update(what="", busy_since_s=None)

    def _call(self, message: Message) -> list[Buffer]:
        """The call itself: everything in it may be interrupted by a cancel."""
        self._interruptible = True
        try:
            function = self._target(message)
            _, arguments, *slots = split_payloads(message)
            args, kwargs = unpack_arguments(arguments, slots)
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = self._run_coroutine(result)
            if os.getpid() != self._pid:  # a child that user code forked and let return: it has no part in the worker
                os._exit(0)
            if message.body["op"] == "create":
                self._actor, result = result, None
            return serialize.dumps(result)
        finally:
            self._interruptible = False

    def _target(self, message: Message) -> Callable[..., Any]:
        body = message.body
        if body["op"] == "method":
            if self._actor is None:
                name = body["n"].partition(".")[0]
                raise self._mine(ActorDiedError(name=name, host=self.host, pid=os.getpid(), cause=self._broken))
            return getattr(self._actor, body["method"])
        digest = body["f"]
        if digest in self._shipped:
            self._functions[digest] = serialize.loads(self._shipped[digest])
            del self._shipped[digest]
        return self._functions[digest]

    def _run_coroutine(self, coroutine: Any) -> Any:
        """Async functions and methods run to their end, one at a time, on a loop that lives as long as the worker."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._coroutine = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            if self._running not in self._cancelled:
                raise
            raise self._mine(TaskCancelledError("the call was cancelled while it ran")) from None
        finally:
            self._coroutine = None

    def _mine(self, error: GPUlayerError) -> GPUlayerError:
        """Note that this error comes from here: it travels as facts, while whatever user code raises travels as its own."""
        self._own = error
        return error

    def _finish(self, key: tuple[Address, int]) -> None:
        for stream in (sys.stdout, sys.stderr):  # an unfinished line would be lost should the worker be ended now
            with contextlib.suppress(Exception):  # user code may have closed it, or put something of its own there
                stream.flush()
        with self._mutex:
            self._running = None
            self._cancelled.discard(key)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible and self._running in self._cancelled:
            self._interruptible = False  # once: a second cancel must not interrupt the handling of the first
            if self._coroutine is not None and self._loop is not None:  # asyncio swallows what is raised between two callbacks
                self._loop.call_soon_threadsafe(self._coroutine.cancel)
                return
            raise self._mine(TaskCancelledError("the call was cancelled while it ran"))


def describe_failure(error: BaseException, where: str = "", *, own: bool = False) -> tuple[dict[str, Any], list[Buffer]]:
    """(body, frames) of a FAIL: the executor's `own` errors as facts; the user's as text, and pickled if it survives that."""
    if own and isinstance(error, GPUlayerError):
        return to_facts(error), []
    trace = (f"{where}\n" if where else "") + _trace(error)
    cls = type(error)
    body = {
        "error": "user",
        "type": f"{cls.__module__}.{cls.__qualname__}",
        "text": _clip(_text(error)),
        "traceback": _clip(trace),
    }
    try:
        frames = serialize.dumps(error.with_traceback(None))
        serialize.loads(frames)
    except BaseException:  # noqa: BLE001 - an exception class may refuse pickling in any way; its text travels instead
        frames = []
    return body, frames


def _clip(text: str) -> str:
    """The ends of a text that is too long for a header (an exception may quote a whole file)."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - MAX_TEXT} characters left out ...\n{text[-half:]}"


def _user_part(error: BaseException) -> Any:
    """The traceback without our own frames at its top."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, _user_part(error)))
    except Exception as inner:  # noqa: BLE001 - an error whose parts cannot be shown (a SyntaxError of odd fields) is still one
        return f"{type(error).__name__} (its traceback cannot be shown: {inner!r})"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as inner:  # noqa: BLE001 - a broken __str__ must not hide the error
        return f"(its text cannot be shown: {inner!r})"
