"""The socket factory: sockets are made here and nowhere else, so that none is ever without authentication.

CURVE alone does not authenticate clients: a server socket without a ZAP handler in its own context lets every key in,
unless ZAP_ENFORCE_DOMAIN is set. So `server_socket` sets the domain, enforces it, and refuses to bind while no
`Authenticator` answers. Between processes of one user on one host, the ipc sockets rely on a folder that only that user
can enter, and on the kernel's word for the peer's uid.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket as plain_sockets
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import zmq

from gpulayer.errors import GPUlayerError, UsageError
from gpulayer.wire import keys
from gpulayer.wire import private_files as files
from gpulayer.wire.authenticator import ZAP_DOMAIN, Authenticator
from gpulayer.wire.context import context
from gpulayer.wire.keys import KeyPair

MAX_FRAME_BYTES = 4 << 20  # as it crosses the wire: encryption adds some 40 bytes
MAX_IPC_PATH_BYTES = 107  # sockaddr_un holds 108, with the final zero

_HANDSHAKE_MS = 5000
_UNACKED_MS = 10_000  # a server gives up a connection whose other kernel acknowledges nothing for so long

Prepare = Callable[[zmq.Socket[bytes]], object]


def _as_it_is(_: zmq.Socket[bytes]) -> None:
    pass


def check_bind(host: str, home: Path) -> None:
    """Loopback is open to this machine alone; any other `host` needs keys. Raises `UsageError`; nothing turns it off."""
    if _is_loopback(host):
        return
    if not os.path.lexists(home / keys.IDENTITY):
        raise UsageError(
            f"to listen on {host!r}, which others can reach, you need a key first; type: gpulayer keys make\n"
            "then let other hosts in with: gpulayer keys add PUBLIC --role driver"
        )
    keys.load_identity(home)


def server_socket(endpoint: str, identity: KeyPair, *, authenticator: Authenticator) -> zmq.Socket[bytes]:
    """A bound ROUTER at `tcp://host:port` (port 0: any), which only keys on the authenticator's list get through to.

    Raises `UsageError` for an endpoint that cannot be bound, `GPUlayerError` if the authenticator is not running.
    """
    if not authenticator.running:
        raise GPUlayerError("the authenticator is not running in this process's context; start it before binding a socket")
    endpoint = _tcp_endpoint(endpoint)
    socket: zmq.Socket[bytes] = context().socket(zmq.ROUTER)
    _set_common_options(socket, endpoint)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, identity.secret.encode())
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.set(zmq.TCP_MAXRT, _UNACKED_MS)
    _set_router_options(socket)
    return _bound(socket, endpoint, endpoint)


def client_socket(
    endpoint: str, *, routing_id: bytes, identity: KeyPair, server_key: str, prepare: Prepare = _as_it_is
) -> zmq.Socket[bytes]:
    """A DEALER on its way to `tcp://host:port`, which talks only to the holder of `server_key`'s secret.

    A name is looked up as IPv4 only: an agent binds one address, and `localhost` is often both. `prepare` gets the socket
    before it connects: a refused client does not try again, so a monitor that comes later may miss the one event.
    """
    endpoint = _tcp_endpoint(endpoint)
    public = keys.check_key(server_key).encode()
    socket = _dealer(endpoint, routing_id)
    socket.set(zmq.CURVE_SERVERKEY, public)
    socket.set(zmq.CURVE_PUBLICKEY, identity.public.encode())
    socket.set(zmq.CURVE_SECRETKEY, identity.secret.encode())
    prepare(socket)
    return _connected(socket, endpoint)


def local_server_socket(path: str | Path) -> zmq.Socket[bytes]:
    """A bound ROUTER at an ipc path in a folder of ours (mode 0700), for this user alone.

    A socket file that nobody listens on is replaced. Raises `UsageError` if somebody does, or the path cannot serve.
    """
    path = _ipc_path(path)
    check_folder(path.parent)
    with locked_local(path):
        _remove_stale(path)
        socket: zmq.Socket[bytes] = context().socket(zmq.ROUTER)
        _set_common_options(socket, "ipc")
        _set_router_options(socket)
        if hasattr(plain_sockets, "SO_PEERCRED"):
            socket.set(zmq.IPC_FILTER_UID, os.geteuid())
        _bound(socket, f"ipc://{path}", str(path))
        path.chmod(0o600)
    return socket


def locked_local(path: Path) -> AbstractContextManager[None]:
    """Hold the lock under which the socket at an ipc path is bound or removed."""
    return files.locked(path.parent, f".{path.name}.lock")


def is_served(path: Path) -> bool:
    """Whether somebody listens on the socket at an ipc path."""
    with plain_sockets.socket(plain_sockets.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its queue is full, so somebody has it open
            return True
    return True


def local_client_socket(path: str | Path, *, routing_id: bytes, prepare: Prepare = _as_it_is) -> zmq.Socket[bytes]:
    """A DEALER on its way to an ipc path in a folder of ours (mode 0700), where only our own agent can listen.

    `prepare` as in `client_socket`. Raises `UsageError` for another folder.
    """
    path = _ipc_path(path)
    check_folder(path.parent)
    socket = _dealer("ipc", routing_id)
    prepare(socket)
    return _connected(socket, f"ipc://{path}")


def bound_port(socket: zmq.Socket[bytes]) -> int:
    """The TCP port of a bound socket."""
    return int(socket.get(zmq.LAST_ENDPOINT).decode().rpartition(":")[2])  # pyright: ignore[reportAttributeAccessIssue]


def sender_key(frame: zmq.Frame) -> str | None:
    """The public key that the sender of a received frame has proved to hold; None for one that came over ipc."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None


def _set_common_options(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.set(zmq.SNDHWM, 0)  # what waits is bounded by the byte credits of the layer above
    socket.set(zmq.RCVHWM, 0)
    if endpoint.startswith("tcp://"):
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.set(zmq.IPV6, int("[" in endpoint))


def _set_router_options(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.ROUTER_HANDOVER, 0)  # with 1, any client that is let in could take over another's routing id


def _dealer(endpoint: str, routing_id: bytes) -> zmq.Socket[bytes]:
    if not 1 <= len(routing_id) <= 255:
        raise UsageError(f"a routing id has 1 to 255 bytes, not {len(routing_id)}")
    socket: zmq.Socket[bytes] = context().socket(zmq.DEALER)
    _set_common_options(socket, endpoint)
    socket.set(zmq.ROUTING_ID, routing_id)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 2000)
    socket.set(zmq.IMMEDIATE, 0)
    return socket


def _bound(socket: zmq.Socket[bytes], endpoint: str, shown: str) -> zmq.Socket[bytes]:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError(f"cannot listen on {shown}: {error.strerror}", endpoint=endpoint) from None
    return socket


def _connected(socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError(f"cannot connect to {endpoint}: {error.strerror}", endpoint=endpoint) from None
    return socket


def _tcp_endpoint(endpoint: str) -> str:
    """The endpoint, if it is one of tcp; libzmq binds to no names, so `localhost` becomes its address."""
    if not endpoint.startswith("tcp://"):
        raise UsageError(f"{endpoint!r} is not of the form tcp://host:port")
    return endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:", 1)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _ipc_path(path: str | Path) -> Path:
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise UsageError(
            f"the socket path {os.fspath(path)} has {length} bytes and the system allows {MAX_IPC_PATH_BYTES}; "
            "set GPULAYER_RUNTIME_DIR to a shorter folder",
            path=os.fspath(path),
        )
    return Path(path)


def check_folder(folder: Path) -> None:
    """Raises `UsageError` unless the folder of a socket is ours and closed to others."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UsageError(f"{folder} is not a folder of yours (owner uid {status.st_uid}); set GPULAYER_RUNTIME_DIR to one")
    if status.st_mode & 0o077:
        raise UsageError(
            f"others may enter {folder} (mode {status.st_mode & 0o777:o}); type: chmod 700 {shlex.quote(str(folder))}"
        )


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on: libzmq would take the place of one that somebody does."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"{path} is in the way and is not a socket; remove it")
    except FileNotFoundError:
        return
    if is_served(path):
        raise UsageError(f"another process listens on {path} already")
    path.unlink(missing_ok=True)
