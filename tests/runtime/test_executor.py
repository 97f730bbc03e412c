from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import pytest

import gpulayer
from gpulayer.errors import ActorDiedError, GPUlayerError, RemoteError, TaskCancelledError, UsageError
from gpulayer.resources import Address, new_id
from gpulayer.runtime import context
from gpulayer.runtime.calls import HANDED_BACK, Call, Shipped, pack_arguments
from gpulayer.runtime.executor import Executor, describe_failure
from gpulayer.runtime.refs import Entry, to_exception
from gpulayer.wire import serialize
from gpulayer.wire.message import Kind, Message
from tests.conftest import wait_until

CALLER = Address(new_id(), new_id())


class Harness:
    """An executor on the main thread, as in a worker; what it replies is kept."""

    def __init__(self):
        self.replies = []
        self.executor = Executor(self._reply)
        self.executor.host = "here"
        self._known = set()

    def _reply(self, destination, number, kind, body, frames):
        self.replies.append((number, kind, body, [bytes(frame) for frame in frames]))

    def message(self, number, function, *args, op="task", method=""):
        arguments, _ = pack_arguments(args, {})
        shipped = Shipped.of(function, "f") if function else None
        call = Call(op, "Thing.method" if op == "method" else "f", shipped, arguments, [], Entry(), extra={"method": method})
        body, frames = call.message_parts(self._known)
        return Message(Kind.CALL, number, body, frames)

    def serve(self, *messages):
        for message in messages:
            self.executor.submit(CALLER, message)
        self.executor.stop()
        self.executor.run()

    def outcome(self, number):
        _, kind, body, frames = next(reply for reply in self.replies if reply[0] == number and reply[1] is not Kind.YIELD)
        return (
            serialize.loads([bytearray(f) for f in frames])
            if kind is Kind.REPLY
            else to_exception(Message(kind, number, body, frames))
        )


@pytest.fixture
def harness():
    return Harness()


def test_calls_run_in_order_and_functions_are_kept(harness):
    def double(x):
        return 2 * x

    harness.serve(harness.message(1, double, 1), harness.message(2, double, 2))
    assert [harness.outcome(1), harness.outcome(2)] == [2, 4]
    assert harness.executor.status == {"what": "", "busy_since_s": None, "calls": 2}


def test_actor_is_made_once_and_its_methods_see_its_state(harness):
    class Thing:
        def __init__(self, n):
            self.n = n

        def method(self):
            self.n += 1
            return self.n

    create = harness.message(1, Thing, 5, op="create")
    harness.serve(create, *(harness.message(n, None, op="method", method="method") for n in (2, 3)))
    assert [harness.outcome(n) for n in (1, 2, 3)] == [None, 6, 7]


def test_method_of_an_actor_whose_constructor_failed_says_why(harness):
    class Thing:
        def __init__(self):
            raise OSError("no disk")

    harness.serve(harness.message(1, Thing, op="create"), harness.message(2, None, op="method", method="method"))
    assert isinstance(harness.outcome(1), OSError)
    later = harness.outcome(2)
    assert isinstance(later, ActorDiedError)
    assert later.name == "Thing"
    assert "OSError: no disk" in str(later)


def test_report_goes_out_before_the_result(harness):
    def f():
        context.report("early")
        return "late"

    harness.serve(harness.message(1, f))
    assert [kind for _, kind, *_ in harness.replies] == [Kind.YIELD, Kind.REPLY]


def test_cancelled_call_in_the_queue_never_runs(harness):
    harness.executor.cancel(CALLER, 1)
    harness.serve(harness.message(1, lambda: 1), harness.message(2, lambda: 2))
    assert isinstance(harness.outcome(1), TaskCancelledError)
    assert harness.outcome(2) == 2


def test_cancel_interrupts_the_running_call_and_no_other(harness):
    running = threading.Event()

    def cancel_it():
        running.wait(5)
        while harness.executor.cancel(CALLER, 1, again=True):
            time.sleep(0.05)

    harness.executor._functions[b"sleep"] = lambda: (running.set(), time.sleep(30))
    message = harness.message(1, None)
    message.body["f"] = b"sleep"
    canceller = threading.Thread(target=cancel_it)
    canceller.start()
    harness.serve(message, harness.message(2, lambda: "next"))
    canceller.join()
    assert isinstance(harness.outcome(1), TaskCancelledError)
    assert harness.outcome(2) == "next"


def test_cancel_of_an_old_call_is_ignored(harness):
    harness.serve(harness.message(1, lambda: 1))
    harness.executor.cancel(CALLER, 1)
    harness.serve(harness.message(2, lambda: 2))
    assert harness.outcome(2) == 2


def test_system_exit_is_not_answered_but_ends_the_worker(harness):
    def leave():
        raise SystemExit(4)

    with pytest.raises(SystemExit) as left:
        harness.serve(harness.message(1, lambda: 1), harness.message(2, leave))
    assert left.value.code == 4
    assert [number for number, *_ in harness.replies] == [1]


def test_tasks_behind_one_that_waits_are_handed_back(harness):
    for number in (1, 2):
        harness.executor.submit(CALLER, harness.message(number, lambda: 1))
    harness.executor.set_waiting(True)
    harness.executor.submit(CALLER, harness.message(3, lambda: 1))
    assert [(number, body["error"]) for number, _, body, _ in harness.replies] == [(n, HANDED_BACK) for n in (1, 2, 3)]
    harness.executor.set_waiting(False)
    harness.serve(harness.message(4, lambda: 4))
    assert harness.outcome(4) == 4


def test_function_of_a_call_that_did_not_run_is_kept_for_the_next(harness):
    def double(x):
        return 2 * x

    harness.executor.set_waiting(True)
    harness.executor.submit(CALLER, harness.message(1, double, 1))
    harness.executor.set_waiting(False)
    harness.executor.cancel(CALLER, 2)
    harness.serve(harness.message(2, double, 2), harness.message(3, double, 3))
    assert harness.outcome(3) == 6


def test_function_that_cannot_be_loaded_fails_every_call(harness):
    class Unloadable:
        def __reduce__(self):
            return int, ("not a number",)

        def __call__(self):
            return 1

    function = Unloadable()
    harness.serve(harness.message(1, function), harness.message(2, function))
    assert [type(harness.outcome(number)) for number in (1, 2)] == [ValueError, ValueError]


def test_an_actors_calls_are_never_handed_back(harness):
    class Thing:
        def method(self):
            return "here"

    harness.executor.submit(CALLER, harness.message(1, Thing, op="create"))
    harness.executor.set_waiting(True)
    harness.serve(harness.message(2, None, op="method", method="method"))
    assert harness.outcome(2) == "here"


def test_own_error_travels_as_facts():
    body, frames = describe_failure(UsageError("wrong"), own=True)
    assert (body["error"], body["message"], frames) == ("UsageError", "wrong", [])


def test_users_error_has_no_frames_of_ours_in_its_traceback(harness):
    def f():
        raise KeyError("k")

    harness.serve(harness.message(1, f))
    trace = str(harness.outcome(1).__cause__)
    assert "test_executor.py" in trace
    assert "runtime/executor.py" not in trace


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")


class WithLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class BrokenStr(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeywordOnly(code=3), "code 3"), (WithLock("locked"), "locked"), (BrokenStr(), "cannot be shown")],
)
def test_error_that_cannot_be_pickled_still_tells_type_and_text(error, text):
    body, frames = describe_failure(error)
    arrived = to_exception(Message(Kind.FAIL, 1, body, frames))
    assert type(error).__name__ in body["type"]
    assert text in body["text"]
    assert isinstance(arrived, Exception)


@gpulayer.remote
class Waiter:
    def __init__(self):
        self.order = []

    def wait_for(self, number, ref):
        self.order.append(number)
        return gpulayer.get(ref[0]) if ref else None

    async def sleep_then_mark(self):
        await asyncio.sleep(0.6)
        self.order.append("marked")

    async def nap(self):
        await asyncio.sleep(1.0)
        return self.order


def test_an_actors_calls_keep_their_order_when_one_waits_for_a_task(shared):
    @gpulayer.remote
    def slow():
        time.sleep(0.3)

    waiter = Waiter.remote()
    refs = [waiter.wait_for.remote(number, [slow.remote()] if number == 0 else []) for number in range(6)]
    gpulayer.get(refs)
    assert gpulayer.get(waiter.nap.remote()) == [0, 1, 2, 3, 4, 5]


def test_cancelled_coroutine_does_not_go_on_inside_the_next_call(shared):
    waiter = Waiter.remote()
    assert gpulayer.get(waiter.wait_for.remote("first", [])) is None
    ref = waiter.sleep_then_mark.remote()
    wait_until(lambda: gpulayer.wait([ref], timeout=0.2)[0] == [], 5)
    gpulayer.cancel(ref)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(ref)
    assert gpulayer.get(waiter.nap.remote()) == ["first"]


class OwnError(GPUlayerError):
    """A user's error that happens to stand in our tree."""


def test_users_error_in_our_tree_keeps_type_facts_and_traceback(shared):
    @gpulayer.remote
    def fails():
        raise OwnError("something", thing=object)

    with pytest.raises(OwnError, match="something") as caught:
        gpulayer.get(fails.remote())
    assert caught.value.facts == {"thing": object}
    assert "in fails" in str(caught.value.__cause__)


def test_death_of_another_actor_seen_in_user_code_is_not_ones_own(shared):
    @gpulayer.remote
    class Caller:
        def call(self, other):
            return gpulayer.get(other.die.remote())

        def ping(self):
            return "alive"

    @gpulayer.remote
    class Victim:
        def die(self):
            os._exit(3)

    caller = Caller.remote()
    with pytest.raises(ActorDiedError, match="exit code 3"):
        gpulayer.get(caller.call.remote(Victim.remote()))
    assert gpulayer.get(caller.ping.remote()) == "alive"


class PicklesBadly(Exception):
    def __init__(self, how):
        super().__init__("mine")
        self.how = how

    def __reduce__(self):
        raise self.how


class ShowsBadly(Exception):
    def __str__(self):
        raise KeyboardInterrupt


@gpulayer.remote
class Rough:
    """An actor whose methods misbehave in ways that end a careless worker."""

    def fail(self, how):
        if how == "syntax":
            error = SyntaxError("x")
            error.filename, error.lineno, error.text, error.offset = "f", 1, 5, "q"
            raise error
        raise {"interrupt": PicklesBadly(KeyboardInterrupt), "exit": PicklesBadly(SystemExit), "shown": ShowsBadly()}[how]

    def replace_stdout(self):
        class Broken:
            def write(self, text):
                return len(text)

            def flush(self):
                raise RuntimeError("no")

        sys.stdout = Broken()

    def fork(self):
        if os.fork() == 0:
            return "child"
        os.wait()
        return "parent"

    def take_signal(self):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def sleep(self):
        time.sleep(30)

    def ping(self):
        return "alive"


@pytest.mark.parametrize("how", ["interrupt", "exit", "shown", "syntax"])
def test_actor_survives_an_error_that_resists_being_sent(shared, how):
    rough = Rough.remote()
    with pytest.raises((RemoteError, SyntaxError, ShowsBadly)):
        gpulayer.get(rough.fail.remote(how))
    assert gpulayer.get(rough.ping.remote()) == "alive"


def test_actor_survives_a_broken_stdout_and_a_fork_that_returns(shared):
    rough = Rough.remote()
    gpulayer.get(rough.replace_stdout.remote())
    assert gpulayer.get(rough.fork.remote(), timeout=20) == "parent"
    assert gpulayer.get(rough.ping.remote()) == "alive"


def test_cancel_works_after_user_code_took_its_signal(shared):
    rough = Rough.remote()
    gpulayer.get(rough.take_signal.remote())
    ref = rough.sleep.remote()
    assert gpulayer.wait([ref], timeout=0.3)[0] == []
    gpulayer.cancel(ref)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(ref, timeout=20)
    assert gpulayer.get(rough.ping.remote()) == "alive"
