"""Two things that a Linux process can ask of its kernel: to end with its parent, and to inherit its descendants' orphans."""

from __future__ import annotations

import ctypes
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
