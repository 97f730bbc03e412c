"""One session for a whole module where its tests do not mind each other, and the proof that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import gpulayer
from gpulayer.runtime import records
from gpulayer.runtime import session as sessions

ROOT = Path(__file__).resolve().parents[2]


def children():
    """What this process has started and what that has started, zombies aside."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[-120:])
        except psutil.NoSuchProcess:
            continue
    return found


def assert_nothing_left(run_dir, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while (left := [children(), records.read_all(run_dir)]) != [[], []]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


@contextmanager
def module_session(base: Path, **how) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAYER_HOME", str(base / "home"))
        patch.setenv("GPULAYER_RUNTIME_DIR", str(base / "run"))
        patch.setenv("GPULAYER_LOG", "warning")
        patch.delenv("GPULAYER_HOSTS", raising=False)
        gpulayer.connect(**how)
    yield
    gpulayer.disconnect()
    assert_nothing_left(base / "run")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A session with this machine, for all tests of a module."""
    with module_session(tmp_path_factory.mktemp("m")):
        yield


@pytest.fixture(scope="module")
def shared_two(tmp_path_factory):
    """A session with two hosts, for all tests of a module."""
    with module_session(tmp_path_factory.mktemp("m"), local=2):
        yield


@pytest.fixture(autouse=True)
def nothing_left(own_folders):
    """A test that made a session of its own, or ran a script, has left nothing running."""
    yield
    if sessions.current_or_none() is None:
        assert_nothing_left(own_folders / "run")


@pytest.fixture
def start_script(tmp_path):
    """Start Python source as a script whose output is read while it runs; killed at the end of the test."""
    running = []

    def start(source: str, **env: str) -> subprocess.Popen[str]:
        script = tmp_path / f"script{len(running)}.py"
        script.write_text(textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, "-u", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def start_agent(own_folders):
    """Start `python -m gpulayer.agent ...` (or `source` in its place) and return (process, what it says when ready)."""
    import json

    running = []

    def start(*arguments: str, source: str | None = None, **env: str):
        program = ["-m", "gpulayer.agent"] if source is None else ["-c", textwrap.dedent(source)]
        process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )
        running.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in running:
        process.terminate()
        process.communicate(timeout=10)
