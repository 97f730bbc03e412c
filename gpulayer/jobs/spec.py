"""How a process ended, in words."""

from __future__ import annotations

import os
import signal


def describe_exit(status: int) -> str:
    """A `waitpid` status as a user reads it: `exit code 3` or `killed by SIGSEGV`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        hint = " (out of memory, or killed by someone)" if number == signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
