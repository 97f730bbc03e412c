from __future__ import annotations

import os
import time

import pytest

import gpulayer
from gpulayer.errors import PlacementError, TrainingError, UsageError
from gpulayer.runtime.context import report
from gpulayer.runtime.gang import Gang
from tests.conftest import is_gone, wait_until

pytestmark = pytest.mark.usefixtures("shared_two")


def reserve(num_nodes=2, devices=1, **options):
    return Gang.reserve(num_nodes=num_nodes, devices=devices, accelerator="cpu", name="test", **options)


def all_free():
    return all(view.cpus_free == view.host.cpus for view in gpulayer.cluster().views)


@pytest.fixture(autouse=True)
def start_with_free_hosts(shared_two):
    wait_until(all_free, 5, "both hosts free")


def rank_and_pid(rank):
    time.sleep(0.1 * (1 - rank))  # the first rank ends last
    return rank, os.getpid()


def count(rank, steps):
    for step in range(steps):
        report((rank, step))
    return rank


def test_results_come_in_rank_order_from_one_worker_each():
    with reserve() as gang:
        assert [(m.rank, m.local_rank, m.node_rank, m.host) for m in gang.members] == [(0, 0, 0, "local-1"), (1, 0, 1, "local-2")]
        assert [m.ip for m in gang.members] == ["127.0.0.1"] * 2
        results = gang.run(rank_and_pid, [(0,), (1,)])
    assert [rank for rank, _ in results] == [0, 1]
    assert len({pid for _, pid in results}) == 2


def test_workers_keep_their_state_between_runs():
    def put_mark(value):
        os.environ["MARK"] = value

    with reserve() as gang:
        gang.run(put_mark, [("a",), ("b",)])
        assert gang.run(lambda: os.environ["MARK"], [(), ()]) == ["a", "b"]


def test_events_come_in_the_order_reported_and_before_the_result():
    seen = []
    with reserve() as gang:
        results = gang.run(count, [(0, 20), (1, 20)], on_event=lambda rank, value: seen.append((rank, value)))
    assert results == [0, 1]
    for rank in range(2):
        assert [value for source, value in seen if source == rank] == [(rank, step) for step in range(20)]


def test_large_events_keep_their_place():
    def work():
        for size in (10, 3_000_000, 10):
            report(b"x" * size)

    sizes = []
    with reserve(num_nodes=1) as gang:
        gang.run(work, [()], on_event=lambda rank, value: sizes.append(len(value)))
    assert sizes == [10, 3_000_000, 10]


def test_first_rank_that_fails_decides_the_error_and_stops_the_others():
    def work(rank):
        if rank == 1:
            raise ValueError("bad batch")
        time.sleep(60)

    started = time.monotonic()
    with reserve() as gang:
        pids = gang.run(os.getpid, [(), ()])
        with pytest.raises(TrainingError, match=r"rank 1 on host local-2 failed: ValueError: bad batch") as caught:
            gang.run(work, [(0,), (1,)])
    assert time.monotonic() - started < 5
    assert (caught.value.rank, caught.value.host) == (1, "local-2")
    assert isinstance(caught.value.__cause__, ValueError)
    assert "test_gang.py" in str(caught.value.__cause__.__cause__)
    wait_until(lambda: all(map(is_gone, pids)), 5, "the end of both workers")


def test_echo_of_a_failure_does_not_hide_the_cause():
    def work(rank):
        if rank == 0:
            raise RuntimeError("[gloo] Connection closed by peer")
        time.sleep(0.5)
        raise KeyError("the cause")

    with reserve() as gang, pytest.raises(TrainingError, match="rank 1 .*the cause"):
        gang.run(work, [(0,), (1,)])


def test_rank_whose_process_dies_is_named():
    def work(rank):
        if rank == 0:
            os._exit(9)
        time.sleep(60)

    with reserve() as gang, pytest.raises(TrainingError, match=r"rank 0 on host local-1 failed: ActorDiedError: .*exit code 9"):
        gang.run(work, [(0,), (1,)])


def test_stop_frees_the_hosts_and_may_be_called_twice():
    gang = reserve()
    assert not all_free() or wait_until(lambda: not all_free(), 3) is None
    gang.stop()
    gang.stop()
    wait_until(all_free, 3, "both hosts free")
    with reserve() as again:
        assert again.run(os.getpid, [(), ()])


def test_error_in_the_block_ends_the_workers():
    pids = []

    def fail():
        with reserve() as gang:
            pids.extend(gang.run(os.getpid, [(), ()]))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    wait_until(lambda: all(map(is_gone, pids)), 5, "the end of both workers")


def test_more_nodes_than_hosts_is_an_error_with_what_there_is():
    with pytest.raises(PlacementError, match=r"needs 3 host\(s\)") as caught:
        reserve(num_nodes=3)
    assert "local=3" in str(caught.value)
    assert "local-1: " in str(caught.value)
    assert "local-2: " in str(caught.value)


def test_more_devices_than_a_host_has_is_an_error_with_what_there_is():
    with pytest.raises(PlacementError, match=r"with 64 CPU each; 0 of 2"):
        reserve(devices=64)
    with pytest.raises(PlacementError, match="1 GPU"):
        Gang.reserve(num_nodes=1, devices=1, accelerator="gpu", name="test")


def test_host_option_limits_the_choice():
    with reserve(num_nodes=1, host="local-2") as gang:
        assert gang.members[0].host == "local-2"
    with pytest.raises(PlacementError, match="'nowhere' is not connected"):
        reserve(num_nodes=1, host="nowhere")


@pytest.mark.parametrize("wrong", [{"num_nodes": 0}, {"devices": 0}])
def test_less_than_one_is_refused(wrong):
    with pytest.raises(UsageError, match="at least 1"):
        reserve(**wrong)


@pytest.mark.slow
def test_gang_that_finds_no_room_is_all_or_none():
    holder = gpulayer.remote(num_cpus=1, host="local-2")(time.sleep).remote(60)
    gpulayer.wait([holder], timeout=0.3)
    started = time.monotonic()
    with pytest.raises(PlacementError, match="no room for the run 'test' now"):
        reserve()
    assert time.monotonic() - started < 8
    gpulayer.cancel(holder, force=True)
    wait_until(all_free, 5, "nothing kept")


def test_common_arguments_are_pickled_once_for_all_ranks():
    class Counted:
        pickled = 0

        def __reduce__(self):
            Counted.pickled += 1
            return (list, ([1, 2],))

    with reserve() as gang:
        results = gang.run(lambda common, rank: (common, rank), [(0,), (1,)], common=(Counted(),))
    assert results == [([1, 2], 0), ([1, 2], 1)]
    assert Counted.pickled == 1


def test_gang_that_nobody_holds_has_ended():
    gang = reserve()
    pids = gang.run(os.getpid, [(), ()])
    del gang
    wait_until(lambda: all(map(is_gone, pids)), 5, "the end of both workers")
    wait_until(all_free, 5, "both hosts free")


def test_workers_have_imported_what_was_asked_for():
    with reserve(modules=("torch", "colorsys")) as gang:
        assert gang.run(lambda: "colorsys" in __import__("sys").modules, [(), ()]) == [True, True]
