from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.cli import keys as verb
from gpulayer.errors import KeyFileError, UsageError
from gpulayer.wire import keys


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPULAYER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def type_in(home, capsys):
    """Run `gpulayer ...` in this process; gives what it printed. Every output is searched for the secret key."""

    def run(*words: str) -> str:
        parser = argparse.ArgumentParser("gpulayer")
        verb.add_parser(parser.add_subparsers(dest="verb", required=True))
        assert verb.run(parser.parse_args(["keys", *words])) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        if (home / "identity.key").exists():
            assert keys.load_identity(home).secret not in printed.out
        return printed.out

    return run


def new_public() -> str:
    return keys.new_pair().public


def test_make_prints_the_public_key_and_what_to_type_elsewhere(type_in, home):
    printed = type_in("make")
    public = keys.load_identity(home).public
    assert f"your public key: {public}\n" in printed
    typed = shlex.split(printed.rpartition("type: ")[2])
    assert typed == ["gpulayer", "keys", "add", public, "--role", "driver"]
    assert type_in(*typed[2:]) == f"{public} may connect here as driver\n"


def test_make_replaces_a_key_only_by_force(type_in, home):
    type_in("make")
    first = keys.load_identity(home).public
    again = type_in("make")
    assert "--force" in again
    assert f"your public key: {first}\n" in again
    assert keys.load_identity(home).public == first
    type_in("make", "--force")
    assert keys.load_identity(home).public != first


def test_show_prints_the_public_key_alone(type_in, home):
    type_in("make")
    assert type_in("show") == keys.load_identity(home).public + "\n"


def test_show_says_what_to_type_when_there_is_no_key(type_in):
    with pytest.raises(KeyFileError, match="gpulayer keys make"):
        type_in("show")


def test_list_prints_everything_that_add_and_trust_said(type_in):
    agent, host = new_public(), new_public()
    type_in("make")
    type_in("add", agent, "--role", "agent", "--comment", "gpu1 in the lab")
    type_in("trust", "gpu1", host)
    lines = type_in("list").splitlines()
    assert lines[1:] == [f"let in: agent    {agent} gpu1 in the lab", f"host             {host} gpu1:7770"]


def test_list_gives_json(type_in, home):
    assert json.loads(type_in("list", "--json")) == {"identity": None, "authorized": [], "hosts": []}
    viewer, host = new_public(), new_public()
    type_in("make")
    type_in("add", viewer, "--role", "viewer")
    type_in("trust", "gpu1:7771", host)
    assert json.loads(type_in("list", "--json")) == {
        "identity": type_in("show").strip(),
        "authorized": [{"role": "viewer", "public": viewer, "comment": ""}],
        "hosts": [{"address": "gpu1:7771", "public": host}],
    }


def test_list_says_what_to_type_when_there_is_no_key(type_in):
    assert "gpulayer keys make" in type_in("list")


def test_revoke_takes_back_add_and_says_if_the_key_was_unknown(type_in):
    public = new_public()
    type_in("add", public, "--role", "driver")
    assert type_in("revoke", public) == f"{public} is refused from now on\n"
    assert type_in("revoke", public) == f"{public} is refused from now on; it was on no list here\n"
    assert json.loads(type_in("list", "--json"))["authorized"] == []


def test_every_verb_takes_a_key_that_looks_like_an_option_after_two_dashes(type_in):
    public = "-" + "0" * 39
    type_in("add", "--role", "viewer", "--", public)
    type_in("trust", "--", "gpu1", public)
    assert "it was on no list" not in type_in("revoke", "--", public)


def test_add_refuses_what_is_no_key(type_in):
    with pytest.raises(UsageError, match="not a public key"):
        type_in("add", "x", "--role", "driver")


@pytest.mark.parametrize(
    "words", [(), ("add", "KEY"), ("add", "KEY", "--role", "root"), ("trust", "gpu1"), ("revoke",), ("dance",)]
)
def test_keys_explains_what_is_missing_or_unknown(type_in, capsys, words):
    with pytest.raises(SystemExit) as caught:
        type_in(*words)
    assert caught.value.code == 2
    assert "usage: gpulayer keys" in capsys.readouterr().err


def test_import_loads_neither_zmq_nor_torch():
    code = "import gpulayer.cli.keys, sys; print(*{'zmq', 'torch', 'msgpack', 'cloudpickle'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "\n"
