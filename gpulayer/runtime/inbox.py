"""What agent and zygote say to each other: JSON messages with a 4-byte length on a stream socket, with file descriptors.

Apart from the zygote's own code, because an agent must not load what a worker needs: an agent can unpickle nothing.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
_READ_BYTES = 65536
_MAX_FDS = 16

MARKER = "GPULAYER_WORKER"
"""Variable in the environment of a worker, and of all that it starts: the worker's id."""
PLACEHOLDER = "0" * 16
"""What the marker holds in the zygote itself: as long as a worker's id."""


def send_message(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Write one message; `fds` travel with its first byte."""
    data = json.dumps(message).encode()
    data = _LENGTH.pack(len(data)) + data
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
        data = data[sent:]
    sock.sendall(data)


class Inbox:
    """Reads messages, and the file descriptors that came with them, from a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = b""
        self.fds: list[int] = []

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the other side has gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        self.fds += fds
        self._data += data
        messages: list[dict[str, Any]] = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(json.loads(self._data[_LENGTH.size : end]))
            self._data = self._data[end:]
        return messages
