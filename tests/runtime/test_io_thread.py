from __future__ import annotations

import asyncio
import threading

import pytest

from gpulayer.runtime.io_thread import IOThread


@pytest.fixture
def io():
    thread = IOThread("test-io")
    yield thread
    thread.stop()


def test_post_runs_in_the_order_posted(io):
    seen, done = [], threading.Event()
    for number in range(1000):
        io.post(seen.append, number)
    io.post(done.set)
    assert done.wait(5)
    assert seen == list(range(1000))


def test_post_from_many_threads_loses_nothing(io):
    seen, done = [], threading.Event()
    threads = [threading.Thread(target=lambda: [io.post(seen.append, 1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    io.post(done.set)
    assert done.wait(5)
    assert len(seen) == 2000


def test_post_from_a_posted_function_runs_too(io):
    done = threading.Event()
    io.post(lambda: io.post(done.set))
    assert done.wait(5)


def test_run_returns_the_result_and_raises_the_error(io):
    async def fail():
        raise KeyError("x")

    assert io.run(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(KeyError, match="x"):
        io.run(fail())


def test_run_cancels_the_work_when_its_time_is_over(io):
    cancelled = threading.Event()

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        io.run(wait(), timeout_s=0.05)
    assert cancelled.wait(5)


def test_run_refuses_to_wait_for_its_own_thread(io):
    async def nested():
        io.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="wait for itself"):
        io.run(nested())


def test_stop_ends_the_thread():
    io = IOThread("test-io-2")
    io.stop()
    assert io.loop.is_closed()
    assert "test-io-2" not in {thread.name for thread in threading.enumerate()}


def test_fault_in_one_posted_function_does_not_strand_the_next():
    io = IOThread("test")
    told = []
    io.loop.call_soon_threadsafe(lambda: io.loop.set_exception_handler(lambda loop, context: told.append(context["exception"])))
    done = threading.Event()
    io.post(lambda: 1 / 0)
    io.post(done.set)
    assert done.wait(5)
    assert isinstance(told[0], ZeroDivisionError)
    io.stop()
