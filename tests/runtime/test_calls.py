from __future__ import annotations

import numpy as np
import pytest

from gpulayer.errors import SerializationError
from gpulayer.runtime.calls import Call, Shipped, pack_arguments, split_payloads, unpack_arguments
from gpulayer.runtime.refs import Entry, ObjectRef
from gpulayer.wire import serialize
from gpulayer.wire.message import Kind, Message


def ref_to(value) -> ObjectRef:
    entry = Entry()
    entry.fill(serialize.dumps(value))
    return ObjectRef(entry, "f", lambda _: None)


def call_of(function, *args, needs=(), **kwargs) -> Call:
    arguments, refs = pack_arguments(args, kwargs)
    return Call("task", "f", Shipped.of(function, "f"), arguments, [ref._entry for ref in refs] + list(needs), Entry())


def test_arguments_come_back_as_they_were():
    arguments, refs = pack_arguments((1, "a"), {"k": [2]})
    assert refs == []
    assert unpack_arguments(arguments, []) == ((1, "a"), {"k": [2]})


def test_references_at_the_top_become_their_values():
    one, two = ref_to(np.arange(3)), ref_to("two")
    arguments, refs = pack_arguments((one, 5), {"k": two})
    assert refs == [one, two]
    args, kwargs = unpack_arguments(arguments, [ref._entry.frames for ref in refs])
    assert args[0].tolist() == [0, 1, 2]
    assert (args[1], kwargs) == (5, {"k": "two"})


def test_message_carries_the_function_only_once_per_worker():
    call, known = call_of(lambda x: x + 1, 4), set()
    body, frames = call.message_parts(known)
    again, fewer = call.message_parts(known)
    assert body["p"][0] == len(frames) - body["p"][1]
    assert again["p"][0] == 0
    assert len(fewer) < len(frames)
    assert again["f"] == body["f"]


def test_payloads_are_split_as_they_were_joined():
    ref = ref_to(np.ones(5000))
    call = call_of(lambda x: x, ref)
    body, frames = call.message_parts(set())
    function, arguments, slot = split_payloads(Message(Kind.CALL, 1, body, frames))
    assert serialize.loads(function)(7) == 7
    args, _ = unpack_arguments(arguments, [slot])
    assert args[0].sum() == 5000


def test_call_is_ready_once_all_its_needs_are():
    first, second, ready = Entry(), Entry(), []
    call = call_of(print, needs=[first, second])
    call.when_ready(lambda: ready.append(True))
    second.fill(serialize.dumps(1))
    assert ready == []
    first.fill(serialize.dumps(1))
    assert ready == [True]


def test_call_fails_with_its_first_failed_need():
    from gpulayer.errors import TaskCancelledError

    need = Entry()
    need.fail_with(TaskCancelledError("why"))
    assert call_of(print, needs=[need]).failure() is need.failed
    assert call_of(print).failure() is None


def test_same_function_has_the_same_digest():
    def f(x):
        return x

    assert Shipped.of(f, "f").digest == Shipped.of(f, "f").digest
    assert Shipped.of(f, "f").digest != Shipped.of(lambda: 0, "f").digest


def test_function_that_cannot_travel_names_the_variable():
    import threading

    lock = threading.Lock()
    with pytest.raises(SerializationError, match="closure variable 'lock'"):
        Shipped.of(lambda: lock, "f")
