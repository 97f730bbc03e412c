from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

import gpulayer
from gpulayer.errors import GetTimeoutError, PlacementError, SerializationError, TaskCancelledError, UsageError
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("shared")


@gpulayer.remote
def add(a, b=0):
    return a + b


@gpulayer.remote
def fail(text):
    raise ValueError(text)


@gpulayer.remote(num_cpus=0)
def sleep(seconds):
    time.sleep(seconds)
    return seconds


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None


def test_remote_runs_a_function_elsewhere():
    import os

    pid = gpulayer.get(gpulayer.remote(os.getpid).remote())
    assert pid != os.getpid()
    assert gpulayer.get(add.remote(1, b=2)) == 3


def test_remote_keeps_name_and_docstring():
    def documented():
        """What it does."""

    assert gpulayer.remote(documented).__doc__ == "What it does."
    assert gpulayer.remote(documented).__name__ == "documented"


def test_get_takes_a_list_and_keeps_its_order():
    assert gpulayer.get([add.remote(i) for i in range(50)]) == list(range(50))
    assert gpulayer.get([]) == []
    assert gpulayer.get((add.remote(1), add.remote(2))) == [1, 2]


def test_get_twice_gives_the_value_twice():
    ref = add.remote(np.arange(100_000), 1)
    first, second = gpulayer.get(ref), gpulayer.get(ref)
    first[:] = 0
    assert second[0] == 1


def test_get_raises_the_users_error_with_where_it_happened():
    with pytest.raises(ValueError, match="bad input") as caught:
        gpulayer.get(fail.remote("bad input"))
    assert "test_remote.py" in str(caught.value.__cause__)
    assert "raise ValueError(text)" in str(caught.value.__cause__)


def test_get_raises_again_for_the_same_reference():
    ref = fail.remote("again")
    for _ in range(2):
        with pytest.raises(ValueError, match="again"):
            gpulayer.get(ref)


def test_get_stops_waiting_when_told():
    ref = sleep.remote(0.6)
    started = time.monotonic()
    with pytest.raises(GetTimeoutError, match=r"within 0.1 s"):
        gpulayer.get(ref, timeout=0.1)
    assert time.monotonic() - started < 0.5
    assert gpulayer.get(ref, timeout=10) == 0.6


def test_get_timeout_is_pythons_timeout_error_too():
    with pytest.raises(TimeoutError):
        gpulayer.get(sleep.remote(0.3), timeout=0)


def test_lambda_and_closure_work():
    offset = 10
    assert gpulayer.get(gpulayer.remote(lambda x: x + offset).remote(1)) == 11


def test_own_class_holds_isinstance_after_a_round_trip():
    back = gpulayer.get(add.remote(Point(3).x)), gpulayer.get(gpulayer.remote(lambda p: p).remote(Point(3)))
    assert back == (3, Point(3))
    assert type(back[1]) is Point


def test_large_arrays_travel_both_ways():
    array = np.random.default_rng(0).random((1500, 1000))
    got = gpulayer.get(gpulayer.remote(lambda a, more: {"a": a * 2, "more": more}).remote(array, more=[array[:10]]))
    assert np.array_equal(got["a"], array * 2)
    assert np.array_equal(got["more"][0], array[:10])
    got["a"][0] = 1.0  # what arrives may be written to


@pytest.mark.slow
def test_tensors_travel_both_ways(run_script):  # not here: all agents of a process that has torch load it too
    done = run_script(
        """
import gpulayer, torch
tensor, few = torch.randn(3_000_000), torch.arange(3)
@gpulayer.remote
def double(big, small):
    return {"big": big * 2, "small": small * 2, "views": [big[:5], big[:5]]}
got = gpulayer.get(double.remote(tensor, few))
assert torch.equal(got["big"], tensor * 2) and torch.equal(got["small"], few * 2)
got["views"][0][0] = 7.0
assert got["views"][1][0] == 7.0
print("equal")
"""
    )
    assert done.stdout == "equal\n", done.stderr


def test_reference_as_argument_becomes_its_value():
    assert gpulayer.get(add.remote(add.remote(1, 2), b=add.remote(3))) == 6


def test_reference_that_fails_fails_the_call_that_needs_it():
    with pytest.raises(ValueError, match="the source"):
        gpulayer.get(add.remote(fail.remote("the source")))
    with pytest.raises(ValueError, match="the source"):
        gpulayer.get(add.remote(1, b=fail.remote("the source")))


def test_reference_inside_a_list_stays_a_reference():
    refs = [add.remote(1), gpulayer.put(2)]
    total = gpulayer.remote(lambda refs: (type(refs[0]).__name__, sum(gpulayer.get(refs))))
    assert gpulayer.get(total.remote(refs)) == ("ObjectRef", 3)


def test_reference_made_in_a_worker_can_be_fetched_by_the_driver():
    inner = gpulayer.get(gpulayer.remote(lambda: [gpulayer.put(np.ones(300_000))]).remote())
    assert gpulayer.get(inner[0]).sum() == 300_000


def test_put_keeps_a_copy():
    array = np.zeros(10)
    ref = gpulayer.put(array)
    array[:] = 1
    assert gpulayer.get(ref).sum() == 0
    assert gpulayer.get(add.remote(ref, 1)).sum() == 10


def test_wait_returns_what_is_ready_first():
    slow, fast = sleep.remote(5), sleep.remote(0)
    ready, rest = gpulayer.wait([slow, fast], num_returns=1, timeout=10)
    assert (ready, rest) == ([fast], [slow])
    gpulayer.cancel(slow)


def test_wait_counts_a_failed_one_as_ready():
    ref = fail.remote("x")
    assert gpulayer.wait([ref], timeout=10) == ([ref], [])


def test_wait_stops_when_its_time_is_over():
    ref = sleep.remote(1)
    started = time.monotonic()
    assert gpulayer.wait([ref], timeout=0.1) == ([], [ref])
    assert time.monotonic() - started < 0.8
    gpulayer.cancel(ref)


def test_wait_returns_at_most_what_was_asked_for():
    refs = [add.remote(i) for i in range(4)]
    gpulayer.get(refs)
    ready, rest = gpulayer.wait(refs, num_returns=3)
    assert (ready, rest) == (refs[:3], refs[3:])


def test_await_gives_the_value():
    async def main():
        return await asyncio.gather(add.remote(1), add.remote(2)), await add.remote(3)

    assert asyncio.run(main()) == ([1, 2], 3)


def test_await_raises_what_the_call_raised():
    async def main():
        await fail.remote("awaited")

    with pytest.raises(ValueError, match="awaited"):
        asyncio.run(main())


def test_async_function_runs():
    async def later(x):
        await asyncio.sleep(0.01)
        return x

    assert gpulayer.get(gpulayer.remote(later).remote(4)) == 4


def test_cancel_takes_a_call_that_waits_for_an_argument():
    source = sleep.remote(1)
    ref = add.remote(source)
    gpulayer.cancel(ref)
    with pytest.raises(TaskCancelledError, match="before it ran"):
        gpulayer.get(ref, timeout=0.5)
    gpulayer.cancel(source)


def test_cancel_takes_a_call_that_waits_for_resources(tmp_path):
    cpus = gpulayer.cluster().hosts[0].cpus
    started, mark = tmp_path / "started", tmp_path / "ran"

    def hold():
        started.touch()
        time.sleep(30)

    holder = gpulayer.remote(num_cpus=cpus)(hold).remote()
    wait_until(started.exists, 10)
    ref = gpulayer.remote(mark.touch).remote()
    with pytest.raises(GetTimeoutError):
        gpulayer.get(ref, timeout=0.3)
    gpulayer.cancel(ref)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(ref, timeout=1)
    gpulayer.cancel(holder)
    with pytest.raises(TaskCancelledError):
        gpulayer.get(holder, timeout=5)
    assert gpulayer.get(add.remote(1), timeout=10) == 1
    assert not mark.exists()


def test_cancel_interrupts_a_call_that_runs(tmp_path):
    def hold():
        (tmp_path / "started").touch()
        time.sleep(30)

    ref = gpulayer.remote(hold).remote()
    wait_until((tmp_path / "started").exists, 10)
    gpulayer.cancel(ref)
    with pytest.raises(TaskCancelledError, match="while it ran"):
        gpulayer.get(ref, timeout=5)


def test_cancel_with_force_ends_a_call_that_will_not_stop(tmp_path):
    def stubborn():
        (tmp_path / "started").touch()
        while True:
            try:
                time.sleep(30)
            except BaseException:
                continue

    ref = gpulayer.remote(stubborn).remote()
    wait_until((tmp_path / "started").exists, 10)
    gpulayer.cancel(ref)
    assert gpulayer.wait([ref], timeout=0.3) == ([], [ref])
    gpulayer.cancel(ref, force=True)
    started = time.monotonic()
    with pytest.raises(TaskCancelledError, match="force"):
        gpulayer.get(ref, timeout=5)
    assert time.monotonic() - started < 1


def test_cancel_leaves_a_finished_call_alone():
    ref = add.remote(1)
    assert gpulayer.get(ref) == 1
    gpulayer.cancel(ref)
    gpulayer.cancel(ref, force=True)
    assert gpulayer.get(ref) == 1
    assert gpulayer.get(add.remote(2)) == 2


def test_call_that_no_host_can_hold_is_an_error_with_what_there_is():
    with pytest.raises(PlacementError, match=r"1000 CPU.*\n.*CPU .* free"):
        gpulayer.get(add.options(num_cpus=1000).remote(1), timeout=5)
    with pytest.raises(PlacementError, match="'gpu9' is not connected; connected hosts: "):
        gpulayer.get(add.options(host="gpu9").remote(1), timeout=5)


def test_result_that_cannot_travel_names_what_is_to_blame():
    import threading

    with pytest.raises(SerializationError, match=r"key 'lock'.*lock"):
        gpulayer.get(gpulayer.remote(lambda: {"lock": threading.Lock()}).remote())


def test_argument_that_cannot_travel_is_refused_here_and_now():
    import threading

    with pytest.raises(SerializationError, match="lock"):
        add.remote(threading.Lock())


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: add(1), r"add\.remote\("),
        (lambda: gpulayer.get(3), r"get\(\) takes references .* not int"),
        (lambda: gpulayer.get([1]), r"get\(\) takes references"),
        (lambda: gpulayer.get(add), r"get\(\) takes references .* not RemoteFunction"),
        (lambda: gpulayer.wait(gpulayer.put(1)), r"wait\(\) takes references"),
        (lambda: gpulayer.wait([gpulayer.put(1)], num_returns=2), "between 1 and"),
        (lambda: gpulayer.put(gpulayer.put(1)), "reference already"),
        (lambda: gpulayer.cancel(1), r"cancel\(\) takes a reference, not int"),
        (lambda: gpulayer.remote(3), "function or a class, not int"),
        (lambda: gpulayer.remote(print, print), "one function or class"),
    ],
)
def test_wrong_use_says_what_to_type(use, says):
    with pytest.raises(UsageError, match=says):
        use()


def test_wait_refuses_the_same_reference_twice():
    ref = gpulayer.put(1)
    with pytest.raises(UsageError, match="twice"):
        gpulayer.wait([ref, ref])
