"""This process's one ZeroMQ context.

One, because a ZAP handler answers for the sockets of its own context only: a second context would have none.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import zmq

from gpulayer.errors import GPUlayerError

_OLDEST_LIBZMQ = (4, 3, 5)  # older ones have known holes that need no key

_lock = threading.Lock()
_contexts: dict[int, zmq.Context[Any]] = {}  # by pid; an inherited one is kept unused, for closing it could hang


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def context() -> zmq.Context[Any]:
    """This process's context, made at the first call; a forked child gets one of its own."""
    with _lock:
        found = _contexts.get(os.getpid())
        if found is None or found.closed:
            _check_libzmq()
            found = zmq.Context(io_threads=2)
            found.set(zmq.MAX_SOCKETS, 4096)
            _contexts[os.getpid()] = found
        return found


def is_current(candidate: zmq.Context[Any] | None) -> bool:
    """Whether `candidate` is this process's open context."""
    return candidate is not None and not candidate.closed and candidate is _contexts.get(os.getpid())


def close_context() -> None:
    """Close this process's context and every socket in it, dropping what is unsent; no thread may be using one."""
    with _lock:
        found = _contexts.pop(os.getpid(), None)
    if found is not None:
        found.destroy(linger=0)


def _check_libzmq() -> None:
    if zmq.zmq_version_info() < _OLDEST_LIBZMQ or not zmq.has("curve"):
        raise GPUlayerError(
            f"libzmq {zmq.zmq_version()} {'with' if zmq.has('curve') else 'without'} CURVE cannot protect connections; "
            "at least 4.3.5 with CURVE is needed; type: pip install --upgrade --force-reinstall pyzmq"
        )
