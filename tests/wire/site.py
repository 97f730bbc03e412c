"""The wire side of an agent, with nothing behind it, and the loop that tests run on: real sockets, real authentication."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpulayer.errors import GPUlayerError, from_facts
from gpulayer.resources import AGENT_PEER, Address, Host, new_id
from gpulayer.wire import keys, security
from gpulayer.wire.authenticator import Authenticator
from gpulayer.wire.channel import Lane
from gpulayer.wire.context import close_context
from gpulayer.wire.courier import Courier
from gpulayer.wire.message import Kind, Message, make_route, read_route
from gpulayer.wire.rpc import BULK, CONTROL, NOWHERE, Dial, Endpoint


class Runner:
    """Runs coroutines on a loop of its own. What the loop reports as wrong fails the test, unless it is taken from `problems`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.problems: list[str] = []
        loop.set_exception_handler(lambda _, context: self.problems.append(f"{context['message']} {context.get('exception')}"))

    def __call__(self, work: Coroutine[Any, Any, Any], timeout_s: float = 20.0) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    def close(self) -> None:
        """Cancel what still runs, close the loop and the context, and tell what went wrong."""
        self.loop.run_until_complete(_cancel(asyncio.all_tasks(self.loop)))
        self.loop.close()
        gc.collect()  # sockets that nobody holds close now, not in another test
        close_context()
        assert self.problems == []


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.002)


class Site:
    """What stands at the agent's end of a wire: greets, forwards, answers pings, and asks the test about the rest."""

    def __init__(self, loop: asyncio.AbstractEventLoop, home: Path, name: str) -> None:
        self.loop = loop
        self.home = home
        self.id = new_id()
        self.name = name
        self.address = Address(self.id)
        self.greeting: Kind | None = Kind.WELCOME
        self.rows: list[list[str]] = []
        self.hellos: list[dict[str, Any]] = []
        self.asked: list[tuple[Address, Message]] = []
        self.forwards_bulk = True
        self.held_bulk: list[list[Any]] = []
        self.dial: Dial
        self._lane: Lane | None = None
        self._authenticator: Authenticator | None = None
        self._courier = Courier(loop, self._transmit, self._deliver)

    def listen_tcp(self, port: int = 0) -> Site:
        """Serve tcp on loopback, with CURVE; the keys of this home may come in."""
        identity = keys.load_or_make_identity(self.home)
        self._authenticator = Authenticator(self.loop, keys.AllowList(self.home))
        self._authenticator.start()
        socket = security.server_socket(f"tcp://127.0.0.1:{port}", identity, authenticator=self._authenticator)
        endpoint = f"tcp://127.0.0.1:{security.bound_port(socket)}"
        self.dial = Dial(self.name, endpoint, identity, identity.public)
        return self._serve(socket)

    def listen_ipc(self, folder: Path) -> Site:
        """Serve an ipc path of this user."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket = security.local_server_socket(folder / f"{self.name}.sock")
        self.dial = Dial(self.name, f"ipc://{folder / self.name}.sock")
        return self._serve(socket)

    def _serve(self, socket: zmq.Socket[bytes]) -> Site:
        self._lane = Lane(socket, self.loop, self._take)
        return self

    def close(self) -> None:
        """Stop at once, with nothing said."""
        if self._lane is not None:
            self._lane.close()
        if self._authenticator is not None:
            self._authenticator.stop()

    def send(self, destination: Address, message: Message) -> None:
        """Send a message of the agent's own."""
        self._courier.send(destination, message)

    def send_raw(self, peer: bytes, *frames: bytes, lane: bytes = CONTROL) -> bool:
        """Send frames as they are; False if that lane of the peer is not connected (yet)."""
        assert self._lane is not None
        return self._lane.send([lane + peer, *frames])

    def refuse(self, peer: bytes) -> None:
        """What an agent says to a process that it does not know."""
        self.send(Address(self.id, peer), Message(Kind.REFUSED, 0, {"rows": [["first message", "TELL", "HELLO"]]}))

    def _take(self, frames: list[zmq.Frame]) -> None:
        identity, route, rest = frames[0].bytes, frames[1].buffer, frames[2:]
        destination, source = read_route(route)[0], Address(self.id, identity[1:])
        if destination.peer == AGENT_PEER and destination.host in (self.id, NOWHERE.host):
            self._courier.receive(source, rest)
            return
        frames = [identity[:1] + destination.peer, make_route(destination, source), *rest]
        if identity[:1] == BULK and not self.forwards_bulk:
            self.held_bulk.append(frames)
        else:
            self._forward(frames)

    def release_bulk(self) -> None:
        """Forward what was held."""
        self.forwards_bulk = True
        while self.held_bulk:
            self._forward(self.held_bulk.pop(0))

    def _forward(self, frames: list[Any]) -> None:
        assert self._lane is not None
        if not self._lane.send(frames, copy=False) and frames[0][:1] == BULK:  # it may connect after the control lane
            self.loop.call_later(0.005, self._forward, frames)

    def _transmit(self, destination: Address, bulk: bool, frames: list[Any]) -> None:
        assert self._lane is not None
        self._lane.send([(BULK if bulk else CONTROL) + destination.peer, make_route(destination, self.address), *frames[1:]])

    def _deliver(self, source: Address, message: Message) -> None:
        if message.kind is Kind.HELLO:
            self.hellos.append(message.body)
            if self.greeting is not None:
                host = Host(self.id, self.name, self.dial.endpoint.removeprefix("tcp://"), 4.0, 1 << 30)
                self.send(source, Message(self.greeting, 0, {"host": host.to_plain(), "rows": self.rows}))
        elif message.kind is Kind.TELL and message.body["m"] == "ping":
            self.send(source, Message(Kind.TELL, 0, {"m": "pong", "cpus_free": 3.0}))
        else:
            self.asked.append((source, message))


def listen(site: Site, how: str, folder: Path) -> Site:
    """Let a site serve tcp or ipc."""
    return site.listen_tcp() if how == "tcp" else site.listen_ipc(folder / "run")


over_both = pytest.mark.parametrize("how", ["tcp", "ipc"])


def address_at(site: Site, endpoint: Endpoint) -> Address:
    """How others reach an endpoint through a site."""
    return Address(site.id, endpoint.peer)


def echo(endpoint: Endpoint) -> Callable[[Address, Message], None]:
    """An `on_message` that answers with what it was asked."""
    return lambda source, message: endpoint.reply(source, message.id, message.body, message.frames)


def note(answers: list[Message]) -> Callable[[Message], None]:
    """An `on_reply` that keeps the answer."""
    return answers.append


def error_of(message: Message) -> GPUlayerError:
    """The error that a FAIL carries."""
    assert message.kind is Kind.FAIL
    return from_facts(message.body)
