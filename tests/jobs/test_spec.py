"""How a process ended, said of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpulayer.jobs.spec import describe_exit


def status_of(code: str) -> int:
    """The `waitpid` status of Python that runs `code`."""
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", f"import os, signal, resource\n{code}"])
    status = os.waitpid(process.pid, 0)[1]
    process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
    return status


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_code_is_told(code: int) -> None:
    assert describe_exit(status_of(f"os._exit({code})")) == f"exit code {code}"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "killed by SIGKILL (out of memory, or killed by someone)"),
        (signal.SIGTERM, "killed by SIGTERM"),
        (signal.SIGUSR1, "killed by SIGUSR1"),
    ],
)
def test_signal_is_named(number: signal.Signals, text: str) -> None:
    assert describe_exit(status_of(f"os.kill(os.getpid(), {int(number)})")) == text


def test_signal_is_named_when_the_process_dumped_core() -> None:
    crash = "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); signal.signal(signal.SIGSEGV, signal.SIG_DFL)"
    status = status_of(f"{crash}; os.kill(os.getpid(), signal.SIGSEGV)")
    assert describe_exit(status) == describe_exit(status | 0x80) == "killed by SIGSEGV"


def test_signal_without_a_name_is_numbered() -> None:
    number = signal.SIGRTMIN + 1
    assert describe_exit(number) == f"killed by signal {number}"
