"""What a remote function or class needs, checked when it is declared."""

from __future__ import annotations

import difflib
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from gpulayer.errors import UsageError
from gpulayer.resources import Resources
from gpulayer.scheduler.ledger import check_need

_TASK = ("num_cpus", "num_gpus", "host")
_ACTOR = (*_TASK, "name")
_NOT_YET = (
    "lifetime",
    "max_concurrency",
    "max_pending",
    "max_restarts",
    "max_retries",
    "memory",
    "num_returns",
    "retries",
    "zone",
)
"""Options of the design, or of Ray, that are not there yet: refused by name, so that nobody believes they act."""


@dataclass(frozen=True, slots=True)
class Options:
    """`num_cpus`, `num_gpus`, `host` and, for actors, `name`."""

    need: Resources
    host: str | None = None
    name: str | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """What a worker should have imported from the start: torch, if this process uses it."""
        return ("torch",) if "torch" in sys.modules else ()

    def updated(self, given: dict[str, Any], *, actor: bool) -> Options:
        """The same with some values replaced. Raises `UsageError` for an unknown or impossible one."""
        known = _ACTOR if actor else _TASK
        for key in given:
            if key in _NOT_YET:
                raise UsageError(f"option {key!r} is not supported yet. Known options: {', '.join(known)}")
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise UsageError(f"unknown option {key!r}{hint} Known options: {', '.join(known)}")
        need = Resources(_amount(given, "num_cpus", self.need.cpus), _amount(given, "num_gpus", self.need.gpus))
        return replace(self, need=check_need(need), host=_text(given, "host", self.host), name=_text(given, "name", self.name))


def _amount(given: dict[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{key}={value!r} is not a number of {'CPUs' if key == 'num_cpus' else 'GPUs'}")
    return float(value)


def _text(given: dict[str, Any], key: str, default: str | None) -> str | None:
    value = given.get(key, default)
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{key}={value!r} is not a name")
    return value


def lease_body(options: Options, label: str, kind: str, meta: bytes = b"", wait: bool = True) -> dict[str, Any]:
    """The question that asks an agent for a worker."""
    return {
        "m": "lease",
        "cpus": options.need.cpus,
        "gpus": options.need.gpus,
        "kind": kind,
        "label": label,
        "name": options.name or "",
        "modules": list(options.modules),
        "meta": meta,
        "wait": wait,
    }


TASK_DEFAULT = Options(Resources(cpus=1.0))
ACTOR_DEFAULT = Options(Resources(cpus=0.0))
"""An idle actor takes no CPU, so that more actors than cores fit on a host, as in Ray."""
