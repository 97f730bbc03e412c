"""What a process says of itself: plain values, and true ones."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import time

import msgpack
import psutil
import pytest

from gpulayer import __version__
from gpulayer.wire.hello import make_hello, python_minor
from gpulayer.wire.message import PROTOCOL


def test_hello_says_who_and_what_this_process_is() -> None:
    hello = make_hello("driver", torch="2.4.0")
    born_s = hello.pop("born_s")
    assert hello == {
        "kind": "driver",
        "protocol": PROTOCOL,
        "gpulayer": __version__,
        "python": platform.python_version(),
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "user": getpass.getuser(),
        "torch": "2.4.0",
    }
    assert born_s == psutil.Process().create_time() <= time.time()


def test_hello_is_plain_values() -> None:
    hello = make_hello("worker", token="abc")
    assert msgpack.unpackb(msgpack.packb(hello)) == hello


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("no user name")])
def test_hello_names_the_uid_when_the_user_has_no_name(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def no_name() -> str:
        raise error  # what a container's arbitrary uid gives

    monkeypatch.setattr(getpass, "getuser", no_name)
    assert make_hello("driver")["user"] == str(os.getuid())


@pytest.mark.parametrize(("version", "minor"), [("3.11.7", "3.11"), ("3.9.0rc1", "3.9"), ("3.13.0+", "3.13"), ("None", "None")])
def test_python_minor_is_the_first_two_numbers(version: str, minor: str) -> None:
    assert python_minor(version) == minor
