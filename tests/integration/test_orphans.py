"""Nothing is left running after the driver or the agent is killed: workers, their children, their daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import gpulayer
from gpulayer.errors import HostLostError
from tests.agents import Outside, outside, read_pids, workers_of
from tests.conftest import ROOT, is_gone, wait_until

pytestmark = pytest.mark.timeout(90)
PROMISED_S = 10.0
KINDS = 5  # worker, subprocess, multiprocessing child, setsid'ed daemon with and without a program of its own
DRIVER = """
import multiprocessing, os, subprocess, sys, time
import gpulayer

@gpulayer.remote
class Breeder:
    def breed(self, path):
        note = "import os, sys, time; f = open(sys.argv[1], 'a'); f.write(f'{os.getpid()}\\\\n'); f.close(); time.sleep(600)"
        command = [sys.executable, "-c", note, path]
        tell(path)
        subprocess.Popen(command)
        multiprocessing.get_context("fork").Process(target=tell, args=(path, 600)).start()
        for last in (lambda: tell(path, 600), lambda: os.execv(sys.executable, command)):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    last()
                os._exit(0)
            os.wait()

    def sleep(self):
        time.sleep(600)

def tell(path, then_s=0):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(then_s)

if __name__ == "__main__":
    gpulayer.connect(eval(sys.argv[2]))
    breeder = Breeder.remote()
    gpulayer.get(breeder.breed.remote(sys.argv[1]))
    print(os.getpid(), flush=True)
    gpulayer.get(breeder.sleep.remote())
"""


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[object], tuple[subprocess.Popen, list[int]]]]:
    """Start a driver connected to hosts; gives its process, and the pids of all that its actor has started."""
    script, pids_file = tmp_path / "driver.py", tmp_path / "pids"
    script.write_text(DRIVER)
    started: list[subprocess.Popen] = []

    def start(hosts: object) -> tuple[subprocess.Popen, list[int]]:
        command = [sys.executable, str(script), str(pids_file), repr(hosts)]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
        started.append(driver)
        pids = read_pids(pids_file, KINDS)
        assert driver.stdout is not None
        assert int(driver.stdout.readline()) == driver.pid
        return driver, pids

    yield start
    for driver in started:
        driver.kill()
        driver.communicate()


def kill_and_time(pid: int, others: list[int], timeout_s: float = PROMISED_S) -> float:
    """SIGKILL a process; how long until all the others have ended too."""
    assert not any(map(is_gone, others))
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, others)), timeout_s, f"the end of all of {others}")
    return time.monotonic() - start


@pytest.mark.slow
def test_killed_driver_leaves_nothing_when_its_agent_is_embedded(drive):
    driver, pids = drive(None)
    below = [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
    assert len(below) >= 3, "agent, zygote, worker"
    assert kill_and_time(driver.pid, [*pids, *below]) < 5


@pytest.mark.slow
def test_killed_driver_leaves_nothing_when_its_agent_is_reached_over_ipc(drive):
    with outside("--port", "0") as agent:
        driver, pids = drive(None)
        assert workers_of(agent.pid) == pids[:1], "connect() found the running agent"
        assert kill_and_time(driver.pid, pids) < 5
        assert workers_of(agent.pid) == []
        assert not is_gone(agent.pid)


@pytest.mark.slow
def test_killed_driver_leaves_nothing_when_its_agent_is_reached_over_tcp(drive):
    with outside("--port", "0") as agent:
        driver, pids = drive([f"127.0.0.1:{agent.port}"])
        assert kill_and_time(driver.pid, pids) < PROMISED_S
        assert workers_of(agent.pid) == []
        assert not is_gone(agent.pid)


@pytest.mark.slow
def test_killed_agent_leaves_nothing(drive):
    with outside("--port", "0") as agent:
        _, pids = drive(None)
        below = agent.below()
        workers = workers_of(agent.pid)
        start = time.monotonic()
        os.kill(agent.pid, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, workers)), 2, "the end of the workers")
        wait_until(lambda: all(map(is_gone, [*pids, *below])), PROMISED_S, "the end of their children")
        assert time.monotonic() - start < 5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_driver_whose_code_holds_the_gil_keeps_what_it_has(way, run_script):
    """It cannot say anything meanwhile, though it lives."""
    with outside("--port", "0") as agent:
        done = run_script(f"""
import ctypes, gpulayer

@gpulayer.remote
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

gpulayer.connect({None if way == "ipc" else [f"127.0.0.1:{agent.port}"]})
counter = Counter.remote()
print(gpulayer.get(counter.add.remote()))
ctypes.PyDLL(None).sleep(18)
print(gpulayer.get(counter.add.remote(), timeout=10))
""")
    assert done.stdout.splitlines() == ["1", "2"], done.stderr


@pytest.fixture
def lone_agent() -> Iterator[Outside]:
    with outside("--port", "0") as agent:
        yield agent


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_killed_agent_fails_pending_and_later_calls_at_once(lone_agent, way):
    @gpulayer.remote
    def sleep(seconds):
        time.sleep(seconds)

    with gpulayer.connect(None if way == "ipc" else [f"127.0.0.1:{lone_agent.port}"]):
        gpulayer.get(sleep.remote(0))
        pending = sleep.remote(600)
        wait_until(lambda: len(workers_of(lone_agent.pid)) >= 1, 10, "a worker")
        start = time.monotonic()
        os.kill(lone_agent.pid, signal.SIGKILL)
        with pytest.raises(HostLostError, match="its agent has ended"):
            gpulayer.get(pending, timeout=5)
        assert time.monotonic() - start < 1.5
        with pytest.raises(HostLostError):
            gpulayer.get(sleep.remote(0), timeout=5)


def test_disconnect_leaves_nothing(tmp_path):
    @gpulayer.remote
    def breed(path):
        command = [sys.executable, "-c", "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"]
        with open(path, "a") as file:
            subprocess.Popen(command, stdout=file, start_new_session=True)

    with gpulayer.connect():
        gpulayer.get(breed.remote(str(tmp_path / "pids")))
        pids = read_pids(tmp_path / "pids", 1)
        below = [child.pid for child in psutil.Process().children(recursive=True)]
    wait_until(lambda: all(map(is_gone, [*pids, *below])), 3, "the end of what the task left behind")


def test_release_of_one_worker_spares_the_daemons_of_another(session, tmp_path):
    """A daemon that forked without a program of its own is still known as the other worker's."""

    @gpulayer.remote
    class Parent:
        def daemonize(self, path):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    with open(path, "a") as file:
                        file.write(f"{os.getpid()}\n")
                    time.sleep(600)
                os._exit(0)
            os.wait()

    first, second = Parent.remote(), Parent.remote()
    gpulayer.get([first.daemonize.remote(str(tmp_path / "first")), second.daemonize.remote(str(tmp_path / "second"))])
    (spared,), (doomed,) = read_pids(tmp_path / "first", 1), read_pids(tmp_path / "second", 1)
    gpulayer.kill(second)
    wait_until(lambda: is_gone(doomed), 5, "the end of the killed actor's daemon")
    assert not is_gone(spared)
    gpulayer.kill(first)
    wait_until(lambda: is_gone(spared), 5, "the end of the other daemon")
