from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import cloudpickle
import pytest
import zmq
from zmq.utils import z85

from gpulayer.errors import KeyFileError, UsageError
from gpulayer.wire import identity

MAKE = """
import sys
from pathlib import Path
from gpulayer.wire import identity
home = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(identity.load_or_make_identity(home).public)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def locals_and_text(error: BaseException) -> str:
    """The most that a traceback printer can show of other code than this test's: messages and each frame's variables."""
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    shown.stack[:] = [frame for frame in shown.stack if frame.filename != __file__]
    assert shown.stack
    return "".join(shown.format())


def test_is_key_agrees_with_the_reference_decoder():
    for raw in (bytes(32), b"\xff" * 32, os.urandom(32)):
        assert identity.is_key(z85.encode(raw).decode())


@pytest.mark.parametrize(
    "text", ["", "a" * 39, "a" * 41, "a" * 39 + "'", "a" * 39 + "\u00e9", "#" * 40, "a" * 20 + "\n" + "a" * 19]
)
def test_is_key_is_false_for_what_does_not_decode(text):
    assert not identity.is_key(text)


def test_check_key_says_what_a_key_is_and_where_to_find_it():
    with pytest.raises(UsageError, match=r"'short'... \(5 characters\) is not a public key.*gpulayer keys show"):
        identity.check_key("short")


def test_new_pair_is_a_working_pair_that_no_command_line_takes_for_an_option():
    pairs = [identity.new_pair() for _ in range(300)]
    assert len({pair.secret for pair in pairs}) == 300
    assert not any(pair.public.startswith("-") for pair in pairs)
    assert zmq.curve_public(pairs[0].secret.encode()).decode() == pairs[0].public


def test_pair_hides_its_secret_from_repr_and_str():
    pair = identity.new_pair()
    shown = f"{pair} {pair!r} {[pair]} { ({'a': pair}) }"
    assert pair.secret not in shown
    assert pair.public in shown


@pytest.mark.parametrize("send", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_pair_does_not_travel(send):
    pair = identity.new_pair()
    with pytest.raises(TypeError, match="does not travel") as caught:
        send(pair)
    shown = locals_and_text(caught.value)
    assert pair.secret not in shown


def test_make_identity_keeps_a_private_file(home):
    before = os.umask(0)
    try:
        pair = identity.make_identity(home)
    finally:
        os.umask(before)
    assert (home.stat().st_mode & 0o777, (home / "identity.key").stat().st_mode & 0o777) == (0o700, 0o600)
    assert identity.load_identity(home) == pair


def test_make_identity_refuses_to_replace_a_key_unless_forced(home):
    first = identity.make_identity(home)
    with pytest.raises(KeyFileError, match="--force"):
        identity.make_identity(home)
    assert identity.load_identity(home) == first
    second = identity.make_identity(home, force=True)
    assert identity.load_identity(home) == second != first


def test_load_identity_says_what_to_type_when_there_is_none(home):
    with pytest.raises(KeyFileError, match="gpulayer keys make"):
        identity.load_identity(home)
    assert not home.exists()


def test_load_identity_refuses_a_readable_file(home):
    identity.make_identity(home)
    (home / "identity.key").chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        identity.load_identity(home)
    with pytest.raises(KeyFileError, match="chmod 600"):
        identity.load_or_make_identity(home)


def test_load_or_make_identity_refuses_a_planted_symlink(home, tmp_path):
    identity.make_identity(tmp_path / "attacker")
    home.mkdir(mode=0o700)
    (home / "identity.key").symlink_to(tmp_path / "attacker" / "identity.key")
    with pytest.raises(KeyFileError, match="symlink"):
        identity.load_or_make_identity(home)


def test_load_or_make_identity_refuses_a_dangling_symlink(home, tmp_path):
    home.mkdir(mode=0o700)
    (home / "identity.key").symlink_to(tmp_path / "nothing")
    with pytest.raises(KeyFileError, match="symlink"):
        identity.load_or_make_identity(home)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("damage", ["empty", "truncated", "other public key", "binary"])
def test_load_identity_refuses_a_damaged_file_and_shows_no_secret(home, damage):
    pair = identity.make_identity(home)
    path = home / "identity.key"
    text = path.read_text()
    damaged = {
        "empty": b"",
        "truncated": text[:-10].encode(),
        "other public key": text.replace(pair.public, identity.new_pair().public).encode(),
        "binary": b"\xff\x00" + text.replace("public", "\0").encode(),
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(KeyFileError, match=r"damaged.*--force") as caught:
        identity.load_identity(home)
    shown = locals_and_text(caught.value)
    assert pair.secret[:25] not in shown


def test_load_or_make_identity_gives_one_key_to_processes_that_race(home):
    command = [sys.executable, "-c", MAKE, str(home)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    found = {racer.communicate(timeout=30)[0].strip() for racer in racers}
    assert found == {identity.load_identity(home).public}
    assert os.listdir(home) == ["identity.key"]
