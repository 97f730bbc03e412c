"""Estimates of a link from samples that arrive over time: no I/O, no clock (the caller says what time it is).

Latency is the smallest of the last samples (a queue only ever adds to it); bandwidth is an exponentially weighted mean,
so that one odd transfer does not swing a placement and an old truth fades.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WEIGHT = 0.3
KEPT_SAMPLES = 16


@dataclass(slots=True)
class LinkEstimate:
    """What is known of one link."""

    bandwidth_bytes_s: float | None = None
    updated_s: float | None = None
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    def add_latency(self, latency_s: float, now_s: float) -> None:
        """One round trip."""
        self._latencies.append(latency_s)
        self.updated_s = now_s

    def add_transfer(self, size_bytes: int, seconds: float, now_s: float) -> None:
        """One transfer of `size_bytes` that took `seconds`."""
        if seconds <= 0:
            return
        sample = size_bytes / seconds
        old = self.bandwidth_bytes_s
        self.bandwidth_bytes_s = sample if old is None else (1 - WEIGHT) * old + WEIGHT * sample
        self.updated_s = now_s

    @property
    def latency_s(self) -> float | None:
        """The best of the last round trips, None before the first."""
        return min(self._latencies) if self._latencies else None

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last sample, None before the first."""
        return None if self.updated_s is None else now_s - self.updated_s


def ring_all_reduce_s(size_bytes: int, ranks: int, bottleneck_bytes_s: float, latency_s: float) -> float:
    """Seconds of a ring all-reduce: 2(n-1)/n of the data crosses the slowest link, in 2(n-1) steps.

    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) / ranks * size_bytes / bottleneck_bytes_s + 2 * (ranks - 1) * latency_s
