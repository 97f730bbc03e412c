"""The zygote, spoken to over its socket as an agent does."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpulayer.jobs.spec import describe_exit
from gpulayer.runtime.inbox import MARKER, PLACEHOLDER, Inbox, send_message
from gpulayer.runtime.start_mark import StartMark
from tests.conftest import ROOT, is_gone, wait_until

IDS = [f"{number:016x}" for number in range(1, 9)]


class Agent:
    """The other end of a zygote's socket; workers connect to a listener that only holds on to them."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "s"))
        self.listener.listen()
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpulayer.runtime.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), MARKER: PLACEHOLDER, **env},
            )
        self.control.settimeout(20)
        self.inbox = Inbox(self.control)
        self.messages: list[dict[str, Any]] = []
        self.outputs: dict[str, tuple[int, int]] = {}

    def fork(self, worker: str, preload: tuple[str, ...] = (), **env: str) -> None:
        """Ask for a worker whose output can be read with `output`."""
        (self.folder / worker).mkdir(exist_ok=True)
        mark = self.folder / f"{worker}.mark"
        StartMark.create(mark)
        config = {"worker": worker, "token": "t", "socket": str(self.folder / "s"), "env": env, "threads": 1, "mark": str(mark)}
        out, err = os.pipe(), os.pipe()
        message = {"op": "fork", "config": {**config, "cwd": str(self.folder / worker), "preload": list(preload)}}
        send_message(self.control, message, (out[1], err[1]))
        for fd in (out[1], err[1]):
            os.close(fd)
        self.outputs[worker] = (out[0], err[0])

    def wait(self, worker: str, key: str) -> dict[str, Any]:
        """The next message about a worker with `key` in it."""
        while True:
            for message in self.messages:
                if worker in (message.get("worker"), message.get("exit")) and key in message:
                    self.messages.remove(message)
                    return message
            arrived = self.inbox.read()
            assert arrived is not None, f"the zygote has ended: {self.process.communicate()[1]}"
            self.messages += arrived

    def pid(self, worker: str) -> int:
        return self.wait(worker, "pid")["pid"]

    def kill(self, worker: str) -> None:
        send_message(self.control, {"op": "kill", "worker": worker})

    def end(self) -> str:
        """Go away, as an agent does; what the zygote printed."""
        self.control.close()
        self.listener.close()
        for fd in (fd for pair in self.outputs.values() for fd in pair):
            os.close(fd)
        return self.process.communicate(timeout=10)[1]


@pytest.fixture
def agent(own_folders) -> Iterator[Agent]:
    agent = Agent(own_folders)
    yield agent
    if agent.process.returncode is None:
        assert agent.end() == ""


def test_fork_tells_the_pid_and_kill_the_exit(agent):
    agent.fork(IDS[0])
    pid = agent.pid(IDS[0])
    assert psutil.Process(pid).ppid() == agent.process.pid
    agent.kill(IDS[0])
    assert describe_exit(agent.wait(IDS[0], "exit")["status"]).startswith("killed by SIGKILL")
    assert is_gone(pid)


def test_worker_is_marked_where_the_kernel_shows_it(agent):
    agent.fork(IDS[0], SOMETHING="x")
    environ = psutil.Process(agent.pid(IDS[0])).environ
    wait_until(lambda: environ()[MARKER] == IDS[0], 5, "the mark")


def test_many_forks_at_once_keep_their_pipes_apart(agent):
    """A worker that held its siblings' pipes would keep their output open after their end."""
    for worker in IDS:
        agent.fork(worker)
    pids = [agent.pid(worker) for worker in IDS]
    assert len(set(pids)) == len(IDS)
    connections = [agent.listener.accept()[0] for _ in IDS]
    for worker in IDS[:-1]:
        agent.kill(worker)
        agent.wait(worker, "exit")
        for fd in agent.outputs[worker]:
            assert os.read(fd, 10) == b"", "its end can be read while its siblings live"
    assert not is_gone(pids[-1])
    for connection in connections:
        connection.close()


def test_messages_in_pieces_are_put_together(agent):
    data = json.dumps({"op": "preload", "modules": ["json"] * 20_000 + ["a_module_that_nobody_has"]}).encode()
    data = struct.pack(">I", len(data)) + data
    for start in range(0, len(data), 50_000):
        agent.control.sendall(data[start : start + 50_000])
    agent.fork(IDS[0])
    agent.pid(IDS[0])
    assert agent.end() == "gpulayer: a_module_that_nobody_has is not preloaded: No module named 'a_module_that_nobody_has'\n"


def test_kill_of_an_unknown_worker_does_nothing(agent):
    agent.kill("nobody")
    agent.fork(IDS[0])
    agent.pid(IDS[0])


@pytest.mark.parametrize("body", ["raise OSError('libcuda.so is broken')", "raise SystemExit(3)", "1 / 0"])
def test_module_that_fails_to_load_is_said_and_skipped(own_folders, body):
    (own_folders / "broken.py").write_text(body)
    agent = Agent(own_folders, PYTHONPATH=f"{ROOT}:{own_folders}")
    agent.fork(IDS[0], preload=("broken", "colorsys"))
    assert not is_gone(agent.pid(IDS[0]))
    assert "gpulayer: broken is not preloaded" in agent.end()


def test_module_that_starts_a_thread_fails_the_worker_and_not_the_zygote(own_folders):
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    (own_folders / "threaded.py").write_text(source)
    agent = Agent(own_folders, PYTHONPATH=f"{ROOT}:{own_folders}")
    agent.fork(IDS[0])
    pid = agent.pid(IDS[0])
    agent.fork(IDS[1], preload=("threaded",))
    assert "threaded" in agent.wait(IDS[1], "error")["error"]
    assert not is_gone(pid)
    agent.end()
    assert is_gone(pid)


def test_interrupt_from_the_terminal_leaves_zygote_and_workers_alone(agent):
    agent.fork(IDS[0])
    first = agent.pid(IDS[0])
    os.kill(agent.process.pid, signal.SIGINT)
    agent.fork(IDS[1])
    pid = agent.pid(IDS[1])
    assert not is_gone(first)
    wait_until(lambda: os.getsid(pid) == pid, 5, "the worker to be set up")
    assert os.getsid(pid) == pid != os.getsid(agent.process.pid)


def signals(pid: int, which: str) -> set[int]:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(which))
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def test_worker_has_the_signals_of_a_fresh_python(agent):
    """What is ignored stays so in every program that user code starts."""
    agent.fork(IDS[0])
    pid = agent.pid(IDS[0])
    wait_until(lambda: signal.SIGINT in signals(pid, "SigCgt"), 5, "a handler of SIGINT")
    assert signals(pid, "SigIgn") <= {signal.SIGPIPE, signal.SIGXFSZ} | signals(os.getpid(), "SigIgn")  # nohup's, say
    assert signals(pid, "SigBlk") == set()


def test_end_of_the_agent_ends_everything(agent):
    for worker in IDS[:3]:
        agent.fork(worker)
    pids = [agent.pid(worker) for worker in IDS[:3]]
    os.kill(pids[0], signal.SIGSTOP)
    assert agent.end() == ""
    assert all(map(is_gone, pids))
    assert agent.process.returncode == 0


def test_death_of_the_zygote_ends_its_workers(agent):
    agent.fork(IDS[0])
    pid = agent.pid(IDS[0])
    wait_until(lambda: os.getsid(pid) == pid, 5, "the worker to be set up")
    agent.process.kill()
    wait_until(lambda: is_gone(pid), 2, "the end of the worker")
    agent.end()


def test_zygote_runs_one_thread_and_holds_no_socket_but_its_own(agent):
    agent.fork(IDS[0], preload=("torch",))
    agent.pid(IDS[0])
    process = psutil.Process(agent.process.pid)
    assert process.num_threads() == 1
    assert process.net_connections("inet") == []
