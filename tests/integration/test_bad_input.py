"""What a user does wrong, from a script: each time one clear error, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpulayer.runtime import records
from tests.conftest import ROOT

CASES = {
    "required keyword": (
        """
class Odd(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code
def work():
    raise Odd(code=7)
""",
        "RemoteError",
        "Odd: code 7",
    ),
    "lock in the error": (
        """
import threading
class Locked(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
def work():
    raise Locked("has a lock")
""",
        "RemoteError",
        "Locked: has a lock",
    ),
    "class in __main__": (
        """
class Mine(ValueError):
    pass
def work():
    raise Mine("of the script")
""",
        "Mine",
        "of the script",
    ),
    "broken str": (
        """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")
def work():
    raise Mute()
""",
        "Mute",
        "raise Mute()",
    ),
    "plain": (
        """
def work():
    return {}["missing"]
""",
        "KeyError",
        'return {}["missing"]',
    ),
    "our own error, raised by the user": (
        """
def work():
    raise gpulayer.errors.UsageError("mine")
""",
        "UsageError",
        "mine",
    ),
    "generator": (
        """
def work():
    yield 1
""",
        "SerializationError",
        "generator",
    ),
    "open socket": (
        """
import socket
handle = socket.socket()
def work():
    return handle.fileno()
""",
        "SerializationError",
        "global variable 'handle'",
    ),
    "stop iteration": (
        """
def work():
    raise StopIteration(3)
""",
        "StopIteration",
        "raise StopIteration(3)",
    ),
    "keyboard interrupt in the worker": (
        """
def work():
    import os, signal, time
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
""",
        "KeyboardInterrupt",
        "os.kill",
    ),
}


SHOW = """
import json
import gpulayer
outcomes = {}
def note(case, function):
    seen = []
    try:
        gpulayer.get(gpulayer.remote(function).remote(), timeout=15)
    except BaseException as error:
        while error is not None:
            try:
                seen += [type(error).__name__, str(error)]
            except RuntimeError:
                seen += [type(error).__name__, "(no text)"]
            error = error.__cause__
    outcomes[case] = [*seen, gpulayer.get(gpulayer.remote(lambda: "still usable").remote(), timeout=10)]
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Case -> types and texts of the error and its causes, and whether the session was usable afterwards."""
    base = tmp_path_factory.mktemp("b")
    source = SHOW + "".join(f"{text}\nnote({case!r}, work)\n" for case, (text, *_) in CASES.items())
    (base / "script.py").write_text(source + "print('OUTCOMES', json.dumps(outcomes))\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=base,
        capture_output=True,
        text=True,
        timeout=50,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GPULAYER_HOME": str(base / "home"),
            "GPULAYER_RUNTIME_DIR": str(base / "run"),
        },
    )
    assert done.returncode == 0, done.stderr
    assert records.read_all(base / "run") == []
    return json.loads(done.stdout.rpartition("OUTCOMES ")[2])


@pytest.mark.parametrize("case", CASES)
def test_error_names_its_type_its_text_and_the_place(case, outcomes):
    _, kind, text = CASES[case]
    first, *_, last = seen = outcomes[case]
    said = "\n".join(seen)
    assert first == kind
    assert text in said
    assert last == "still usable"
    if kind not in ("SerializationError", "UsageError"):
        assert 'script.py", line ' in said


def test_uncaught_remote_error_shows_the_remote_place_in_the_traceback(run_script):
    done = run_script(
        """
import gpulayer
def deep():
    raise ValueError("far away")
@gpulayer.remote
def work():
    deep()
gpulayer.get(work.remote())
"""
    )
    assert done.returncode == 1
    assert 'script.py", line 4, in deep' in done.stderr
    assert done.stderr.strip().endswith("ValueError: far away")
    assert "Exception in" not in done.stderr
