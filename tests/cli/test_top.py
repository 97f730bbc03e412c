from __future__ import annotations

import argparse
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from gpulayer.cli import top

SNAPSHOT = {
    "time": 1_000_000_000.0,
    "hosts": [
        {"name": "gpu1", "status": "up", "cpus": 4.0, "runs": [{"id": "7f", "name": "net", "loss": math.nan, "step": 3}]},
        {"name": "gpu2", "status": "lost", "error": "no word"},
    ],
}


def parse(*argv):
    parser = argparse.ArgumentParser()
    top.add_parser(parser.add_subparsers())
    return parser.parse_args(["top", *argv])


def show(*argv, snapshot=SNAPSHOT):
    asked = []

    def collect(hosts):
        asked.append(hosts)
        return snapshot

    args = parse(*argv)
    assert args.run(args, collect) == 0
    return asked


# ---- the command line


def test_parser_has_defaults():
    args = parse()
    assert (args.hosts, args.once, args.json, args.interval, args.run) == ([], False, False, 1.0, top.run)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", "1e9"])
def test_parser_refuses_an_interval_that_cannot_work(text, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("--interval", text)
    assert exit_.value.code == 2
    assert "give seconds from 0.1 to 3600" in capsys.readouterr().err


def test_importing_top_and_its_parser_does_not_import_rich():
    code = """
import argparse, sys
from gpulayer.cli import top
top.add_parser(argparse.ArgumentParser().add_subparsers())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"rich", "torch", "zmq", "numpy"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=30, check=True)
    assert done.stdout.strip() == "[]"


# ---- one frame


def test_once_prints_one_frame_without_escape_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert show("--once", "gpu1", "gpu2") == [["gpu1", "gpu2"]]
    out, err = capsys.readouterr()
    assert "1/2 hosts up" in out
    assert "gpu2  (local)  lost  no word" in out
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert err == ""


def test_without_a_terminal_one_frame_is_printed_with_a_note(capsys):
    assert show() == [[]]
    out, err = capsys.readouterr()
    assert "1/2 hosts up" in out
    assert "not a terminal" in err


def test_once_prints_what_the_encoding_of_a_pipe_cannot_hold(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        show("--once", snapshot={"time": 0.0, "hosts": [{"name": "g\u00fcnther", "status": "lost", "error": "x"}]})
    assert "g?nther" in (tmp_path / "out").read_text()


def test_json_prints_the_snapshot_as_one_document(capsys):
    show("--json")
    text = capsys.readouterr().out

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    document = json.loads(text, parse_constant=refuse)
    assert document["hosts"][0]["runs"][0]["loss"] == "nan"
    assert document["hosts"][1] == SNAPSHOT["hosts"][1]


def test_error_of_collect_is_left_to_the_caller():
    def collect(hosts):
        raise ConnectionError("no agent")

    for flags in (["--once"], ["--json"]):
        with pytest.raises(ConnectionError, match="no agent"):
            top.run(parse(*flags), collect)


# ---- the live view, in a terminal of its own

LIVE = """
import argparse, sys, time
from gpulayer.cli import top
calls = 0
def collect(hosts):
    global calls
    calls += 1
    if calls == 2:
        raise ConnectionError("agent [bold]away")
    return {"time": 0.0, "hosts": [{"name": f"frame{calls}", "status": "up"}]}
parser = argparse.ArgumentParser()
top.add_parser(parser.add_subparsers())
args = parser.parse_args(["top", *sys.argv[1:]])
sys.exit(args.run(args, collect))
"""


def environment(**changes):
    # the import path of this process, wherever the tests were started from
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    return {**kept, "PYTHONPATH": path, "TERM": "xterm-256color", **changes}


class Terminal:
    """A program in a pseudo terminal; `text` is all that it printed."""

    def __init__(self, *argv, **env):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 100)) if hasattr(termios, "tcsetwinsize") else None
        self.before = termios.tcgetattr(self.slave)
        self.text = ""
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        self.process = subprocess.Popen([sys.executable, "-c", LIVE, *argv], env=environment(**env), **ends)

    def wait_text(self, wanted, timeout_s=20.0):
        end = time.monotonic() + timeout_s
        while wanted not in self.text:
            assert time.monotonic() < end, f"{wanted!r} did not come: {self.text!r}"
            self.read(0.1)

    def read(self, timeout_s):
        if select.select([self.master], [], [], timeout_s)[0]:
            self.text += os.read(self.master, 65536).decode()
            return True
        return False

    def press(self, keys):
        os.write(self.master, keys.encode())

    def wait_exit(self):
        code = self.process.wait(20)
        while self.read(0):
            pass
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    opened = []

    def open_terminal(*argv, **env):
        opened.append(Terminal(*argv, **env))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_live_view_refreshes_until_q_and_restores_the_terminal(terminal):
    view = terminal("--interval", "0.1")
    view.wait_text("frame1")
    view.wait_text("nothing new since the time below: agent [bold]away")
    view.wait_text("frame4")
    assert termios.tcgetattr(view.slave) != view.before
    view.press("xq")
    assert view.wait_exit() == 0
    assert termios.tcgetattr(view.slave) == view.before
    assert view.text.count("\x1b[?1049h") == view.text.count("\x1b[?1049l") == 1


def test_live_view_quits_at_once_however_long_the_interval(terminal):
    view = terminal("--interval", "3600")
    view.wait_text("q quits")
    view.press("q")
    assert view.wait_exit() == 0


def test_live_view_ends_with_0_on_ctrl_c(terminal):
    view = terminal("--interval", "3600")
    view.wait_text("frame1")
    view.process.send_signal(signal.SIGINT)
    assert view.wait_exit() == 0
    assert termios.tcgetattr(view.slave) == view.before
    assert "Traceback" not in view.text
    assert view.text.count("\x1b[?1049l") == 1


def test_once_in_a_terminal_prints_one_frame_and_ends(terminal):
    view = terminal("--once")
    assert view.wait_exit() == 0
    assert "frame1" in view.text
    assert "\x1b[?1049h" not in view.text


def test_dumb_terminal_gets_one_frame(terminal):
    view = terminal(TERM="dumb")
    assert view.wait_exit() == 0
    assert "frame1" in view.text
    assert "\x1b" not in view.text
