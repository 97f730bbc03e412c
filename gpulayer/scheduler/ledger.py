"""What one host has granted and what is left. The agent owns one ledger and alone decides from it.

    ledger = Ledger(cpus=8, gpus=2)
    grant = ledger.grant(Resources(cpus=1, gpus=0.5))     # None if it does not fit now
    ledger.release(grant)

A whole number of GPUs means whole devices; a fraction below 1 shares one device, filling the fullest that still has
room, so that whole devices stay free for those who need them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpulayer.errors import UsageError
from gpulayer.resources import Resources

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Grant:
    """Resources given out: which GPUs (positions among the host's GPUs) and how much of each."""

    need: Resources
    gpus: tuple[int, ...] = ()


def check_need(need: Resources) -> Resources:
    """Refuse amounts that cannot mean anything."""
    if not (0 <= need.cpus < math.inf and 0 <= need.gpus < math.inf):
        raise UsageError(f"resources are numbers from 0 upwards, not num_cpus={need.cpus:g}, num_gpus={need.gpus:g}")
    if need.gpus > 1 and need.gpus != int(need.gpus):
        raise UsageError(
            f"num_gpus={need.gpus:g}: above 1 it must be a whole number of devices; below 1 it may be a fraction of one device"
        )
    return need


class Ledger:
    """Free and granted resources of one host."""

    def __init__(self, cpus: float, gpus: int) -> None:
        self.cpus = cpus
        self.gpus = gpus
        self.cpus_free = cpus
        self._gpus_free = [1.0] * gpus

    @property
    def gpus_free(self) -> float:
        """GPUs not granted; shared devices count by what is left of them."""
        return sum(self._gpus_free)

    def can_ever_grant(self, need: Resources) -> bool:
        """Whether the host could hold `need` if nothing else ran."""
        return need.cpus <= self.cpus + _ROUNDING and need.gpus <= self.gpus

    def grant(self, need: Resources) -> Grant | None:
        """Take `need` from what is free, or None if it does not fit now."""
        if need.cpus > max(self.cpus_free, 0.0) + _ROUNDING:
            return None
        chosen = self._choose_gpus(need.gpus)
        if chosen is None:
            return None
        self.cpus_free -= need.cpus
        for index in chosen:
            self._gpus_free[index] -= min(need.gpus, 1.0)
        return Grant(need, chosen)

    def release(self, grant: Grant) -> None:
        """Give a grant back."""
        self.cpus_free = min(self.cpus, self.cpus_free + grant.need.cpus)
        for index in grant.gpus:
            self._gpus_free[index] = min(1.0, self._gpus_free[index] + min(grant.need.gpus, 1.0))

    def lend(self, grant: Grant, lent: bool) -> None:
        """A worker that waits lends its CPUs (its GPUs hold its memory and stay); taken back, less than none may be free."""
        self.cpus_free += grant.need.cpus if lent else -grant.need.cpus

    def _choose_gpus(self, gpus: float) -> tuple[int, ...] | None:
        if gpus == 0:
            return ()
        if gpus < 1:
            fitting = [i for i, free in enumerate(self._gpus_free) if free + _ROUNDING >= gpus]
            return (min(fitting, key=lambda i: (self._gpus_free[i], i)),) if fitting else None
        whole = [i for i, free in enumerate(self._gpus_free) if free >= 1 - _ROUNDING]
        return tuple(whole[: int(gpus)]) if len(whole) >= gpus else None
