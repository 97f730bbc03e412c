"""Worker processes of one agent: started through the zygote, their output read, their exits seen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gpulayer.errors import WorkerStartError
from gpulayer.jobs.logs import OutputLog
from gpulayer.jobs.spec import describe_exit
from gpulayer.resources import Address, new_id
from gpulayer.runtime.inbox import MARKER, PLACEHOLDER, Inbox, send_message
from gpulayer.runtime.start_mark import StartMark

START_TIMEOUT_S = 60.0
REAP_S = 0.5
EXIT_GRACE_S = 0.05
"""How long a dead worker's last frames may still be on their way through its socket before its calls fail."""

_READ_BYTES = 256 * 1024


@dataclass(slots=True)
class Worker:
    """One worker process as its agent sees it."""

    id: bytes
    token: str
    label: str
    ready: asyncio.Future[None]
    ended: asyncio.Future[None]  # its process has ended
    gone: asyncio.Future[None]  # ... and its output has been read
    folder: Path
    mark_path: Path  # where it notes which call it starts
    mark: StartMark | None = None
    started_last: tuple[Address, int] | None = None  # (caller, number), known once it has ended
    pid: int = 0
    has_said_hello: bool = False
    cause: str = ""  # how it ended, "" while it lives
    kill_reason: str = ""
    started_s: float = field(default_factory=time.time)
    logs: dict[str, OutputLog] = field(default_factory=dict[str, OutputLog])
    status: dict[str, Any] = field(default_factory=dict[str, Any])  # what it last said of itself
    open_pipes: int = 2
    pipes: dict[str, int] = field(default_factory=dict[str, int])  # the ends that are read here
    paused: bool = False


OnLines = Callable[[Worker, str, list[str]], None]
OnExit = Callable[[Worker], None]


class Pool:
    """Starts workers and notices their ends. All methods are for the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, folder: Path, socket_path: str, on_lines: OnLines, on_exit: OnExit
    ) -> None:
        self.workers: dict[bytes, Worker] = {}
        self._loop = loop
        self._folder = folder
        self._socket_path = socket_path
        self._on_lines = on_lines
        self._on_exit = on_exit
        self._preloaded: list[str] = []
        self._start_zygote()

    def _start_zygote(self) -> None:
        self._has_forked = False
        self._zygote_ended = False
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "gpulayer.runtime.zygote", str(theirs.fileno())]
            env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", MARKER: PLACEHOLDER}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL, env=env
            )
        self._control.setblocking(False)
        self._inbox = Inbox(self._control)
        self._loop.add_reader(self._control, self._read_zygote)

    def preload(self, modules: list[str]) -> None:
        """Let the zygote import `modules` now, so that workers have them at once."""
        self._preloaded = modules
        self._send({"op": "preload", "modules": modules})

    def fork(self, label: str, env: dict[str, str], threads: int, modules: list[str]) -> Worker:
        """Ask the zygote for a worker; `wait_ready` says whether it came up. Raises `WorkerStartError` if there is no zygote."""
        if self._zygote_ended:
            self._process.wait()  # its socket has closed, so it has ended
            self._start_zygote()
            self.preload(self._preloaded)
        worker_id = new_id()
        folder = self._folder / worker_id.hex()
        ready, ended, gone = (self._loop.create_future() for _ in range(3))
        mark = folder.with_suffix(".mark")
        worker = Worker(worker_id, secrets.token_hex(16), label, ready, ended, gone, folder, mark)
        config = {
            "worker": worker_id.hex(),
            "token": worker.token,
            "socket": self._socket_path,
            "env": env,
            "threads": threads,
            "cwd": str(folder),
            "mark": str(worker.mark_path),
            "preload": modules,
        }
        try:
            folder.mkdir(mode=0o700, parents=True)
            worker.mark = StartMark.create(worker.mark_path)
            pipes = self._pipes(worker)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                mark.unlink()
            raise WorkerStartError(f"a worker for {label} cannot start: {error.strerror} (in {self._folder})") from None
        self._has_forked = True
        self._send({"op": "fork", "config": config}, pipes)
        self.workers[worker_id] = worker
        return worker

    async def wait_ready(self, worker: Worker) -> None:
        """Wait until a worker has said hello. Raises `WorkerStartError` with its stderr if it ends or takes too long."""
        done, _ = await asyncio.wait({worker.ready}, timeout=START_TIMEOUT_S)
        if not done:
            text = f"a worker for {worker.label} did not start within {START_TIMEOUT_S:g} s"
            self.kill(worker, text)
            raise WorkerStartError(text, stderr=self.stderr(worker))
        worker.ready.result()

    def welcome(self, worker_id: bytes, token: str) -> Worker | None:
        """The worker that says hello with its token, or None if there is no such worker."""
        worker = self.workers.get(worker_id)
        if worker is None or not secrets.compare_digest(worker.token.encode(), token.encode("utf-8", "replace")):
            return None
        worker.has_said_hello = True
        _check_ready(worker)
        return worker

    def kill(self, worker: Worker, reason: str) -> None:
        """End a worker and everything it started."""
        if worker.id in self.workers and not worker.cause:
            worker.kill_reason = worker.kill_reason or reason
            with contextlib.suppress(WorkerStartError):  # no zygote, no worker: its end is about to be read
                self._send({"op": "kill", "worker": worker.id.hex()})

    @staticmethod
    def stderr(worker: Worker) -> list[str]:
        """The last lines of its stderr."""
        return worker.logs["stderr"].tail if "stderr" in worker.logs else []

    async def close(self, timeout_s: float = 5.0) -> None:
        """End every worker, and the zygote after them."""
        for worker in list(self.workers.values()):
            worker.kill_reason = worker.kill_reason or "its agent is shutting down"
            if not worker.ready.done():
                self._ended(worker, worker.kill_reason)
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
        self._control.close()  # the zygote reads the end of the stream, and sweeps
        if not self._has_forked:  # then there is nothing to sweep, and it may be busy importing for seconds yet
            self._process.terminate()
        try:
            await self._loop.run_in_executor(None, self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            self._control.setblocking(True)  # requests are small: the kernel's buffer takes them unless the zygote is stuck
            send_message(self._control, message, fds)
        except OSError as error:
            raise WorkerStartError(f"the process that workers are forked from has ended ({error}); try again") from None
        finally:
            if self._control.fileno() >= 0:
                self._control.setblocking(False)
            for fd in fds:
                os.close(fd)

    def _pipes(self, worker: Worker) -> tuple[int, int]:
        writers: list[int] = []
        for stream in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            worker.logs[stream] = OutputLog()
            worker.pipes[stream] = reader
            self._loop.add_reader(reader, self._read_pipe, worker, stream, reader)
            writers.append(writer)
        return writers[0], writers[1]

    def _read_pipe(self, worker: Worker, stream: str, fd: int) -> None:
        log = worker.logs[stream]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        lines = log.feed(data) if data else log.close()
        if lines:
            self._on_lines(worker, stream, lines)
        if not data:
            self._loop.remove_reader(fd)
            os.close(fd)
            worker.pipes.pop(stream, None)
            worker.open_pipes -= 1
            _check_gone(worker)

    def pause_output(self, worker: Worker, paused: bool) -> None:
        """Stop or go on reading what a worker prints: while nobody takes it, the worker waits in its `print`."""
        if worker.paused != paused:
            worker.paused = paused
            for stream, fd in worker.pipes.items():
                if paused:
                    self._loop.remove_reader(fd)
                else:
                    self._loop.add_reader(fd, self._read_pipe, worker, stream, fd)

    def _read_zygote(self) -> None:
        messages = self._inbox.read()
        if messages is None:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._zygote_ended = True
            workers = list(self.workers.values())
            sweep({worker.id.hex() for worker in workers}, {worker.pid for worker in workers})
            for worker in workers:
                self._ended(worker, "its zygote ended")
            self._loop.call_later(REAP_S, reap_adopted, self._process.pid)
            return
        for message in messages:
            worker = self.workers.get(bytes.fromhex(message.get("worker") or message.get("exit", "")))
            if worker is None:
                continue
            if "pid" in message:
                worker.pid = message["pid"]
                _check_ready(worker)
            elif "error" in message:
                self._ended(worker, message["error"])
            else:
                cause = worker.kill_reason or describe_exit(message["status"])
                self._loop.call_later(EXIT_GRACE_S, self._ended, worker, cause)

    def _ended(self, worker: Worker, cause: str) -> None:
        if self.workers.pop(worker.id, None) is None:
            return
        worker.cause = cause
        self.pause_output(worker, False)  # what it printed last is little, and its pipes must be read to their end
        if not worker.ready.done():
            error = WorkerStartError(f"a worker for {worker.label} ended while starting: {cause}", stderr=self.stderr(worker))
            worker.ready.set_exception(error)
            worker.ready.exception()
        worker.started_last = StartMark.take(worker.mark_path)
        shutil.rmtree(worker.folder, ignore_errors=True)
        self._on_exit(worker)
        worker.ended.set_result(None)
        _check_gone(worker)


def sweep(markers: set[str], pids: set[int]) -> None:
    """Kill what ended workers left below this process: whatever carries one of their markers or is in one of their sessions."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in pids or process.environ().get(MARKER) in markers:
                process.kill()


def reap_adopted(own_pid: int) -> None:
    """Take note of ended processes that became this one's children when their parent was killed."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid != own_pid and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _check_ready(worker: Worker) -> None:
    """Its hello can overtake the zygote's word of its pid."""
    if worker.has_said_hello and worker.pid and not worker.ready.done():
        worker.ready.set_result(None)


def _check_gone(worker: Worker) -> None:
    if worker.cause and worker.open_pipes == 0 and not worker.gone.done():
        worker.gone.set_result(None)
