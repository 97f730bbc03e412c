from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import pytest

import gpulayer
from gpulayer.errors import ActorDiedError, GetTimeoutError, PlacementError, TaskCancelledError, UsageError
from tests.conftest import is_gone, wait_until

pytestmark = pytest.mark.usefixtures("shared")


@gpulayer.remote
class Counter:
    """Counts."""

    def __init__(self, start=0):
        self.value = start
        self.seen = []

    def add(self, amount=1, _ballast=None):
        self.value += amount
        self.seen.append(amount)
        return self.value

    def get(self):
        return self.value

    def order(self):
        return self.seen

    def pid(self):
        return os.getpid()

    def fail(self):
        raise LookupError("in the actor")

    def sleep(self, seconds):
        time.sleep(seconds)

    async def later(self, value):
        import asyncio

        await asyncio.sleep(0.01)
        return value

    def call(self, function, *args):
        return function(*args)

    def __len__(self):
        return self.value

    def __call__(self, x):
        return self.value + x


@gpulayer.remote
class Broken:
    def __init__(self):
        raise RuntimeError("no luck")

    def method(self):
        return 1


def die_with_segfault():
    import faulthandler

    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def say_and_exit():
    print("the last words", file=sys.stderr)
    os._exit(7)


def test_actor_keeps_its_state():
    counter = Counter.remote(10)
    assert gpulayer.get([counter.add.remote(), counter.add.remote(5)]) == [11, 16]
    assert gpulayer.get(counter.get.remote()) == 16


def test_actors_are_processes_of_their_own():
    first, second = Counter.remote(), Counter.remote()
    pids = gpulayer.get([first.pid.remote(), second.pid.remote()])
    assert len({*pids, os.getpid()}) == 3


def test_actor_survives_an_error_in_a_method():
    counter = Counter.remote()
    with pytest.raises(LookupError, match="in the actor") as caught:
        gpulayer.get(counter.fail.remote())
    assert "test_actors.py" in str(caught.value.__cause__)
    assert gpulayer.get(counter.add.remote()) == 1


def test_async_method_and_call_and_closure_work():
    counter = Counter.remote(1)
    assert gpulayer.get(counter.later.remote("x")) == "x"
    assert gpulayer.get(counter.__call__.remote(2)) == 3


def test_actor_without_a_kept_handle_still_answers():
    assert gpulayer.get(Counter.remote(5).add.remote(1), timeout=10) == 6


def test_actor_ends_with_its_last_handle():
    counter = Counter.remote()
    pid = gpulayer.get(counter.pid.remote())
    del counter
    wait_until(lambda: is_gone(pid), 5, "the end of the actor")


def test_calls_run_in_order_when_an_earlier_one_has_a_large_argument():
    counter = Counter.remote()
    refs = [counter.add.remote(1, np.zeros(5_000_000, "u1"))] + [counter.add.remote(i) for i in range(2, 30)]
    gpulayer.get(refs)
    assert gpulayer.get(counter.order.remote()) == list(range(1, 30))


def test_calls_run_in_order_when_an_earlier_one_waits_for_a_reference():
    @gpulayer.remote
    def slow():
        time.sleep(0.3)
        return 1

    counter = Counter.remote()
    refs = [counter.add.remote(slow.remote()), counter.add.remote(2), counter.add.remote(3)]
    gpulayer.get(refs)
    assert gpulayer.get(counter.order.remote()) == [1, 2, 3]


def test_call_whose_argument_failed_does_not_stop_the_next():
    @gpulayer.remote
    def fail():
        raise ValueError("the argument")

    counter = Counter.remote()
    bad, good = counter.add.remote(fail.remote()), counter.add.remote(2)
    with pytest.raises(ValueError, match="the argument"):
        gpulayer.get(bad)
    assert gpulayer.get(good) == 2


def test_constructor_that_fails_shows_in_every_call():
    broken = Broken.remote()
    for _ in range(2):
        with pytest.raises(ActorDiedError, match="RuntimeError: no luck"):
            gpulayer.get(broken.method.remote(), timeout=10)


def test_constructor_gets_the_value_of_a_reference():
    counter = Counter.remote(gpulayer.put(7))
    assert gpulayer.get(counter.get.remote()) == 7


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (say_and_exit, "exit code 7"),
        (lambda: sys.exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (die_with_segfault, "SIGSEGV"),
    ],
    ids=["os._exit", "sys.exit", "SIGKILL", "SIGSEGV"],
)
def test_death_reaches_pending_and_later_calls_within_a_second(how, cause):
    counter = Counter.remote()
    gpulayer.get(counter.get.remote())
    started = time.monotonic()
    deadly, pending = counter.call.remote(how), counter.get.remote()
    for ref in (deadly, pending, counter.get.remote()):
        with pytest.raises(ActorDiedError, match=cause) as caught:
            gpulayer.get(ref, timeout=5)
        assert caught.value.name == "Counter"
    assert time.monotonic() - started < 1
    with pytest.raises(ActorDiedError, match=cause):
        gpulayer.get(counter.get.remote(), timeout=5)


def test_death_shows_the_last_lines_of_stderr():
    counter = Counter.remote()
    with pytest.raises(ActorDiedError, match="the last words") as caught:
        gpulayer.get(counter.call.remote(say_and_exit), timeout=5)
    assert caught.value.stderr[-1] == "the last words"
    assert caught.value.pid > 0


def test_death_of_an_idle_actor_shows_in_the_next_call():
    counter = Counter.remote()
    pid = gpulayer.get(counter.pid.remote())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), 5)
    with pytest.raises(ActorDiedError, match="SIGKILL"):
        gpulayer.get(counter.add.remote(1, np.zeros(3_000_000, "u1")), timeout=5)


def test_kill_ends_the_process_and_fails_what_waits():
    counter = Counter.remote()
    pid = gpulayer.get(counter.pid.remote())
    ref = counter.sleep.remote(60)
    gpulayer.kill(counter)
    with pytest.raises(ActorDiedError, match=r"killed by gpulayer\.kill"):
        gpulayer.get(ref, timeout=1)
    with pytest.raises(ActorDiedError):
        gpulayer.get(counter.get.remote(), timeout=1)
    wait_until(lambda: is_gone(pid), 1)
    gpulayer.kill(counter)


def test_kill_of_what_is_no_actor_is_refused():
    with pytest.raises(UsageError, match=r"gpulayer\.cancel\(ref\)"):
        gpulayer.kill(gpulayer.put(1))


def test_named_actor_is_found_by_name_here_and_in_workers():
    made = Counter.options(name="shared-counter").remote(3)
    assert gpulayer.get(gpulayer.get_actor("shared-counter").get.remote()) == 3
    task = gpulayer.remote(lambda: gpulayer.get(gpulayer.get_actor("shared-counter").add.remote(1)))
    assert gpulayer.get(task.remote()) == 4
    assert gpulayer.get(made.get.remote()) == 4
    gpulayer.kill(made)


def test_named_actor_outlives_its_handle():
    Counter.options(name="kept").remote(1)
    import gc

    gc.collect()
    assert gpulayer.get(gpulayer.get_actor("kept").get.remote()) == 1
    gpulayer.kill(gpulayer.get_actor("kept"))


def test_name_can_be_used_again_only_after_the_end():
    first = Counter.options(name="once").remote()
    with pytest.raises(UsageError, match="exists already"):
        Counter.options(name="once").remote()
    pid = gpulayer.get(first.pid.remote())
    gpulayer.kill(first)
    wait_until(lambda: is_gone(pid), 5)

    def again():
        try:
            return gpulayer.get(Counter.options(name="once").remote(9).get.remote()) == 9
        except UsageError:
            return False

    wait_until(again, 2, "the name to be free")
    gpulayer.kill(gpulayer.get_actor("once"))


def test_get_actor_of_an_unknown_name_says_what_to_type():
    with pytest.raises(UsageError, match=r"no actor named 'nobody' on .*options\(name='nobody'\)"):
        gpulayer.get_actor("nobody")


def test_handle_can_be_passed_to_a_task():
    counter = Counter.remote()
    use = gpulayer.remote(lambda handle: gpulayer.get(handle.add.remote(4)))
    assert gpulayer.get(use.remote(counter)) == 4
    assert gpulayer.get(use.remote(counter)) == 8


def test_handle_that_returns_from_a_task_is_usable():
    def make():
        return Counter.options(num_cpus=0).remote(2)

    handle = gpulayer.get(gpulayer.remote(make).options(num_cpus=0).remote())
    assert "Counter" in repr(handle)


def test_cancel_takes_a_call_queued_behind_another():
    counter = Counter.remote()
    running, queued = counter.sleep.remote(0.5), counter.add.remote(1)
    gpulayer.cancel(queued)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(queued, timeout=5)
    gpulayer.get(running, timeout=5)
    assert gpulayer.get(counter.get.remote()) == 0


def test_cancel_interrupts_a_method_and_leaves_the_actor_alive():
    counter = Counter.remote(5)
    gpulayer.get(counter.get.remote())
    ref = counter.sleep.remote(60)
    with pytest.raises(GetTimeoutError):
        gpulayer.get(ref, timeout=0.3)
    gpulayer.cancel(ref)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(ref, timeout=5)
    assert gpulayer.get(counter.get.remote()) == 5


def test_cancel_of_a_call_behind_an_argument_lets_the_next_go():
    source = gpulayer.remote(time.sleep).remote(30)
    counter = Counter.remote()
    blocked, after = counter.add.remote(source), counter.add.remote(2)
    gpulayer.cancel(blocked)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(blocked, timeout=5)
    assert gpulayer.get(after, timeout=5) == 2
    gpulayer.cancel(source, force=True)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: Counter(), r"Counter\.remote\("),
        (lambda: Counter.remote().add(1), r"add\.remote\("),
    ],
)
def test_wrong_use_says_what_to_type(use, says):
    with pytest.raises(UsageError, match=says):
        use()


def test_unknown_method_names_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'add'"):
        _ = Counter.remote().ad


def test_actor_that_no_host_can_hold_fails_its_calls():
    counter = Counter.options(num_gpus=8).remote()
    with pytest.raises(PlacementError, match="8 GPU"):
        gpulayer.get(counter.get.remote(), timeout=5)


def test_first_call_of_a_fresh_actor_may_have_a_large_argument():
    """More than one window of bytes is on its way while the worker has hardly said hello."""
    ballast = np.zeros(20_000_000, "u1")
    for _ in range(10):
        counter = Counter.remote()
        assert gpulayer.get(counter.add.remote(1, ballast), timeout=5) == 1
        gpulayer.kill(counter)
