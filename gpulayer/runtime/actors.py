"""Actors from the caller's side: the class, the handle, and the queue of calls that keeps their order."""

from __future__ import annotations

import difflib
import functools
import json
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import gpulayer.runtime.connect  # noqa: F401  # pyright: ignore[reportUnusedImport] - a first remote call connects by itself
from gpulayer.errors import ActorDiedError, GetTimeoutError, GPUlayerError, TaskCancelledError, UsageError, from_facts
from gpulayer.resources import Address
from gpulayer.runtime import session as sessions
from gpulayer.runtime.calls import Call, Shipped, pack_arguments
from gpulayer.runtime.options import Options, lease_body
from gpulayer.runtime.refs import Entry, ObjectRef
from gpulayer.runtime.session import Session
from gpulayer.runtime.tasks import cancel_sent
from gpulayer.scheduler.placement import place
from gpulayer.wire.message import Kind, Message

START_TIMEOUT_S = 90.0


class ActorQueue:
    """Calls of one process to one actor: sent in order, each when its arguments are there. For the IO thread."""

    def __init__(self, session: Session, address: Address | None) -> None:
        self.placed = Entry()
        self.address = address
        self.ended: GPUlayerError | None = None
        self._session = session
        self._waiting: deque[Call] = deque()
        if address is not None:
            self.placed.fill(())

    def submit(self, call: Call) -> None:
        """Take a call from any thread."""
        call.entry.cancel = lambda force: self._session.io.post(self._cancel, call, force)
        self._session.io.post(self._append, call)

    def place_at(self, address: Address) -> None:
        """The actor's worker is up."""
        self.address = address
        self.placed.fill(())
        self.flush()

    def end(self, error: GPUlayerError) -> None:
        """The actor will never be there, or is there no more."""
        self.ended = self.ended or error
        self.placed.fail_with(error)
        while self._waiting:
            self._waiting.popleft().entry.fail_with(self.ended)

    def flush(self) -> None:
        """Send from the front what can be sent."""
        while self._waiting and (self.address is not None or self.ended):
            call = self._waiting[0]
            if not call.cancelled and any(not need.done for need in call.needs):
                return
            self._waiting.popleft()
            self._send(call)

    def _append(self, call: Call) -> None:
        self._waiting.append(call)
        for need in call.needs:
            need.when_done(lambda: self._session.io.post(self.flush))
        self.flush()

    def _send(self, call: Call) -> None:
        failure = call.failure()
        error = self.ended or self._session.closed
        if call.cancelled:
            error = TaskCancelledError(f"{call.name} was cancelled before it ran")
        if error is not None or failure is not None:
            call.entry.fail_with(error) if error is not None else call.entry.fail(failure)  # type: ignore[arg-type]
            return
        assert self.address is not None
        body, frames = call.message_parts(self._session.shipped_to.setdefault(self.address, set()))
        number = self._session.endpoint.request(
            self.address, Kind.CALL, body, frames, lambda message: self._on_reply(call, message), call.on_yield
        )
        call.sent = (self.address, number)

    def _on_reply(self, call: Call, message: Message) -> None:
        if message.kind is Kind.FAIL and (message.body.get("error") == "ActorDiedError" or call.op == "create"):
            self.ended = self.ended or _death(call, message)
            if call.op == "create":  # an actor that does not exist holds nothing
                release(self._session, self, self.ended.facts.get("cause", str(self.ended)))
        call.settle(message)

    def _cancel(self, call: Call, force: bool) -> None:
        call.cancelled = True
        if call.sent is not None:
            cancel_sent(self._session, call, force)
        elif call in self._waiting:
            self._waiting.remove(call)
            call.entry.fail_with(TaskCancelledError(f"{call.name} was cancelled before it ran"))


def _death(call: Call, message: Message) -> GPUlayerError:
    if message.body.get("error") == "ActorDiedError":
        return from_facts(message.body)
    text = (
        f"{message.body.get('type')}: {message.body.get('text')}"
        if message.body.get("error") == "user"
        else str(from_facts(message.body))
    )
    return ActorDiedError(name=call.name, host="its host", pid="?", cause=f"its constructor failed with {text}")


class ActorMethod:
    """`handle.method`: call it with `.remote(...)`."""

    def __init__(self, handle: ActorHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        """Call the method; returns a reference to its result."""
        return self._handle._call(self._name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"an actor's method is called with {self._name}.remote(...), not {self._name}(...)")


class ActorHandle:
    """A remote object. Its methods are called with `handle.method.remote(...)`; it may be passed to other remote calls."""

    def __init__(self, session: Session, queue: ActorQueue, label: str, methods: tuple[str, ...]) -> None:
        self._session = session
        self._queue = queue
        self._label = label
        self._methods = methods
        self._keep: Callable[[], object] | None = None  # stops the end of the actor with its first handle

    def __getattr__(self, name: str) -> ActorMethod:
        if name in self.__dict__.get("_methods", ()):
            return ActorMethod(self, name)
        near = difflib.get_close_matches(name, self.__dict__.get("_methods", ()), 1)
        raise AttributeError(
            f"actor {self.__dict__.get('_label')} has no method {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )

    def __repr__(self) -> str:
        return f"ActorHandle({self._label})"

    def is_at(self, address: Address) -> bool:
        """Whether the actor is the worker at `address`."""
        return self._queue.address == address

    def __reduce__(self) -> tuple[Any, ...]:
        if self._keep is not None:
            self._keep()  # somebody else may hold it now: it lives as long as the session
        address = actor_address(self)
        return (_adopt_handle, (address.to_bytes(), self._label, self._methods))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectRef:
        self._session.check_open()
        ref = _submit(self._session, self._queue, "method", f"{self._label}.{method}", None, args, kwargs, method)
        ref._entry.when_done(functools.partial(id, self))  # a call that waits keeps the actor, as a handle does
        return ref


def actor_address(handle: ActorHandle) -> Address:
    """Where the actor is; waits until it has been placed. Raises what kept it from that."""
    queue = handle._queue
    if not queue.placed.wait(START_TIMEOUT_S):
        raise GetTimeoutError(f"actor {handle._label} was not placed within {START_TIMEOUT_S:g} s")
    if queue.address is None:
        queue.placed.load()
    assert queue.address is not None
    return queue.address


def _adopt_handle(address: bytes, label: str, methods: tuple[str, ...]) -> ActorHandle:
    session = sessions.current()
    return ActorHandle(session, ActorQueue(session, Address.from_bytes(address)), label, methods)


def _submit(
    session: Session,
    queue: ActorQueue,
    op: str,
    name: str,
    shipped: Shipped | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str = "",
    on_yield: Callable[[Message], None] | None = None,
) -> ObjectRef:
    arguments, refs = pack_arguments(args, kwargs)
    call = Call(op, name, shipped, arguments, [ref._entry for ref in refs], Entry(), on_yield, extra={"method": method})
    ref = session.new_ref(call.entry, name)
    queue.submit(call)
    return ref


class ActorClass:
    """A class made remote. `Class.remote(...)` makes an actor; `Class.options(...)` changes what it needs."""

    def __init__(self, cls: type, options: Options) -> None:
        self._cls = cls
        self._options = options
        self._shipped: Shipped | None = None
        self.__name__ = cls.__name__
        self.__doc__ = cls.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"{self.__name__} is remote: make an actor with {self.__name__}.remote(...)")

    def options(self, **options: Any) -> ActorClass:
        """The same class with other options: num_cpus, num_gpus, host, name."""
        return ActorClass(self._cls, self._options.updated(options, actor=True))

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Make an actor; returns its handle at once. A constructor that fails shows in the first call."""
        session = sessions.current()
        if self._shipped is None:
            self._shipped = Shipped.of(self._cls, self.__name__)
        if self._options.name:
            _check_name_is_free(session, self._options.name)
        queue = ActorQueue(session, None)
        methods = tuple(name for name in dir(self._cls) if callable(getattr(self._cls, name)) and not name.startswith("__"))
        handle = ActorHandle(session, queue, self.__name__, (*methods, *(["__call__"] if "__call__" in vars(self._cls) else [])))
        _submit(session, queue, "create", self.__name__, self._shipped, args, kwargs)
        meta = json.dumps({"label": self.__name__, "methods": list(methods)}).encode()
        session.io.post(request_lease, session, queue, self._options, self.__name__, "actor", meta)
        if self._options.name:
            session.named[self._options.name] = handle
        else:
            ending = weakref.finalize(handle, session.io.post, release, session, queue, "its handle is gone")
            ending.atexit = False  # at exit the session ends everything
            handle._keep = ending.detach
        return handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shipped": None}


def request_lease(session: Session, queue: ActorQueue, options: Options, label: str, kind: str, meta: bytes) -> None:
    """Ask a host for a worker for an actor. For the IO thread."""
    try:
        host = place(options.need, session.cluster(), host=options.host).hosts[0]
    except GPUlayerError as error:
        queue.end(error)
        return

    def on_answer(answer: Message) -> None:
        if answer.kind is Kind.FAIL:
            queue.end(from_facts(answer.body))
        elif queue.ended is not None:
            queue.address = Address(host.id, answer.body["worker"])
            release(session, queue, str(queue.ended))
        else:
            queue.place_at(Address(host.id, answer.body["worker"]))

    session.endpoint.request(Address(host.id), Kind.ASK, lease_body(options, label, kind, meta), (), on_answer)


def release(session: Session, queue: ActorQueue, reason: str) -> None:
    """End an actor's worker. For the IO thread."""
    queue.end(ActorDiedError(name="the actor", host="its host", pid="?", cause=reason))
    if queue.address is not None and session.closed is None:
        body = {"m": "kill", "worker": queue.address.peer, "reason": reason}
        session.endpoint.request(Address(queue.address.host), Kind.ASK, body, (), lambda _: None)


async def find_named(session: Session, name: str) -> tuple[Address, dict[str, Any]] | None:
    """Ask every host for the actor called `name`."""
    for host_id in list(session.hosts):
        answer = await session.endpoint.ask(Address(host_id), "named", name=name)
        if answer["found"]:
            return Address(host_id, answer["worker"]), json.loads(answer["meta"])
    return None


def _check_name_is_free(session: Session, name: str) -> None:
    mine: ActorHandle | None = session.named.get(name)
    if (mine is not None and mine._queue.ended is None) or session.io.run(find_named(session, name)) is not None:
        raise UsageError(
            f"an actor named {name!r} exists already; get it with gpulayer.get_actor({name!r}), or choose another name"
        )


def get_actor(name: str) -> ActorHandle:
    """The actor that was made with `.options(name=name)`. Raises `UsageError` if no connected host has it."""
    session = sessions.current()
    mine: ActorHandle | None = session.named.get(name)
    if mine is not None and mine._queue.ended is None:
        return mine
    found = session.io.run(find_named(session, name))
    if found is None:
        hosts = ", ".join(host.name for host in session.hosts.values())
        raise UsageError(f"no actor named {name!r} on {hosts}; make one with Class.options(name={name!r}).remote()")
    address, meta = found
    return ActorHandle(session, ActorQueue(session, address), meta["label"], tuple(meta["methods"]))


def kill(actor: ActorHandle) -> None:
    """End an actor now: its process is killed, calls that wait raise `ActorDiedError`."""
    if not isinstance(actor, ActorHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"kill() takes an actor's handle, not {type(actor).__name__}; to end a task, use gpulayer.cancel(ref)")
    address = actor_address(actor)
    actor._session.io.run(
        actor._session.endpoint.ask(Address(address.host), "kill", worker=address.peer, reason="killed by gpulayer.kill()")
    )
