from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import zmq

from gpulayer.errors import GPUlayerError
from gpulayer.wire import context as module
from gpulayer.wire.context import close_context, context, is_current

FORK = """
import os
from gpulayer.wire.context import close_context, context, is_current
inherited = context()
held = inherited.socket(17 // 3)  # a DEALER, left open on purpose
pid = os.fork()
if pid == 0:
    fresh = context()
    fine = fresh is not inherited and is_current(fresh) and not is_current(inherited)
    one, two = fresh.socket(0), fresh.socket(0)
    one.bind("inproc://x")
    two.connect("inproc://x")
    two.send(b"works")
    fine = fine and one.recv() == b"works"
    close_context()
    os._exit(0 if fine else 1)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert is_current(inherited)
close_context()
print("child", code)
"""


@pytest.fixture(autouse=True)
def _closed_context():
    yield
    close_context()


def test_context_is_one_for_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(context())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each is context() for each in found)
    assert len(found) == 8


def test_context_has_room_for_many_sockets():
    assert context().get(zmq.MAX_SOCKETS) == 4096
    assert context().get(zmq.IO_THREADS) == 2


def test_close_context_closes_its_sockets_and_the_next_one_is_fresh():
    first = context()
    socket = first.socket(zmq.DEALER)
    close_context()
    assert socket.closed
    assert first.closed
    assert not is_current(first)
    assert context() is not first
    close_context()
    close_context()


def test_context_is_fresh_in_a_forked_child():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("child 0\n", "")


def test_context_refuses_a_libzmq_with_known_holes(monkeypatch):
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(GPUlayerError, match=r"at least 4\.3\.5.*pip install --upgrade"):
        context()


def test_context_refuses_a_libzmq_without_curve(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda feature: feature != "curve")
    with pytest.raises(GPUlayerError, match="without CURVE"):
        context()


def test_context_is_not_made_on_import():
    code = "import gpulayer.wire.security, gpulayer.wire.context as c; assert not c._contexts"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert module._contexts == {}
