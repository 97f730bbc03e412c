"""One remote call, from the caller's side (`Call`) and as the worker reads it (`read_call`).

A call's payload is several payloads behind one another: the function (only where the worker does not have it yet), the
arguments, and the value of each reference among the arguments. The body's "p" says how many frames each has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpulayer.errors import TaskCancelledError
from gpulayer.runtime.refs import Entry, ObjectRef
from gpulayer.wire import serialize
from gpulayer.wire.message import Buffer, Message

HANDED_BACK = "handed back"
"""The error of a call that a worker did not begin: not a failure, the caller sends it elsewhere."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands among the arguments for a reference's value."""

    index: int


@dataclass(frozen=True, slots=True)
class Shipped:
    """A pickled function or class; sent to each worker once."""

    digest: bytes
    frames: tuple[Buffer, ...]
    name: str

    @classmethod
    def of(cls, target: Callable[..., Any], name: str) -> Shipped:
        """Pickle `target`. Raises `SerializationError` naming what cannot travel."""
        frames = tuple(serialize.dumps(target))
        digest = hashlib.blake2b(digest_size=16)
        for frame in frames:
            digest.update(frame)
        return cls(digest.digest(), frames, name)


@dataclass(slots=True, eq=False)
class Call:
    """One call on its way."""

    op: str  # "task", "rank", "create" or "method"
    name: str
    shipped: Shipped | None
    arguments: list[Buffer]
    needs: list[Entry]
    entry: Entry
    on_yield: Callable[[Message], None] | None = None
    cancelled: bool = False
    sent: tuple[Any, int] | None = None  # (worker's address, request id)
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    def failure(self) -> Message | None:
        """The failure of an argument, which is then the call's own."""
        return next((need.failed for need in self.needs if need.failed), None)

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once every reference among the arguments has a value or has failed."""
        missing = [need for need in self.needs if not need.done]
        if not missing:
            callback()
        else:
            missing[0].when_done(lambda: self.when_ready(callback))

    def settle(self, message: Message) -> None:
        """The outcome has arrived. A call whose worker was ended to cancel it has been cancelled; it is not a casualty."""
        error = message.body.get("error")
        if self.cancelled and error == "ActorDiedError":
            self.entry.fail_with(TaskCancelledError(f"{self.name} was cancelled with force=True"))
        elif error == HANDED_BACK:
            self.entry.fail_with(TaskCancelledError(f"{self.name} was cancelled before it ran"))
        else:
            self.entry.take(message)

    def message_parts(self, known: set[bytes]) -> tuple[dict[str, Any], list[Buffer]]:
        """(body, frames) for a worker that has the functions `known`; adds this call's to them."""
        shipped = self.shipped
        function: Sequence[Buffer] = ()
        if shipped is not None and shipped.digest not in known:
            function = shipped.frames
            known.add(shipped.digest)
        payloads = [function, self.arguments, *(need.frames for need in self.needs)]
        body = {
            "op": self.op,
            "n": self.name,
            "f": shipped.digest if shipped else b"",
            "p": [len(payload) for payload in payloads],
            **self.extra,
        }
        return body, [frame for payload in payloads for frame in payload]


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Buffer], list[ObjectRef]]:
    """Pickle arguments; references at the top level become slots for their values, deeper ones stay references."""
    refs: list[ObjectRef] = []

    def slot(value: Any) -> Any:
        if isinstance(value, ObjectRef):
            refs.append(value)
            return Slot(len(refs) - 1)
        return value

    packed = (tuple(map(slot, args)), {key: slot(value) for key, value in kwargs.items()})
    return serialize.dumps(packed), refs


def split_payloads(message: Message) -> list[Sequence[Buffer]]:
    """The payloads behind one another in a CALL: function, arguments, slots."""
    payloads: list[Sequence[Buffer]] = []
    start = 0
    for count in message.body["p"]:
        payloads.append(message.frames[start : start + count])
        start += count
    return payloads


def unpack_arguments(arguments: Sequence[Buffer], slots: Sequence[Sequence[Buffer]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `pack_arguments`, with the slots' values in place."""
    args, kwargs = serialize.loads(arguments)

    def fill(value: Any) -> Any:
        return serialize.loads(slots[value.index]) if isinstance(value, Slot) else value

    return tuple(map(fill, args)), {key: fill(value) for key, value in kwargs.items()}
