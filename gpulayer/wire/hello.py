"""What a process says of itself when it connects."""

from __future__ import annotations

import getpass
import os
import platform
import socket
from typing import Any

import psutil

from gpulayer import __version__
from gpulayer.wire.message import PROTOCOL


def make_hello(kind: str, **more: Any) -> dict[str, Any]:
    """The body of a HELLO. `born_s` lets an agent on the same host tell a living process from another with its pid."""
    return {
        "kind": kind,
        "protocol": PROTOCOL,
        "gpulayer": __version__,
        "python": platform.python_version(),
        "pid": os.getpid(),
        "born_s": psutil.Process().create_time(),
        "hostname": socket.gethostname(),
        "user": _user(),
        **more,
    }


def python_minor(version: str) -> str:
    """`3.11.7` -> `3.11`: what must be the same on both sides, since closures travel as bytecode."""
    return ".".join(version.split(".")[:2])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        return str(os.getuid())
