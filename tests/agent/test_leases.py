"""Leases over a real pool: who gets what, when, and when it is free again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import gpulayer
from gpulayer.agent.leases import Leases
from gpulayer.errors import GPUlayerError, PlacementError, UsageError, WorkerStartError
from gpulayer.resources import Device, Resources
from tests.agents import Inside, inside
from tests.conftest import is_gone, wait_until

GPUS = tuple(Device("cuda", index, "a GPU", f"GPU-{index}", 1 << 34) for index in range(2))
ME, OTHER = b"driver-1", b"driver-2"


class Asker:
    """Asks for leases, and keeps every answer and every reclaim."""

    def __init__(self, host: Inside, cpus: float, gpus: tuple[Device, ...]) -> None:
        self.host = host
        self.answers: dict[str, Any] = {}
        self.reclaims = 0
        host.agent.host = replace(host.agent.host, cpus=cpus, devices=gpus)
        self.leases = host.agent.leases = Leases(host.agent.host, host.agent.pool, self._reclaim)

    def _reclaim(self) -> None:
        self.reclaims += 1

    def ask(self, label: str, cpus: float = 1, gpus: float = 0, owner: bytes = ME, **more: Any) -> None:
        """Ask; the answer is in `answers` under the label, once it is there."""
        body = {"cpus": cpus, "gpus": gpus, "kind": "task", "label": label, "modules": [], **more}
        self.do(lambda: self.leases.request(owner, body, lambda answer: self.answers.__setitem__(label, answer)))

    def get(self, label: str) -> Any:
        wait_until(lambda: label in self.answers, 15, f"an answer to {label}")
        return self.answers[label]

    def error(self, label: str) -> GPUlayerError:
        answer = self.get(label)
        assert isinstance(answer, GPUlayerError), answer
        return answer

    def do(self, function: Callable[[], Any]) -> Any:
        return self.host.do(function)

    def end(self, label: str, owner: bytes = ME) -> None:
        """Give a lease back."""
        self.do(lambda: self.leases.release(owner, self.get(label)["worker"], "done"))

    @property
    def waiting(self) -> list[str]:
        return self.do(lambda: [lease.label for lease in self.leases.queue])

    @property
    def free(self) -> tuple[float, float]:
        return self.do(lambda: (self.leases.ledger.cpus_free, self.leases.ledger.gpus_free))


@pytest.fixture
def asker(own_folders) -> Iterator[Asker]:
    with inside() as host:
        asker = Asker(host, 2, GPUS)
        yield asker
        host.do(lambda: [asker.leases.end_all_of(owner, "the test is over") for owner in (ME, OTHER)])
        wait_until(lambda: not host.agent.pool.workers, 10, "the end of all workers")
        assert asker.free == (2, 2), "everything is free again"
        assert not asker.leases.active
        assert not asker.leases.queue


def test_lease_names_its_worker_and_its_devices(asker):
    asker.ask("a", gpus=1)
    answer = asker.get("a")
    assert answer["devices"] == [0]
    assert not is_gone(answer["pid"])
    assert asker.free == (1, 1)


def test_requests_are_granted_in_order_so_that_a_large_one_is_not_starved(asker):
    asker.ask("first")
    asker.get("first")
    asker.ask("large", cpus=2)
    asker.ask("small", cpus=1)
    assert asker.waiting == ["large", "small"]
    assert asker.free == (1, 2), "the small one would fit, and waits its turn"
    asker.end("first")
    asker.get("large")
    assert asker.waiting == ["small"]
    asker.end("large")
    asker.get("small")


def test_who_waits_makes_the_agent_ask_for_idle_workers(asker):
    asker.ask("a", cpus=2)
    asker.get("a")
    assert asker.reclaims == 0
    asker.ask("b")
    assert asker.reclaims == 1


def test_resources_are_free_only_after_the_worker_has_exited(asker):
    asker.ask("a", cpus=2)
    pid = asker.get("a")["pid"]
    os.kill(pid, 19)  # stopped: its end takes until the kill arrives
    seen: list[bool] = []
    original = asker.leases.ledger.release
    asker.leases.ledger.release = lambda grant: (seen.append(is_gone(pid)), original(grant))[1]
    asker.ask("b", cpus=2)
    asker.end("a")
    asker.get("b")
    assert seen == [True]


def test_request_that_will_not_wait_is_refused_while_there_is_no_room(asker):
    asker.ask("a", cpus=2)
    asker.get("a")
    asker.ask("b", wait=False)
    error = asker.error("b")
    assert isinstance(error, PlacementError)
    assert error.busy
    assert "0 of 2 CPU free, 2 of 2 GPU free" in str(error)
    asker.ask("c")
    asker.end("a")
    asker.get("c")
    asker.ask("d", wait=False)
    asker.get("d")


def test_request_that_will_not_wait_does_not_overtake_the_queue(asker):
    asker.ask("a")
    asker.get("a")
    asker.ask("large", cpus=2)
    asker.ask("small", cpus=1, wait=False)
    assert asker.error("small").busy


@pytest.mark.parametrize(("cpus", "gpus"), [(3, 0), (0, 3)])
def test_what_can_never_fit_is_refused_at_once(asker, cpus, gpus):
    asker.ask("a", cpus=cpus, gpus=gpus)
    error = asker.error("a")
    assert isinstance(error, PlacementError)
    assert "can never hold" in str(error)
    assert "2 CPU and 2 GPU" in str(error)
    assert not error.facts.get("busy")


@pytest.mark.parametrize(("cpus", "gpus"), [(-1, 0), (0, -0.5), (0, 1.5), (float("nan"), 0), (0, float("inf"))])
def test_impossible_amounts_are_usage_errors(asker, cpus, gpus):
    asker.ask("a", cpus=cpus, gpus=gpus)
    assert isinstance(asker.error("a"), UsageError)


def test_fractions_share_a_device_and_whole_devices_stay_free(asker):
    for label in ("a", "b"):
        asker.ask(label, cpus=0, gpus=0.5)
        assert asker.get(label)["devices"] == [0]
    asker.ask("whole", cpus=0, gpus=1)
    assert asker.get("whole")["devices"] == [1]
    asker.ask("more", cpus=0, gpus=0.5)
    assert asker.waiting == ["more"]
    asker.end("whole")
    assert asker.get("more")["devices"] == [1]


def test_only_the_owner_can_release(asker):
    asker.ask("a")
    pid = asker.get("a")["pid"]
    asker.end("a", owner=OTHER)
    assert asker.free == (1, 2)
    assert not is_gone(pid)
    asker.end("a")
    wait_until(lambda: asker.free == (2, 2), 5, "its CPU to be free")


def test_withdraw_drops_the_newest_waiting_requests_of_their_owner_only(asker):
    asker.ask("running", cpus=2)
    asker.get("running")
    for label in ("a", "b", "c"):
        asker.ask(label)
    asker.ask("actor", kind="actor")
    asker.ask("other", owner=OTHER)
    asker.ask("bigger", cpus=2)
    assert asker.do(lambda: asker.leases.withdraw(ME, Resources(1, 0), 2)) == 2
    assert asker.waiting == ["a", "actor", "other", "bigger"]
    assert asker.error("b").withdrawn
    assert asker.error("c").withdrawn
    assert asker.do(lambda: asker.leases.withdraw(ME, Resources(1, 0), 5)) == 1
    assert asker.do(lambda: asker.leases.withdraw(ME, Resources(1, 0), 5)) == 0


def test_withdrawn_head_lets_the_next_one_in(asker):
    asker.ask("running")
    asker.get("running")
    asker.ask("large", cpus=2)
    asker.ask("small")
    asker.do(lambda: asker.leases.withdraw(ME, Resources(2, 0), 1))
    asker.get("small")


def test_name_is_taken_from_the_moment_it_is_asked_for(asker):
    asker.ask("a", name="one", kind="actor", cpus=2)
    asker.ask("b", name="two", kind="actor")
    for label, name in (("a2", "one"), ("b2", "two")):
        asker.ask(label, name=name, kind="actor", owner=OTHER)
        assert isinstance(asker.error(label), UsageError)
        assert f"get_actor({name!r})" in str(asker.error(label))
    asker.get("a")
    assert asker.do(lambda: asker.leases.find("one")).label == "a"
    assert asker.do(lambda: asker.leases.find("two")) is None, "it waits still"
    asker.end("a")
    asker.get("b")
    assert asker.do(lambda: asker.leases.find("one")) is None
    asker.ask("a3", name="one", kind="actor", cpus=0)
    asker.get("a3")


def test_blocked_worker_lends_its_cpus_until_it_goes_on(asker):
    asker.ask("outer", cpus=2, gpus=1)
    worker = asker.get("outer")["worker"]
    asker.ask("inner", cpus=2)
    for _ in range(2):  # said twice, it counts once
        asker.do(lambda: asker.leases.set_blocked(worker, True))
    asker.get("inner")
    assert asker.free == (0, 1), "the GPU stays with the one that waits"
    for _ in range(2):
        asker.do(lambda: asker.leases.set_blocked(worker, False))
    assert asker.free == (-2, 1)
    asker.ask("next")
    assert asker.waiting == ["next"]
    asker.end("inner")
    wait_until(lambda: asker.free == (0, 1), 5, "the debt to be paid")
    assert asker.waiting == ["next"]


def test_worker_that_ends_while_blocked_frees_its_cpus_once(asker):
    asker.ask("a", cpus=2)
    worker = asker.get("a")["worker"]
    asker.do(lambda: asker.leases.set_blocked(worker, True))
    asker.end("a")
    wait_until(lambda: not asker.leases.active, 5, "its end")
    assert asker.free == (2, 2)


def test_end_of_the_owner_ends_what_it_holds_and_drops_what_it_waits_for(asker):
    asker.ask("mine", cpus=1)
    asker.ask("others", cpus=1, owner=OTHER)
    asker.ask("waits", cpus=2)
    asker.ask("others wait", owner=OTHER)
    pid = asker.get("mine")["pid"]
    asker.get("others")
    ended = asker.do(lambda: asker.leases.end_all_of(ME, "gone"))
    assert [worker.pid for worker in ended] == [pid]
    asker.get("others wait")
    assert is_gone(pid)
    assert "waits" not in asker.answers
    assert asker.waiting == []


def test_end_of_the_owner_also_ends_a_worker_that_is_only_just_asked_for(asker):
    """Request and goodbye may arrive in one frame."""

    def both() -> None:
        body = {"cpus": 1, "gpus": 0, "kind": "task", "label": "a"}
        asker.leases.request(ME, body, lambda answer: asker.answers.__setitem__("a", answer))
        assert len(asker.leases.end_all_of(ME, "gone")) == 1

    asker.do(both)
    wait_until(lambda: not asker.host.agent.pool.workers, 5, "the end of the worker")
    assert isinstance(asker.error("a"), WorkerStartError)
    assert asker.free == (2, 2)


def test_worker_that_dies_gives_everything_back_and_the_next_starts(asker):
    asker.ask("a", cpus=2, gpus=2)
    asker.ask("b", cpus=2, gpus=2)
    os.kill(asker.get("a")["pid"], 9)
    asker.get("b")


def test_failed_fork_gives_everything_back(asker):
    asker.host.agent.pool._folder.mkdir(exist_ok=True)
    asker.host.agent.pool._folder.rmdir()
    asker.host.agent.pool._folder.write_text("in the way")
    asker.ask("a", cpus=2)
    asker.ask("b", cpus=2)
    assert isinstance(asker.error("a"), WorkerStartError)
    assert isinstance(asker.error("b"), WorkerStartError)
    assert asker.free == (2, 2)
    asker.host.agent.pool._folder.unlink()


# --- what the worker itself sees


@pytest.fixture
def gpu_session(asker) -> Iterator[Asker]:
    with gpulayer.connect():
        yield asker


def visible(**options: Any) -> list[str | None]:
    @gpulayer.remote
    def look():
        return [os.environ.get(f"{kind}_VISIBLE_DEVICES") for kind in ("CUDA", "HIP", "ROCR")]

    return gpulayer.get(look.options(**options).remote())


def test_worker_sees_the_devices_of_its_lease_only(gpu_session):
    assert visible(num_gpus=1)[0] in ("GPU-0", "GPU-1")
    assert visible(num_gpus=2)[0] == "GPU-0,GPU-1"
    assert visible(num_gpus=0.5)[0] in ("GPU-0", "GPU-1")
    assert visible(num_gpus=0) == ["", "", ""]


def test_worker_on_rocm_sees_the_twin_variable(own_folders):
    with inside() as host:
        Asker(host, 2, tuple(Device("rocm", index, "a GPU", "", 1 << 34) for index in range(2)))
        with gpulayer.connect():
            assert visible(num_gpus=2)[1] == "0,1"
            assert visible(num_gpus=0) == ["", "", ""]


def test_worker_uses_as_many_threads_as_it_has_cpus(gpu_session):
    @gpulayer.remote
    def threads():
        return [os.environ[f"{kind}_NUM_THREADS"] for kind in ("OMP", "MKL")]

    assert gpulayer.get(threads.options(num_cpus=2).remote()) == ["2", "2"]
    assert gpulayer.get(threads.options(num_cpus=0.5).remote()) == ["1", "1"]
