from __future__ import annotations

import asyncio
import pickle
import threading
import time

import numpy as np
import pytest

from gpulayer.errors import ActorDiedError, RemoteError, TaskCancelledError
from gpulayer.runtime.executor import describe_failure
from gpulayer.runtime.refs import Entry, ObjectRef, failure_message, to_exception
from gpulayer.wire import serialize
from gpulayer.wire.message import Kind, Message


def test_entry_loads_what_it_was_filled_with():
    entry = Entry()
    entry.fill(serialize.dumps({"a": 1}))
    assert entry.done
    assert entry.load() == {"a": 1}


def test_entry_keeps_its_first_outcome():
    entry = Entry()
    entry.fill(serialize.dumps("result"))
    entry.fail_with(TaskCancelledError("late"))
    assert entry.load() == "result"
    other = Entry()
    other.fail_with(TaskCancelledError("first"))
    other.fill(serialize.dumps("late"))
    with pytest.raises(TaskCancelledError, match="first"):
        other.load()


def test_entry_wait_says_whether_it_is_done_in_time():
    entry = Entry()
    assert not entry.wait(0.01)
    threading.Timer(0.05, entry.fill, [serialize.dumps(1)]).start()
    assert entry.wait(5)
    assert entry.wait(0)


def test_entry_wakes_all_who_wait():
    entry, woken = Entry(), []
    threads = [threading.Thread(target=lambda: woken.append(entry.wait(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    entry.fill(serialize.dumps(1))
    for thread in threads:
        thread.join()
    assert woken == [True] * 4


def test_entry_callbacks_run_once_whether_added_before_or_after():
    entry, called = Entry(), []
    entry.when_done(lambda: called.append("before"))
    entry.fill(serialize.dumps(1))
    entry.when_done(lambda: called.append("after"))
    assert called == ["before", "after"]


def test_entry_loads_twice_without_sharing_memory():
    entry = Entry()
    entry.fill([bytearray(frame) for frame in serialize.dumps(np.zeros(100_000))])
    first, second = entry.load(), entry.load()
    first[:] = 1
    assert not second.any()


def test_failure_of_our_own_keeps_its_facts():
    failure = failure_message(ActorDiedError(name="A", host="h", pid=1, cause="signal 9", stderr=["last"]))
    error = to_exception(failure)
    assert isinstance(error, ActorDiedError)
    assert error.cause == "signal 9"
    assert "last" in str(error)


def test_users_failure_keeps_its_type_and_has_the_remote_traceback_as_cause():
    try:
        {}["missing"]
    except KeyError as raised:
        body, frames = describe_failure(raised)
    error = to_exception(Message(Kind.FAIL, 1, body, frames))
    assert type(error) is KeyError
    assert "test_refs.py" in str(error.__cause__)
    assert '{}["missing"]' in str(error.__cause__)


def test_users_failure_without_a_pickle_becomes_a_remote_error():
    class Odd(Exception):
        def __init__(self, *, code):
            super().__init__(f"code {code}")

    body, frames = describe_failure(Odd(code=3))
    error = to_exception(Message(Kind.FAIL, 1, body, frames))
    assert isinstance(error, RemoteError)
    assert "Odd" in error.type_name
    assert "code 3" in str(error)


def test_ref_shows_its_state():
    entry = Entry()
    ref = ObjectRef(entry, "f", lambda _: None)
    assert repr(ref) == "ObjectRef(f, pending)"
    entry.fill(serialize.dumps(1))
    assert repr(ref) == "ObjectRef(f, ready)"


def test_ref_is_awaitable_from_any_loop():
    async def main():
        entry = Entry()
        threading.Timer(0.05, entry.fill, [serialize.dumps("late")]).start()
        return await ObjectRef(entry, "f", lambda _: None)

    assert asyncio.run(main()) == "late"


def test_ref_whose_await_is_cancelled_does_not_disturb_the_loop():
    async def main():
        entry = Entry()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ObjectRef(entry, "f", lambda _: None), 0.02)
        entry.fill(serialize.dumps(1))
        await asyncio.sleep(0)
        return await ObjectRef(entry, "f", lambda _: None)

    assert asyncio.run(main()) == 1


def test_ref_waits_little_longer_than_its_result_takes():
    entry = Entry()
    threading.Timer(0.05, entry.fill, [serialize.dumps(1)]).start()
    started = time.monotonic()
    assert entry.wait(5)
    assert time.monotonic() - started < 1


def test_ref_unpickled_outside_of_a_session_says_so():
    from gpulayer.resources import Address

    ref = ObjectRef(Entry(), "f", lambda _: (Address(bytes(8)), 1))
    with pytest.raises(RemoteError, match="driver or a worker"):
        pickle.loads(pickle.dumps(ref))
