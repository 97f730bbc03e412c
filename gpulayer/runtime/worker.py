"""The worker process: an IO thread that talks to the agent, and the main thread that runs the calls.

The zygote calls `main` in a fresh fork, with its environment, folder and output already in place.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpulayer.errors import GPUlayerError
from gpulayer.resources import Address
from gpulayer.runtime import launch, modules
from gpulayer.runtime import session as sessions
from gpulayer.runtime.executor import Executor
from gpulayer.runtime.io_thread import IOThread
from gpulayer.runtime.session import Session
from gpulayer.runtime.start_mark import StartMark
from gpulayer.wire.context import close_context
from gpulayer.wire.hello import make_hello
from gpulayer.wire.message import Buffer, Kind, Message
from gpulayer.wire.rpc import Dial

STATUS_S = 0.5
CANCEL_AGAIN_S = 0.1
ASK_MODULE_TIMEOUT_S = 30.0


class WorkerProcess:
    """One worker: session, executor, and what joins them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._io = IOThread("gpulayer-io")
        self._session = Session(self._io, bytes.fromhex(config["worker"]), "worker")
        self._executor = Executor(self._reply, StartMark(Path(config["mark"])).write)
        self._told: dict[str, Any] = {}

    def run(self) -> None:
        """Connect, serve calls until the agent says otherwise."""
        session, executor = self._session, self._executor
        session.on_call = executor.submit
        session.on_tell["cancel"] = lambda source, body: self._cancel(source, int(body["number"]))
        session.on_tell["closing"] = lambda *_: os._exit(0)
        session.endpoint.on_host_lost = lambda *_: os._exit(1)  # without its agent a worker has no purpose
        session.waits_in_call = True
        dial = Dial("its agent", f"ipc://{self._config['socket']}")
        hello = make_hello("worker", token=self._config["token"])
        host = self._io.run(session.endpoint.connect(dial, hello))
        session.hosts[host.id] = host
        session.on_wait = executor.set_waiting
        executor.host = host.name
        sessions.set_current(session)
        sys.meta_path.append(modules.Finder(self._ask_module, host.name))
        self._io.post(self._tell_status)
        _use_threads(int(self._config["threads"]))
        try:
            executor.run()
        finally:
            self._flush()

    def _flush(self) -> None:
        """What has been answered leaves before the process ends."""
        self._io.run(self._session.endpoint.close())
        self._io.stop()
        close_context()

    def _reply(self, destination: Address, number: int, kind: Kind, body: dict[str, Any], frames: Sequence[Buffer]) -> None:
        self._io.post(self._session.endpoint.reply, destination, number, body, frames, kind)

    def _cancel(self, source: Address, number: int, again: bool = False) -> None:
        if self._executor.cancel(source, number, again=again):
            self._io.loop.call_later(CANCEL_AGAIN_S, self._cancel, source, number, True)

    def _ask_module(self, name: str) -> tuple[dict[str, Any], bytes] | None:
        caller = self._executor.caller
        if caller is None or self._io.is_current():
            return None
        answer = self._io.run(self._ask(caller, name), ASK_MODULE_TIMEOUT_S)
        if answer.kind is Kind.FAIL:
            return None
        return answer.body, bytes(answer.frames[0]) if answer.frames else b""

    async def _ask(self, caller: Address, name: str) -> Message:
        arrived: asyncio.Future[Message] = self._io.loop.create_future()
        self._session.endpoint.request(caller, Kind.ASK, {"m": "module", "name": name}, (), arrived.set_result)
        return await arrived

    def _tell_status(self) -> None:
        status = dict(self._executor.status)
        if status != self._told:
            self._told = status
            self._session.endpoint.tell(self._session.endpoint.home, "status", **status)
        self._io.loop.call_later(STATUS_S, self._tell_status)


def _use_threads(threads: int) -> None:
    """torch was imported before the fork, and took its thread count from there."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def main(config: dict[str, Any]) -> int:
    """Be a worker; returns the exit code."""
    launch.restore(os.environ)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.curdir)]
    sys.argv = [""]
    try:
        WorkerProcess(config).run()
    except GPUlayerError as error:
        print(f"gpulayer: the worker cannot reach its agent: {error}", file=sys.stderr)
        return 1
    return 0
