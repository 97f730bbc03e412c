"""Can an agent be reached, and if not, why? Turns what TCP and ZeroMQ say into sentences a user can act on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from gpulayer.errors import AuthError, ConnectError

_GREETING_WAIT_S = 2.0
_GREETING = b"\xff" + bytes(7) + b"\1\x7f\3"
"""How a ZMTP 3 peer begins (RFC 23): signature and version. The other side then says its whole greeting, mechanism included."""
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Handshake(Enum):
    """Why a handshake failed."""

    REFUSED_US = "refused us"  # the agent does not know our key
    NO_DETAIL = "no detail"  # it dropped us: it could not read what we encrypted for the key we hold for it
    PROTOCOL = "protocol"  # it speaks ZeroMQ, but not with our security


_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: Handshake.REFUSED_US,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: Handshake.NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: Handshake.PROTOCOL,
}


async def check(name: str, endpoint: str, timeout_s: float) -> None:
    """Raise `ConnectError` unless something that speaks ZeroMQ (over TCP: with CURVE) listens at `endpoint`."""
    try:
        reader, writer = await asyncio.wait_for(_open(endpoint), timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise ConnectError(
            f"{name} does not answer ({endpoint}, waited {timeout_s:g} s); "
            "is the host up, and does its firewall let the port through?",
            host=name,
        ) from None
    except ConnectionRefusedError:
        raise ConnectError(
            f"{name} is up, but nothing listens at {endpoint}; on that host, type: gpulayer up  (or give its port: HOST:PORT)",
            host=name,
        ) from None
    except socket.gaierror as error:
        raise ConnectError(f"{name}: no such host ({error.strerror}); check the name, or give an address", host=name) from None
    except OSError as error:
        raise ConnectError(f"{name}: cannot connect to {endpoint}: {error.strerror or error}", host=name) from None
    try:
        _check_listener(name, endpoint, writer.get_extra_info("socket"))
        greeting = await _read_greeting(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if greeting[:1] == b"\xff":  # the first byte that every ZMTP peer sends unasked
        whole = len(greeting) == _GREETING_BYTES
        if whole and endpoint.startswith("tcp://") and greeting[_MECHANISM].rstrip(b"\0") != b"CURVE":
            raise AuthError(explain_handshake(name, Handshake.PROTOCOL), host=name)
    else:
        said = f"it said {greeting[:10]!r}" if greeting else "it said nothing"
        raise ConnectError(
            f"another program listens at {endpoint} ({said}), not a GPUlayer agent; give the port of `gpulayer up`: HOST:PORT",
            host=name,
        )


def _check_listener(name: str, endpoint: str, connection: socket.socket) -> None:
    """Over ipc, where no key proves it, the kernel says whose process listens: it must be one of ours."""
    if endpoint.startswith("ipc://") and hasattr(socket, "SO_PEERCRED"):
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            raise AuthError(f"{endpoint} belongs to a process of uid {uid}, and you are uid {os.geteuid()}", host=name)


async def _read_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What the other side says, asked with the beginning of a greeting; less or nothing if no more comes in time."""
    said = b""
    deadline = asyncio.get_running_loop().time() + _GREETING_WAIT_S
    writer.write(_GREETING)
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError, OSError):
        while len(said) < _GREETING_BYTES:
            more = await asyncio.wait_for(reader.read(_GREETING_BYTES - len(said)), deadline - asyncio.get_running_loop().time())
            said += more
            if not more or said[:1] != b"\xff":
                break
    return said


async def refuses(endpoint: str) -> bool:
    """Whether nothing listens at `endpoint` any more. A host that does not answer at all is not known to be gone."""
    try:
        _, writer = await asyncio.wait_for(_open(endpoint), _GREETING_WAIT_S)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (TimeoutError, asyncio.TimeoutError, OSError):
        return False
    writer.close()
    return False


async def _open(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if endpoint.startswith("ipc://"):
        return await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET  # of a name ZeroMQ takes the first IPv4 address, too
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), family=family, type=socket.SOCK_STREAM)
    return await asyncio.open_connection(str(found[0][4][0]), int(port))


def explain_handshake(name: str, failure: Handshake) -> str:
    """What to do about a failed handshake."""
    if failure is Handshake.REFUSED_US:
        return (
            f"{name} does not know this machine's key; here, type: gpulayer keys show ; "
            f"there, type: gpulayer keys add PUBLIC-KEY --role driver"
        )
    if failure is Handshake.NO_DETAIL:
        return (
            f"{name} does not hold the key that we expect of it (wrong key, or another agent); "
            f"there, type: gpulayer keys show ; here, type: gpulayer keys trust {name} PUBLIC-KEY"
        )
    return f"{name} speaks ZeroMQ without GPUlayer's security: another program listens on that port"


class Monitor:
    """Watches one client socket: `failure` resolves when a handshake fails, `on_disconnect` is called when a connection drops."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.failure: asyncio.Future[Handshake] = loop.create_future()
        self.on_disconnect: Callable[[], None] = lambda: None
        self._loop = loop
        self._fd = -1

    def watch(self, watched: zmq.Socket[bytes]) -> None:
        """Begin to watch, before the socket connects: a refused client does not try again."""
        self._watched = watched
        self._socket = watched.get_monitor_socket(zmq.Event.DISCONNECTED | sum(_FAILURES))
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
            self._watched.disable_monitor()
            self._socket.close(0)
            if not self.failure.done():
                self.failure.cancel()

    def _drain(self) -> None:
        while self._fd >= 0:
            try:
                event = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind = event["event"]
            if kind == zmq.Event.DISCONNECTED:
                self.on_disconnect()
            elif kind in _FAILURES and not self.failure.done():
                self.failure.set_result(_FAILURES[zmq.Event(kind)])
