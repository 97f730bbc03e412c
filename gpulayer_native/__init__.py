"""Fused optimizer kernels. This version has none: torch's own optimizers run, and `status` says so."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Status", "status"]


class Status(NamedTuple):
    """Which path runs, and why."""

    path: str
    reason: str


def status() -> Status:
    """The path that optimizer steps take: "torch" until native kernels are built."""
    return Status("torch", "this version of GPUlayer has no native kernels yet")
