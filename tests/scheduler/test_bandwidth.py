"""Estimates of links: the smallest latency of late, a mean bandwidth that odd samples do not swing, and ring times."""

from __future__ import annotations

import random

import pytest

from gpulayer.scheduler.bandwidth import KEPT_SAMPLES, WEIGHT, LinkEstimate, ring_all_reduce_s


def test_new_estimate_knows_nothing() -> None:
    link = LinkEstimate()
    assert (link.latency_s, link.bandwidth_bytes_s, link.age_s(100.0)) == (None, None, None)


def test_latency_is_the_smallest_of_the_last_samples() -> None:
    link = LinkEstimate()
    for sample in (0.005, 0.001, 0.009):
        link.add_latency(sample, 0.0)
    assert link.latency_s == 0.001
    for _ in range(KEPT_SAMPLES):
        link.add_latency(0.004, 0.0)
    assert link.latency_s == 0.004  # the path has changed


def test_bandwidth_is_the_first_sample_then_a_weighted_mean() -> None:
    link = LinkEstimate()
    link.add_transfer(1000, 2.0, 0.0)
    assert link.bandwidth_bytes_s == 500
    link.add_transfer(1000, 1.0, 0.0)
    assert link.bandwidth_bytes_s == pytest.approx((1 - WEIGHT) * 500 + WEIGHT * 1000)


def test_bandwidth_follows_the_truth_and_survives_an_odd_sample() -> None:
    rng = random.Random(1)
    link = LinkEstimate()
    for _ in range(30):
        link.add_transfer(10**9, rng.uniform(0.95, 1.05), 0.0)
    assert link.bandwidth_bytes_s == pytest.approx(1e9, rel=0.1)
    link.add_transfer(10**9, 100.0, 0.0)
    assert link.bandwidth_bytes_s > 0.6e9
    for _ in range(30):
        link.add_transfer(10**9, 10.0, 0.0)
    assert link.bandwidth_bytes_s == pytest.approx(1e8, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_transfer_that_took_no_time_says_nothing(seconds: float) -> None:
    link = LinkEstimate()
    link.add_transfer(1000, seconds, 5.0)
    assert (link.bandwidth_bytes_s, link.updated_s) == (None, None)


def test_age_is_since_the_last_sample_of_either_kind() -> None:
    link = LinkEstimate()
    link.add_latency(0.1, 10.0)
    assert link.age_s(12.5) == 2.5
    link.add_transfer(1, 1.0, 20.0)
    assert link.age_s(20.0) == 0.0


def test_estimates_share_nothing() -> None:
    one, two = LinkEstimate(), LinkEstimate()
    one.add_latency(0.1, 0.0)
    assert two.latency_s is None


@pytest.mark.parametrize("ranks", [0, 1])
def test_all_reduce_of_one_rank_takes_no_time(ranks: int) -> None:
    assert ring_all_reduce_s(10**9, ranks, 1e9, 0.001) == 0.0


@pytest.mark.parametrize(
    ("ranks", "expected_s"),
    [(2, 1.0 + 2 * 0.001), (4, 1.5 + 6 * 0.001), (100, 1.98 + 198 * 0.001)],
)
def test_all_reduce_time_is_two_trips_around_the_ring(ranks: int, expected_s: float) -> None:
    assert ring_all_reduce_s(10**9, ranks, 1e9, 0.001) == pytest.approx(expected_s)


def test_all_reduce_takes_longer_with_more_ranks_more_data_and_slower_links() -> None:
    base = ring_all_reduce_s(10**8, 8, 1e9, 1e-4)
    assert ring_all_reduce_s(10**8, 9, 1e9, 1e-4) > base
    assert ring_all_reduce_s(2 * 10**8, 8, 1e9, 1e-4) > base
    assert ring_all_reduce_s(10**8, 8, 5e8, 1e-4) > base
    assert ring_all_reduce_s(10**8, 8, 1e9, 2e-4) > base
