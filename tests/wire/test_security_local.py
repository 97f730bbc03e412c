from __future__ import annotations

import asyncio
import os
import shutil
import socket as plain_sockets
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpulayer.errors import UsageError
from gpulayer.wire import security
from gpulayer.wire.authenticator import Authenticator
from gpulayer.wire.context import close_context
from gpulayer.wire.keys import AllowList

WAIT_MS = 10_000

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

_kept: list[zmq.Socket] = []


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short name."""
    path = Path(tempfile.mkdtemp(prefix="gpl"))
    yield path
    for socket in _kept:
        socket.close(0)
    _kept.clear()
    close_context()
    shutil.rmtree(path)


def keep(socket: zmq.Socket) -> zmq.Socket:
    """Close the socket at the end of the test, not as soon as nobody holds it."""
    _kept.append(socket)
    return socket


def local_server(path: Path | str) -> zmq.Socket:
    return keep(security.local_server_socket(path))


def local_client(path: Path | str, routing_id: bytes = b"x") -> zmq.Socket:
    return keep(security.local_client_socket(path, routing_id=routing_id))


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    assert socket.poll(WAIT_MS), "no message came"
    return socket.recv_multipart(copy=False)


def arrives(client: zmq.Socket, server: zmq.Socket) -> bool:
    client.send(b"hello")
    return receive(server)[-1].bytes == b"hello"


def test_local_sockets_carry_messages_both_ways(folder):
    server = local_server(folder / "s")
    client = local_client(str(folder / "s"), b"worker")
    client.send(b"hello")
    routing_id, body = receive(server)
    assert (routing_id.bytes, body.bytes, security.sender_key(body)) == (b"worker", b"hello", None)
    server.send_multipart([b"worker", b"answer"])
    assert receive(client)[0].bytes == b"answer"


def test_local_sockets_work_beside_an_authenticator(folder):
    loop = asyncio.new_event_loop()
    authenticator = Authenticator(loop, AllowList(folder))
    authenticator.start()
    assert arrives(local_client(folder / "s"), local_server(folder / "s"))
    authenticator.stop()
    loop.close()


def test_local_server_socket_is_private_when_umask_is_open(folder):
    before = os.umask(0)
    try:
        local_server(folder / "s")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert stat.S_ISSOCK(modes["s"])
    assert {mode & 0o777 for mode in modes.values()} == {0o600}


def test_local_sockets_refuse_a_long_path_and_name_the_remedy(folder):
    path = folder / ("x" * (108 - len(str(folder)) - 1))
    assert len(str(path)) == 108
    for make in (local_server, local_client):
        with pytest.raises(UsageError, match=r"108 bytes and the system allows 107.*GPULAYER_RUNTIME_DIR"):
            make(path)
    local_server(str(path)[:-1])


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_local_server_socket_refuses_a_folder_that_others_may_enter(folder, mode):
    folder.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 700 {folder}"):
        local_server(folder / "s")
    assert list(folder.iterdir()) == []


def test_local_server_socket_refuses_a_missing_or_symlinked_folder(folder):
    with pytest.raises(UsageError, match="No such file"):
        local_server(folder / "missing" / "s")
    (folder / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="not a folder of yours"):
        local_server(folder / "link" / "s")


@as_root
def test_local_server_socket_refuses_a_folder_of_another_user(folder):
    os.chown(folder, 65534, 65534)
    with pytest.raises(UsageError, match="owner uid 65534"):
        local_server(folder / "s")


def test_local_server_socket_replaces_a_socket_file_that_nobody_listens_on(folder):
    with plain_sockets.socket(plain_sockets.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
    server = local_server(folder / "s")
    assert arrives(local_client(folder / "s"), server)


def test_local_server_socket_leaves_a_live_one_alone(folder):
    server = local_server(folder / "s")
    with pytest.raises(UsageError, match="another process listens"):
        local_server(folder / "s")
    assert arrives(local_client(folder / "s"), server)


def test_local_server_socket_leaves_a_live_one_alone_when_its_queue_is_full(folder):
    with plain_sockets.socket(plain_sockets.AF_UNIX) as busy, plain_sockets.socket(plain_sockets.AF_UNIX) as waiting:
        busy.bind(str(folder / "s"))
        busy.listen(0)
        waiting.connect(str(folder / "s"))
        with pytest.raises(UsageError, match="another process listens"):
            local_server(folder / "s")


@pytest.mark.parametrize("kind", ["file", "folder", "symlink"])
def test_local_server_socket_removes_nothing_but_sockets(folder, kind):
    path = folder / "s"
    {"file": path.touch, "folder": path.mkdir, "symlink": lambda: path.symlink_to(folder / "target")}[kind]()
    with pytest.raises(UsageError, match="in the way and is not a socket"):
        local_server(path)
    assert os.path.lexists(path)


@as_root
def test_local_server_socket_hangs_up_on_another_user_even_when_the_folder_is_open(folder):
    server = local_server(folder / "s")
    (folder / "s").chmod(0o777)
    folder.chmod(0o755)
    assert greeting(folder / "s", os.geteuid()) == b"\xff"
    assert greeting(folder / "s", 65534) == b""
    assert not server.poll(0)


def greeting(path: Path, uid: int) -> bytes:
    """The first byte that a server at `path` says to a process of user `uid`, nothing if it hangs up."""
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(20); os.setuid(int(sys.argv[2]));"
        "s.connect(sys.argv[1]); sys.stdout.buffer.write(s.recv(1))"
    )
    command = [sys.executable, "-I", "-c", code, str(path), str(uid)]
    return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout


def test_local_client_waits_for_a_server_that_comes_later(folder):
    client = local_client(folder / "s", b"early")
    client.send(b"hello")
    assert receive(local_server(folder / "s"))[-1].bytes == b"hello"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_local_client_refuses_a_folder_that_others_may_enter(folder, mode):
    folder.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 700 {folder}"):
        local_client(folder / "s")


@as_root
def test_local_client_refuses_a_folder_of_another_user(folder):
    os.chown(folder, 65534, 65534)
    with pytest.raises(UsageError, match="owner uid 65534"):
        local_client(folder / "s")
