"""What many tests need: folders of their own for keys and sockets, and sessions with real agents."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import gpulayer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keys, hosts file, sockets and records of this test alone; in a short path, since a socket's may have 107 bytes."""
    base = tmp_path_factory.mktemp("g")
    monkeypatch.setenv("GPULAYER_HOME", str(base / "home"))
    monkeypatch.setenv("GPULAYER_RUNTIME_DIR", str(base / "run"))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    monkeypatch.setenv("GPULAYER_LOG", "warning")
    return base


@pytest.fixture
def session(own_folders: Path) -> Iterator[None]:
    """This program, connected to an embedded agent."""
    gpulayer.connect()
    yield
    gpulayer.disconnect()


@pytest.fixture
def two_hosts(own_folders: Path) -> Iterator[None]:
    """This program, connected to two agents on this machine."""
    gpulayer.connect(local=2)
    yield
    gpulayer.disconnect()


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source as a script of its own, with GPUlayer importable, from an empty folder."""

    def run(source: str, *, timeout: float = 60, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        script = (cwd or tmp_path) / "script.py"
        script.write_text(source)
        return subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )

    return run


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str = "the condition") -> None:
    """Poll a condition of the outside world (processes, files) that nothing announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not hold within {timeout_s} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
