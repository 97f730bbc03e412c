"""What the training loop tells the caller's process. Plain values that pickle; rank 0 sends them all, other ranks `NanLoss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Started:
    """The run begins. `batches_per_epoch` is None where the loader does not know, limits are -1 where there is none."""

    max_epochs: int
    max_steps: int
    batches_per_epoch: int | None
    world_size: int


@dataclass(frozen=True)
class Progress:
    """Where the run is, at most ten times a second."""

    epoch: int
    batch: int
    step: int
    metrics: dict[str, float]
    samples_s: float


@dataclass(frozen=True)
class EpochEnded:
    """An epoch is over; `metrics` are the ones to show, means over the epoch and all ranks."""

    epoch: int
    step: int
    metrics: dict[str, float]
    samples_s: float


@dataclass(frozen=True)
class MetricsLogged:
    """A row for the loggers."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class CheckpointReady:
    """A checkpoint to write at `path` on the caller's machine: a dict for torch.save, or the bytes it makes of one."""

    path: str
    content: dict[str, Any] | bytes


@dataclass(frozen=True)
class CheckpointDropped:
    """A checkpoint that is no longer among the best."""

    path: str


@dataclass(frozen=True)
class NanLoss:
    """The loss of optimizer step `step` (counted from 1) was NaN on rank `rank`, for the first time there."""

    step: int
    rank: int


Event = Started | Progress | EpochEnded | MetricsLogged | CheckpointReady | CheckpointDropped | NanLoss
