"""Agents for tests: in this process, to look inside, or as a process of its own, to kill; and clients made by hand."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import zmq

from gpulayer.agent.agent import Agent, AgentOptions
from gpulayer.config import Settings
from gpulayer.resources import AGENT_PEER, Address, new_id
from gpulayer.wire.context import close_context
from gpulayer.wire.hello import make_hello
from gpulayer.wire.keys import KeyPair
from gpulayer.wire.message import Kind, Message, encode, make_route, pack, read_route, unpack
from tests.conftest import ROOT, is_gone, wait_until

NOWHERE = Address(bytes(8))


class Inside:
    """An agent on a loop in another thread of this process."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.agent = self.do(lambda: Agent(Settings.from_environment(), AgentOptions(**options)))
        self.wait(self.agent.start())
        self.port = self.agent.ready_line()["port"]
        self.socket = self.agent.ready_line()["socket"]
        self.address = Address(self.agent.id)

    def wait(self, work: Any) -> Any:
        """Run a coroutine in the agent's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def do(self, function: Callable[[], Any]) -> Any:
        """Run a function in the agent's loop."""

        async def call() -> Any:
            return function()

        return self.wait(call())

    def stop(self) -> None:
        if not self.agent.stopped.is_set():
            self.wait(self.agent.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        close_context()


@contextmanager
def inside(**options: Any) -> Iterator[Inside]:
    """An agent in this process; nothing may have gone wrong in its loop."""
    host = Inside(**options)
    try:
        yield host
    finally:
        host.stop()
    assert host.errors == []


class Client:
    """A DEALER without any of our own code between it and the agent. Its context is its own, so no key is implied."""

    def __init__(
        self,
        endpoint: str,
        identity: KeyPair | None = None,
        server_key: str = "",
        *,
        peer: bytes | None = None,
        lane: bytes = b"C",
    ) -> None:
        self.peer = new_id() if peer is None else peer
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, lane + self.peer)
        self.socket.set(zmq.LINGER, 0)
        if identity is not None:
            self.socket.set(zmq.CURVE_PUBLICKEY, identity.public.encode())
            self.socket.set(zmq.CURVE_SECRETKEY, identity.secret.encode())
            self.socket.set(zmq.CURVE_SERVERKEY, server_key.encode())
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.socket.connect(endpoint)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(0)

    def handshake(self, timeout_s: float = 5.0) -> bool:
        """Whether the connection came up rather than be dropped."""
        assert self._monitor.poll(int(timeout_s * 1000)), "the handshake neither failed nor succeeded"
        event, _ = self._monitor.recv_multipart()
        return int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def send(self, *messages: Message, to: Address = NOWHERE, source: Address = NOWHERE) -> None:
        self.raw(make_route(to, source), pack([encode(message) for message in messages]))

    def raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = 5.0) -> list[Message]:
        """The messages of the next frame set, [] if none comes."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return []
        frames = self.socket.recv_multipart()
        read_route(frames[0])
        return unpack(frames[1])

    def hello(self, kind: str = "driver", timeout_s: float = 5.0, **more: Any) -> Message | None:
        """Say hello; the agent's answer."""
        self.send(Message(Kind.HELLO, 0, {**make_hello(kind), **more}))
        return next(iter(self.receive(timeout_s)), None)

    def ask(self, method: Any, *, to: Address | None = None, number: int = 1, **params: Any) -> Message | None:
        """Ask the agent; its REPLY or FAIL."""
        self.send(Message(Kind.ASK, number, {"m": method, **params}), to=to or NOWHERE)
        while messages := self.receive():
            for message in messages:
                if message.kind in (Kind.REPLY, Kind.FAIL, Kind.REFUSED) and message.id in (number, 0):
                    return message
        return None


class Outside:
    """An agent as a process of its own."""

    def __init__(self, *arguments: str, prefix: tuple[str, ...] = (), **env: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        command = [*prefix, sys.executable, "-m", "gpulayer.agent", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the agent did not start: {self.process.communicate()[1]}"
        self.ready = json.loads(line)
        self.pid: int = self.ready["pid"]
        self.port: int = self.ready["port"]

    def below(self) -> list[int]:
        """Everything it has started: the zygote and its workers."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def end(self) -> str:
        """Stop it; returns what it logged."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.communicate()[1]


@contextmanager
def outside(*arguments: str, **env: str) -> Iterator[Outside]:
    """An agent process, gone at the end with all that it started."""
    agent = Outside(*arguments, **env)
    try:
        yield agent
    finally:
        left = agent.below() if not is_gone(agent.pid) else []
        agent.end()
        wait_until(lambda: all(map(is_gone, left)), 10, "the end of all that the agent started")


def workers_of(agent: int) -> list[int]:
    """Pids of an agent's workers: children of its zygote that lead a session (what they left to the zygote does not)."""
    children = [child for child in psutil.Process(agent).children() if not is_gone(child.pid)]
    zygotes = [child for child in children if "gpulayer.runtime.zygote" in child.cmdline()]
    return [child.pid for zygote in zygotes for child in zygote.children() if os.getsid(child.pid) == child.pid]


def read_pids(path: Path, count: int, timeout_s: float = 30.0) -> list[int]:
    """Wait until `count` pids, one a line, are in a file."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, timeout_s, f"{count} pids in {path}")
    return [int(line) for line in path.read_text().split()]


__all__ = ["AGENT_PEER", "NOWHERE", "Client", "Inside", "Outside", "inside", "outside", "read_pids", "workers_of"]
