"""What code inside a worker may ask about the call that it runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpulayer.errors import UsageError

_local = threading.local()


def enter(send: Callable[[Any], None]) -> None:
    """A call begins on this thread; `send` carries a value to its caller."""
    _local.send = send


def leave() -> None:
    """The call has ended."""
    _local.send = None


def report(value: Any) -> None:
    """Send a value to the caller of the running call, ahead of its result. Raises `UsageError` outside of a call."""
    send = getattr(_local, "send", None)
    if send is None:
        raise UsageError("report() works inside a remote call, on the thread that runs it")
    send(value)
