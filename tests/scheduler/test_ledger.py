"""The ledger never grants what is not there, loses nothing, and keeps whole devices whole."""

from __future__ import annotations

import math
import random

import pytest

from gpulayer.errors import UsageError
from gpulayer.resources import Resources
from gpulayer.scheduler.ledger import Grant, Ledger, check_need


def grant(ledger: Ledger, cpus: float = 0.0, gpus: float = 0.0) -> Grant:
    found = ledger.grant(Resources(cpus, gpus))
    assert found is not None
    return found


@pytest.mark.parametrize("need", [Resources(), Resources(0, 0), Resources(0.1, 0.3), Resources(7, 1), Resources(1, 4)])
def test_need_that_means_something_is_taken(need: Resources) -> None:
    assert check_need(need) is need


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (Resources(-1, 0), "from 0 upwards, not num_cpus=-1"),
        (Resources(0, -0.5), "not num_cpus=0, num_gpus=-0.5"),
        (Resources(math.nan, 0), "num_cpus=nan"),
        (Resources(1, math.nan), "num_gpus=nan"),
        (Resources(math.inf, 0), "num_cpus=inf"),
        (Resources(1, math.inf), "num_gpus=inf"),
        (Resources(1, 1.5), "num_gpus=1.5: above 1 it must be a whole number of devices"),
    ],
)
def test_need_that_means_nothing_is_refused(need: Resources, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace(".", r"\.")):
        check_need(need)


def test_grant_takes_and_release_gives_back() -> None:
    ledger = Ledger(4, 2)
    one = grant(ledger, 3, 1)
    assert (ledger.cpus_free, ledger.gpus_free) == (1, 1)
    assert ledger.grant(Resources(2, 0)) is None
    assert ledger.grant(Resources(1, 2)) is None
    assert (ledger.cpus_free, ledger.gpus_free) == (1, 1)
    ledger.release(one)
    assert (ledger.cpus_free, ledger.gpus_free) == (4, 2)


@pytest.mark.parametrize(
    ("cpus", "gpus", "possible"), [(4, 2, True), (4.5, 0, False), (0, 3, False), (0, 0.5, True), (0, 0, True), (4, 1, True)]
)
def test_can_ever_grant_looks_at_the_whole_host(cpus: float, gpus: float, possible: bool) -> None:
    ledger = Ledger(4, 2)
    assert ledger.can_ever_grant(Resources(cpus, gpus)) is possible
    grant(ledger, 4, 2)
    assert ledger.can_ever_grant(Resources(cpus, gpus)) is possible


def test_host_without_gpus_grants_no_part_of_one() -> None:
    assert Ledger(4, 0).grant(Resources(1, 0.1)) is None
    assert not Ledger(4, 0).can_ever_grant(Resources(1, 0.1))


def test_parts_share_the_fullest_device_that_has_room() -> None:
    ledger = Ledger(8, 3)
    assert grant(ledger, gpus=0.5).gpus == (0,)
    assert grant(ledger, gpus=0.7).gpus == (1,)
    assert grant(ledger, gpus=0.3).gpus == (1,)
    assert grant(ledger, gpus=0.4).gpus == (0,)
    assert grant(ledger, gpus=1).gpus == (2,)
    assert ledger.grant(Resources(0, 0.2)) is None


def test_whole_devices_are_not_taken_from_those_who_share() -> None:
    ledger = Ledger(8, 2)
    grant(ledger, gpus=0.1)
    assert ledger.grant(Resources(0, 2)) is None
    assert grant(ledger, gpus=1).gpus == (1,)


@pytest.mark.parametrize("part", [0.1, 0.2, 0.25, 1 / 3, 1 / 7])
def test_equal_parts_fill_a_device_exactly(part: float) -> None:
    ledger = Ledger(1, 1)
    for _ in range(50):
        parts = [grant(ledger, gpus=part) for _ in range(round(1 / part))]
        assert ledger.grant(Resources(0, part)) is None
        for one in random.Random(1).sample(parts, len(parts)):
            ledger.release(one)
        ledger.release(grant(ledger, gpus=1))


def test_waiting_worker_lends_its_cpus_and_keeps_its_gpus() -> None:
    ledger = Ledger(2, 1)
    outer = grant(ledger, 2, 1)
    ledger.lend(outer, True)
    assert (ledger.cpus_free, ledger.gpus_free) == (2, 0)
    inner = grant(ledger, 2)
    ledger.lend(outer, False)
    assert ledger.cpus_free == -2
    assert ledger.grant(Resources(1, 0)) is None
    ledger.release(inner)
    assert ledger.cpus_free == 0
    ledger.release(outer)
    assert (ledger.cpus_free, ledger.gpus_free) == (2, 1)


def test_need_of_no_cpu_is_granted_while_lent_cpus_are_taken_back() -> None:
    ledger = Ledger(1, 1)
    outer = grant(ledger, 1)
    ledger.lend(outer, True)
    grant(ledger, 1)
    ledger.lend(outer, False)
    assert ledger.cpus_free < 0
    grant(ledger, 0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_ledger_balances_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    cpus, gpus = rng.choice([1, 2, 7.5, 64]), rng.randint(0, 8)
    ledger = Ledger(cpus, gpus)
    held: list[Grant] = []
    lent: list[Grant] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.5:
            need = Resources(rng.choice([0, 0.1, 0.5, 1, 2, 5]), rng.choice([0, 0.1, 0.3, 0.5, 1, 2, 4]))
            found = ledger.grant(need)
            if found is not None:
                assert ledger.can_ever_grant(need)
                assert found.need == need
                held.append(found)
        elif action < 0.85 and held:
            one = held.pop(rng.randrange(len(held)))
            if one in lent:
                lent.remove(one)
                ledger.lend(one, False)
            ledger.release(one)
        elif held:
            one = rng.choice(held)
            ledger.lend(one, one not in lent)
            lent.remove(one) if one in lent else lent.append(one)
        check_balance(ledger, held, lent)
    for one in lent:
        ledger.lend(one, False)
    for one in held:
        ledger.release(one)
    assert ledger.cpus_free == pytest.approx(cpus, abs=1e-9)
    assert ledger.gpus_free == pytest.approx(gpus, abs=1e-9)
    if gpus:
        assert len(grant(ledger, gpus=float(gpus)).gpus) == gpus


def check_balance(ledger: Ledger, held: list[Grant], lent: list[Grant]) -> None:
    """What is free and what is held is what there is, on each device."""
    assert ledger.cpus_free == pytest.approx(
        ledger.cpus - sum(one.need.cpus for one in held) + sum(one.need.cpus for one in lent)
    )
    used = [0.0] * ledger.gpus
    for one in held:
        assert len(set(one.gpus)) == len(one.gpus) == math.ceil(one.need.gpus)
        for index in one.gpus:
            used[index] += min(one.need.gpus, 1.0)
    assert all(amount <= 1 + 1e-9 for amount in used)
    assert ledger.gpus_free == pytest.approx(ledger.gpus - sum(used))
