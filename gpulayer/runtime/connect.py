"""connect() and disconnect(): which agents, how to reach them, and the embedded ones that end with this program."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

from gpulayer.config import Settings, parse_address, read_hosts_file
from gpulayer.errors import ConnectError, NotConnectedError, UsageError
from gpulayer.resources import DEFAULT_PORT, Address, Host, new_id
from gpulayer.runtime import launch, records
from gpulayer.runtime import session as sessions
from gpulayer.runtime.io_thread import IOThread
from gpulayer.runtime.session import Session
from gpulayer.scheduler.cluster import Cluster
from gpulayer.wire import keys
from gpulayer.wire.hello import make_hello
from gpulayer.wire.rpc import Dial

EMBEDDED_START_S = 30.0
GOODBYE_S = 5.0

_mutex = threading.RLock()
_embedded: list[subprocess.Popen[bytes]] = []


class Connection:
    """What `connect` returns: usable as a context manager that disconnects at its end."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The connected hosts."""
        return tuple(self._session.hosts.values())

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        disconnect()

    def __repr__(self) -> str:
        return f"Connection({', '.join(host.name for host in self.hosts)})"


def connect(hosts: str | Sequence[str] | None = None, *, local: int | None = None, timeout: float = 10.0) -> Connection:
    """Connect this program to hosts; `timeout` is in seconds, for each host.

    connect()                       this machine: its running agent, else an embedded one that ends with the program
    connect(local=2)                two embedded agents on this machine, to try multi-host code
    connect(["gpu1", "10.0.0.7:7770"])   agents that run already (`gpulayer up`)
    connect("lab")                  a named list in the hosts file; GPULAYER_HOSTS is used when nothing is given

    Raises `ConnectError` (or its kinds `AuthError`, `VersionMismatchError`) naming the host and what to type next.
    """
    with _mutex:
        if sessions.current_or_none() is not None:
            raise UsageError("this program is connected already; call gpulayer.disconnect() first")
        settings = Settings.from_environment()
        targets = _targets(settings, hosts, local)
        io = IOThread("gpulayer-io")
        session = Session(io, new_id(), "driver")
        try:
            if local is not None:
                dials = _start_local(settings, local)
            else:
                dials = [_this_machine(settings)] if targets is None else [_dial(settings, target) for target in targets]
            io.run(_shake_hands(session, dials, timeout))
        except BaseException:
            _tear_down(session)
            raise
        session.on_tell["log"] = lambda source, body: session.output_context.run(print_lines, source, body)
        session.on_tell["closing"] = lambda source, _: session.endpoint.lose(source.host, "its agent is shutting down")
        sessions.set_current(session)
        return Connection(session)


def disconnect() -> None:
    """End the session: its workers end, embedded agents too. Without a session it does nothing."""
    with _mutex:
        session = sessions.current_or_none()
        if session is None:
            return
        if session.role != "driver":
            raise UsageError("disconnect() inside a worker would end the worker's own session; return from the call instead")
        sessions.set_current(None)
        _tear_down(session)


def cluster() -> Cluster:
    """The connected hosts, their devices and links. Connects to this machine if there is no session."""
    return sessions.current().cluster()


def print_lines(source: Address, body: dict[str, Any]) -> None:
    """Show what a worker printed, with who said it in front."""
    stream = sys.stderr if body["stream"] == "stderr" else sys.stdout
    prefix = f"({body['label']} pid={body['pid']}, {body['host']}) "
    try:
        stream.write("".join(f"{prefix}{line}\n" for line in body["lines"]))
        stream.flush()
    except (OSError, ValueError):
        return  # the program has closed its own output: there is nobody to show it to


def _targets(settings: Settings, hosts: Any, local: int | None) -> list[str] | None:
    if local is not None:
        if hosts is not None:
            raise UsageError("give hosts or local=N, not both")
        if isinstance(local, bool) or not isinstance(local, int) or local < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"local={local!r} is not a number of agents; write connect(local=2)")
        return None
    if hosts is None and settings.hosts:
        hosts = settings.hosts
        if hosts not in _known_lists(settings):
            hosts = hosts.split(",")
    if hosts is None:
        return None
    if isinstance(hosts, str) and ("," in hosts or ":" in hosts):  # no name of a list: hosts in one string
        hosts = hosts.split(",")
    found = settings.named_hosts(hosts) if isinstance(hosts, str) else list(hosts)
    if not found or not all(isinstance(host, str) and host.strip() for host in found):
        raise UsageError(f"connect() takes a list of host names, not {hosts!r}; write connect(['gpu1', '10.0.0.7:7770'])")
    found = [host.strip() for host in found]
    if len(set(found)) != len(found):
        raise UsageError(f"a host is listed twice: {found}")
    return found


def dials_for(settings: Settings, hosts: str | Sequence[str] | None) -> list[Dial]:
    """How to reach the hosts that `connect(hosts)` would connect to; none if that is this machine. One name may be a list's."""
    if hosts is not None and len(hosts) == 1 and hosts[0] in _known_lists(settings):
        hosts = hosts[0]
    return [_dial(settings, target) for target in _targets(settings, hosts, None) or ()]


def _known_lists(settings: Settings) -> set[str]:
    return set(read_hosts_file(settings.home / "hosts"))


def _dial(settings: Settings, target: str) -> Dial:
    host, port = parse_address(target)
    identity = keys.load_or_make_identity(settings.home)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    server_key = keys.known_host(settings.home, address) or keys.known_host(settings.home, target) or identity.public
    return Dial(target, f"tcp://{address}", identity, server_key)


def _this_machine(settings: Settings) -> Dial:
    running = [record for record in records.read_all(settings.runtime_dir) if not record.embedded]
    for record in sorted(running, key=lambda record: record.port != DEFAULT_PORT):
        return Dial(record.host, f"ipc://{record.socket_path}")
    ready = _start_embedded(settings, ["--record", f"embedded-{os.getpid()}"])
    return Dial("this machine", f"ipc://{ready['socket']}")


def _start_local(settings: Settings, count: int) -> list[Dial]:
    """`count` agents that each take a share of this machine, with a port and a key like agents elsewhere."""
    identity = keys.load_or_make_identity(settings.home)
    starting = [
        _spawn_agent(
            settings, ["--port", "0", "--name", f"local-{n}", "--record", f"local-{os.getpid()}-{n}", "--share", f"{n}/{count}"]
        )
        for n in range(1, count + 1)
    ]
    dials: list[Dial] = []
    for number, process in enumerate(starting, 1):
        ready = _read_ready(process)
        dials.append(Dial(f"local-{number}", f"tcp://127.0.0.1:{ready['port']}", identity, identity.public))
    return dials


def _start_embedded(settings: Settings, arguments: list[str]) -> dict[str, Any]:
    return _read_ready(_spawn_agent(settings, arguments))


def _spawn_agent(settings: Settings, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start an agent whose stdin is a pipe of ours: it ends when this program does, however that happens."""
    if "torch" in sys.modules:
        arguments = [*arguments, "--preload", "torch"]
    command = [sys.executable, "-m", "gpulayer.agent", "--embedded", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=agent_environment(settings, log_level="warning"),
        start_new_session=True,  # Ctrl-C in the terminal is for the program, which then tells its agent
    )
    _embedded.append(process)
    return process


def agent_environment(settings: Settings, *, log_level: str) -> dict[str, str]:
    """The environment of an agent started from here: it finds this very GPUlayer, and the same folders.

    `log_level` counts where GPULAYER_LOG is not set. Workers get the user's own variables back (`launch.restore`).
    """
    return {
        **launch.own_paths(os.environ),
        "GPULAYER_HOME": str(settings.home),
        "GPULAYER_RUNTIME_DIR": str(settings.runtime_dir),
        "GPULAYER_LOG": settings.log_level or log_level,
    }


def _read_ready(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    timer = threading.Timer(EMBEDDED_START_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        code = process.wait()
        raise ConnectError(
            f"an agent did not start on this machine (exit code {code}); what it said is above", host="this machine"
        )
    return json.loads(line)


async def _shake_hands(session: Session, dials: list[Dial], timeout_s: float) -> None:
    torch = _installed_torch()
    await _refuse_twins(dials)
    for dial in dials:
        host = await session.endpoint.connect(dial, make_hello("driver", torch=torch), timeout_s)
        if host.address:  # an agent bound to 0.0.0.0 cannot know at which address it is reached
            reached_at = session.endpoint.channels[host.id].reached_at
            host = replace(host, address=f"{reached_at}:{host.address.rpartition(':')[2]}")
        session.hosts[host.id] = host
    introductions = [
        {"id": host_id, "name": channel.dial.name, "endpoint": channel.dial.endpoint, "key": channel.dial.server_key or ""}
        for host_id, channel in session.endpoint.channels.items()
    ]
    if len(introductions) > 1:
        for host_id in session.hosts:
            await session.endpoint.ask(Address(host_id), "peers", hosts=introductions)
    session.start_pings()


async def _refuse_twins(dials: list[Dial]) -> None:
    """Two names of one agent: it would not answer the second, since it has a connection of ours already."""
    names: dict[Any, str] = {}
    for dial in dials if len(dials) > 1 else ():
        host, port = parse_address(dial.endpoint.removeprefix("tcp://"))
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except OSError:
            continue  # a name that is unknown: connecting to it says so
        for *_, address in found:
            if names.setdefault(address, dial.name) != dial.name:
                raise UsageError(f"{dial.name} and {names[address]} are the same agent, listed twice")


def _installed_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


async def _say_goodbye(session: Session) -> None:
    asks = [session.endpoint.ask(Address(host_id), "goodbye") for host_id in list(session.endpoint.channels)]
    if asks:
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        _, late = await asyncio.wait(tasks, timeout=GOODBYE_S)
        for task in late:
            task.cancel()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # a host that is lost need not hear goodbye


def _tear_down(session: Session) -> None:
    ended = NotConnectedError("the session has ended; type: gpulayer.connect()")
    open_still = session.closed is None
    session.io.post(session.end, ended)  # first: calls that wait shall hear of this, not of the workers' ends that follow
    if open_still:
        session.io.run(_say_goodbye(session))
    session.io.run(session.endpoint.close())
    session.io.stop()
    _end_embedded()


def _end_embedded() -> None:
    processes, _embedded[:] = list(_embedded), []
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    deadline = time.monotonic() + 5.0
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _make_default() -> Session:
    with _mutex:  # of several threads that call at once, one connects
        if sessions.current_or_none() is None:
            connect()
        session = sessions.current_or_none()
    assert session is not None
    return session


def _forget_in_child() -> None:
    _embedded.clear()


atexit.register(disconnect)
os.register_at_fork(after_in_child=_forget_in_child)
sessions.on_missing(_make_default)
