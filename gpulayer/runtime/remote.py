"""`@gpulayer.remote`, and what to do with the references it gives: get, wait, put, cancel."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, overload

from gpulayer.errors import UsageError
from gpulayer.runtime import session as sessions
from gpulayer.runtime.actors import ActorClass
from gpulayer.runtime.calls import Call, Shipped, pack_arguments
from gpulayer.runtime.options import ACTOR_DEFAULT, TASK_DEFAULT, Options
from gpulayer.runtime.refs import Entry, ObjectRef
from gpulayer.runtime.tasks import Shape
from gpulayer.wire import serialize


class RemoteFunction:
    """A function made remote: `f.remote(...)` runs it on some host, `f.options(...)` changes what it needs."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._shipped: Shipped | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._function.__name__
        raise UsageError(f"{name} is remote: call it with {name}.remote(...), then gpulayer.get(ref)")

    def options(self, **options: Any) -> RemoteFunction:
        """The same function with other options: num_cpus, num_gpus, host."""
        return RemoteFunction(self._function, self._options.updated(options, actor=False))

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        """Call it; returns a reference to the result at once."""
        session = sessions.current()
        if self._shipped is None:
            self._shipped = Shipped.of(self._function, self._function.__name__)
        arguments, refs = pack_arguments(args, kwargs)
        call = Call("task", self._shipped.name, self._shipped, arguments, [ref._entry for ref in refs], Entry())
        ref = session.new_ref(call.entry, call.name)
        session.tasks.submit(Shape(self._options.need, self._options.host, self._options.modules), call)
        return ref

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shipped": None}


@overload
def remote(target: type, /) -> ActorClass: ...  # pyright: ignore[reportOverlappingOverload] - a class is callable too
@overload
def remote(target: Callable[..., Any], /) -> RemoteFunction: ...
@overload
def remote(**options: Any) -> Callable[[Any], Any]: ...
def remote(*args: Any, **options: Any) -> Any:
    """Make a function or a class remote.

    `@gpulayer.remote`, or with what it needs: `@gpulayer.remote(num_cpus=1, num_gpus=0.5, host="gpu1")`. Tasks
    need one CPU unless told otherwise, actors none. Raises `UsageError` for an unknown option.
    """
    if options or not args:
        if args:
            raise UsageError("write @gpulayer.remote or @gpulayer.remote(option=...), options by name")
        for actor in (False, True):  # a wrong option is an error at once, not only when the decorator is applied
            try:
                (ACTOR_DEFAULT if actor else TASK_DEFAULT).updated(options, actor=actor)
                break
            except UsageError:
                if actor:
                    raise
        return lambda target: _make_remote(target, options)
    if len(args) != 1:
        raise UsageError("remote() takes one function or class")
    return _make_remote(args[0], {})


def _make_remote(target: Any, options: dict[str, Any]) -> Any:
    if inspect.isclass(target):
        return ActorClass(target, ACTOR_DEFAULT.updated(options, actor=True))
    if callable(target) and hasattr(target, "__name__"):
        return RemoteFunction(target, TASK_DEFAULT.updated(options, actor=False))
    raise UsageError(f"remote() takes a function or a class, not {type(target).__name__}")


@overload
def get(refs: ObjectRef, *, timeout: float | None = None) -> Any: ...
@overload
def get(refs: Sequence[ObjectRef], *, timeout: float | None = None) -> list[Any]: ...
def get(refs: Any, *, timeout: float | None = None) -> Any:
    """Wait for a reference's value, or a list's. `timeout` is in seconds.

    Raises what the call raised (its own type, with the remote traceback as cause), `GetTimeoutError`, or an error of
    `gpulayer.errors` that says what happened to the worker. Ctrl-C cancels the calls that are waited for.
    """
    one = isinstance(refs, ObjectRef)
    wanted = [refs] if one else _check_refs(refs, "get")
    entries = [ref._entry for ref in wanted]
    if not all(entry.done for entry in entries):
        sessions.current().wait_for(entries, timeout)
    values = [entry.load() for entry in entries]
    return values[0] if one else values


def wait(
    refs: Sequence[ObjectRef], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Wait until `num_returns` of the references are ready (a failed one is), or `timeout` seconds have passed.

    Returns (ready, not ready), each in the order given; ready has at most `num_returns` references.
    """
    wanted = _check_refs(refs, "wait")
    if not 0 < num_returns <= len(wanted):
        raise UsageError(f"num_returns={num_returns} must be between 1 and the number of references, {len(wanted)}")
    if sum(ref._entry.done for ref in wanted) < num_returns:
        with sessions.current().waiting():
            _wait_for_some([ref._entry for ref in wanted], num_returns, timeout)
    ready = [ref for ref in wanted if ref._entry.done][:num_returns]
    return ready, [ref for ref in wanted if ref not in ready]


def _wait_for_some(entries: Sequence[Entry], count: int, timeout_s: float | None) -> None:
    changed = threading.Semaphore(0)
    for entry in entries:
        entry.when_done(changed.release)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while sum(entry.done for entry in entries) < count:
        left = None if deadline is None else deadline - time.monotonic()
        if (left is not None and left <= 0) or not changed.acquire(timeout=left):
            return


def put(value: Any) -> ObjectRef:
    """Keep a copy of `value` and return a reference to it, to pass to several calls. Raises `SerializationError`."""
    if isinstance(value, ObjectRef):
        raise UsageError("put() takes a value; this is a reference already")
    return sessions.current().put(serialize.dumps(value))


def cancel(ref: ObjectRef, *, force: bool = False) -> None:
    """Cancel a call: one that waits never runs, one that runs gets `TaskCancelledError` raised in it.

    `force=True` ends its worker process instead. A call that has finished is left alone.
    """
    if not isinstance(ref, ObjectRef):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"cancel() takes a reference, not {type(ref).__name__}; to end an actor, use gpulayer.kill(actor)")
    how = ref._entry.cancel
    if how is not None:
        how(force)


def _check_refs(refs: Any, verb: str) -> list[ObjectRef]:
    wanted = list(refs) if isinstance(refs, (list, tuple, set)) else None
    if wanted is None or not all(isinstance(ref, ObjectRef) for ref in wanted):
        raise UsageError(f"{verb}() takes references (what .remote() returned), not {type(refs).__name__}")
    if len({id(ref) for ref in wanted}) != len(wanted) and verb == "wait":
        raise UsageError("wait() was given the same reference twice")
    return wanted
