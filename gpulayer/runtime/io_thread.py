"""A background thread with the event loop that owns all sockets of a driver or a worker.

User code keeps its own thread (and, in a notebook, its own loop). It hands work over with `post`, which wakes the loop
once for many calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gpulayer.wire.loop import new_loop

T = TypeVar("T")


class IOThread:
    """One thread, one loop."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._posted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake_planned = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function(*args)` on the loop soon, in the order posted. Callable from any thread; after `stop` it does nothing."""
        if self._stopped:  # the handle of an actor may be collected after the session has ended
            return
        self._posted.append((function, args))
        if not self._wake_planned:
            self._wake_planned = True
            self.loop.call_soon_threadsafe(self._run_posted)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it here. Ctrl-C cancels it."""
        if self.is_current():
            work.close()
            raise RuntimeError("this would wait for itself: it was called from the thread that it waits for")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except (concurrent.futures.TimeoutError, TimeoutError):
            if not future.done():
                future.cancel()
            raise
        except KeyboardInterrupt:
            future.cancel()
            raise

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the loop and the thread."""
        self._stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def _run_posted(self) -> None:
        self._wake_planned = False  # before looking: what is posted from here on plans another wake
        while self._posted:
            function, args = self._posted.popleft()
            try:
                function(*args)
            except Exception as error:  # noqa: BLE001 - a fault in one must not strand those posted behind it
                self.loop.call_exception_handler({"message": f"{function} failed", "exception": error})
