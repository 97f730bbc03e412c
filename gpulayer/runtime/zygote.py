"""The process that workers are forked from, and the one that makes sure that nothing of theirs stays behind.

    python -m gpulayer.runtime.zygote FD        FD: one end of a stream socket pair, the agent holds the other

It imports what workers need and runs none of it: one thread, no thread pool, no CUDA context, no ZeroMQ context, so that
a fork is a clean copy and takes milliseconds. It is the parent of all workers and the reaper of their orphans (a
subreaper: a grandchild whose parent dies becomes its child, even after `setsid`), so when the agent goes, however it
goes, the socket closes and the zygote kills everything below itself.

Messages (see runtime/inbox.py) in: fork (with stdout and stderr as file descriptors), kill, preload.
Out: pid, exit (with the wait status), error.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import selectors
import signal
import socket
import sys
import threading
import warnings
from typing import Any, NoReturn

import psutil

from gpulayer.runtime import worker
from gpulayer.runtime.inbox import MARKER, Inbox, send_message
from gpulayer.runtime.prctl import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl


class Zygote:
    """Forks workers on request, reports their exits, sweeps up after them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._inbox = Inbox(control)
        self._workers: dict[int, str] = {}  # pid -> worker id
        self._wakeup = socket.socketpair()
        for end in self._wakeup:
            end.setblocking(False)

    def run(self) -> None:
        """Serve until the agent goes, then leave nothing behind."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup[0], selectors.EVENT_READ)
            while self._serve(selector):
                pass
        self._end_everything()

    def _serve(self, selector: selectors.BaseSelector) -> bool:
        for key, _ in selector.select():
            if key.fileobj is self._control:
                messages = self._inbox.read()
                if messages is None:
                    return False
                for message in messages:
                    self._handle(message)
            else:
                _drain(self._wakeup[0])
                self._reap()
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "fork":
            stdout, stderr = self._inbox.fds[:2]
            del self._inbox.fds[:2]
            self._fork(message["config"], stdout, stderr)
            os.close(stdout)
            os.close(stderr)
        elif message["op"] == "kill":
            for pid, worker_id in self._workers.items():
                if worker_id == message["worker"]:
                    os.kill(pid, signal.SIGKILL)
        elif message["op"] == "preload":
            preload(message["modules"])

    def _fork(self, config: dict[str, Any], stdout: int, stderr: int) -> None:
        if config.get("preload"):
            preload(config["preload"])
        if threading.active_count() > 1:  # the thread would be missing in the fork, with the locks that it holds
            text = f"a preloaded module has started a thread, so nothing can be forked; preloaded: {config.get('preload')}"
            self._tell({"error": text, "worker": config["worker"]})
            return
        parent = os.getpid()
        with warnings.catch_warnings():  # numpy's idle BLAS threads have fork handlers of their own
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:
                self._tell({"error": f"fork: {error.strerror}", "worker": config["worker"]})
                return
        if pid == 0:
            self._become_worker(config, stdout, stderr, parent)
        self._workers[pid] = config["worker"]
        self._tell({"pid": pid, "worker": config["worker"]})

    def _become_worker(self, config: dict[str, Any], stdout: int, stderr: int, parent: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, it would be so in all that user code starts
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.setsid()
            for sock in (self._control, *self._wakeup):
                sock.close()
            _become_process(config, stdout, stderr)
            code = worker.main(config)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, the child ends here and never runs the zygote's loop
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            _flush_and_exit(code)
        raise AssertionError("unreachable")

    def _reap(self) -> None:
        ended: list[tuple[str, int]] = []
        reaped = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            reaped = True
            worker_id = self._workers.pop(pid, None)
            if worker_id is not None:
                _kill_group(pid)
                ended.append((worker_id, status))
        for worker_id, status in ended:
            self._tell({"exit": worker_id, "status": status})
        if reaped:  # also after an orphan's end: what it had started is ours now
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """End what dead workers left: children of ours that are no workers and carry no living worker's marker."""
        living = set(self._workers.values())
        for child in psutil.Process().children():
            if child.pid not in self._workers and _marker(child) not in living:
                _kill_tree(child)

    def _end_everything(self) -> None:
        for pid in self._workers:
            _kill_group(pid)
        while True:
            for child in psutil.Process().children(recursive=True):
                _kill(child)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            send_message(self._control, message)
        except ConnectionError:
            return  # the agent has gone: the next read says so, and ends everything


def preload(modules: list[str]) -> None:
    """Import what workers will want; a module that is not installed is not the zygote's problem."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken package is its user's business, not the end of all workers
            print(f"gpulayer: {name} is not preloaded: {error}", file=sys.stderr)


def _become_process(config: dict[str, Any], stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    for fd in (null, stdout, stderr):
        os.close(fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    _mark(config["worker"])
    os.environ.update(config["env"])
    os.chdir(config["cwd"])
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _mark(worker_id: str) -> None:
    """Put the marker where the kernel shows it (`/proc/PID/environ`) for this process and all that it forks or starts.

    The kernel shows the memory in which the zygote got its environment, so the placeholder there is overwritten in place.
    """
    placeholder = os.environ.get(MARKER, "")
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(MARKER.encode())
    if place and len(placeholder) == len(worker_id):
        ctypes.memmove(place, worker_id.encode(), len(worker_id))
    os.environ[MARKER] = worker_id


def _flush_and_exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the pipe's reader has gone: there is nobody left to tell
    os._exit(code)


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return


def _marker(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARKER)
    except (psutil.Error, OSError):
        return None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_tree(process: psutil.Process) -> None:
    try:
        below = process.children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for one in (process, *below):
        _kill(one)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return


def main() -> None:
    """Serve on the file descriptor given as the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    Zygote(control).run()


if __name__ == "__main__":
    main()
