"""The command line as a whole: parser, exit codes, speed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gpulayer
from gpulayer import cli
from gpulayer.errors import UsageError
from tests.conftest import ROOT

COMMAND = [sys.executable, "-m", "gpulayer.cli"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_every_verb_has_help(capsys):
    for verb in ("up", "down", "status", "top", "keys"):
        with pytest.raises(SystemExit) as ended:
            cli.main([verb, "--help"])
        assert ended.value.code == 0
        assert f"usage: gpulayer {verb}" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"gpulayer {gpulayer.__version__}\n"


@pytest.mark.parametrize("words", [[], ["sing"], ["up", "--port", "x"], ["keys"]])
def test_wrong_words_are_explained(capsys, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: gpulayer" in capsys.readouterr().err


def run_with(monkeypatch: pytest.MonkeyPatch, outcome: BaseException) -> int:
    def run(args: object) -> int:
        raise outcome

    monkeypatch.setattr(cli.agent, "run_status", run)
    return cli.main(["status"])


def test_error_of_ours_is_one_message_and_exit_code_1(monkeypatch, capsys):
    assert run_with(monkeypatch, UsageError("this is how")) == 1
    assert capsys.readouterr() == ("", "gpulayer: this is how\n")


def test_interrupt_ends_quietly_with_the_usual_code(monkeypatch, capsys):
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def test_bug_shows_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_with(monkeypatch, ZeroDivisionError())


def test_reader_that_goes_away_is_no_error(own_folders):
    """As in `gpulayer keys list | head -0`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "keys", "list"], stdout=write, stderr=subprocess.PIPE, text=True, env=environment())
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_parser_loads_neither_torch_nor_the_wire():
    source = "import sys, gpulayer.cli as c; c.make_parser(); print([m for m in ('torch', 'zmq', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment())
    assert (done.stdout, done.stderr) == ("[]\n", "")
