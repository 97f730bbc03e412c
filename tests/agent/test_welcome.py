"""Who may come in, and as what."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.agent.welcome import Doorkeeper
from gpulayer.resources import Host
from gpulayer.wire import keys
from gpulayer.wire.hello import make_hello
from gpulayer.wire.keys import AllowList
from gpulayer.wire.message import PROTOCOL

HOST = Host(b"12345678", "here", "", 1, 1, versions={"python": "3.11.4", "gpulayer": "0.1.0"})
HELLO = {**make_hello("driver"), "python": "3.11.9"}
KINDS = ("driver", "agent", "viewer")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def door(home: Path) -> Doorkeeper:
    return Doorkeeper(HOST, AllowList(home))


def enroll(home: Path, role: str) -> str:
    public = keys.new_pair().public
    keys.authorize(home, public, role)
    return public


@pytest.mark.parametrize("kind", KINDS)
def test_this_user_over_ipc_may_be_anything(door, kind):
    assert door.refusal("", {**HELLO, "kind": kind}) is None


@pytest.mark.parametrize(
    ("role", "may_be"), [("driver", {"driver", "agent", "viewer"}), ("agent", {"agent", "viewer"}), ("viewer", {"viewer"})]
)
def test_role_of_a_key_limits_what_its_holder_may_be(door, home, role, may_be):
    public = enroll(home, role)
    assert {kind for kind in KINDS if door.refusal(public, {**HELLO, "kind": kind}) is None} == may_be
    assert {kind for kind in KINDS if door.knows(kind, public)} == may_be


def test_own_key_is_a_drivers(door, home):
    assert door.refusal(keys.make_identity(home).public, HELLO) is None


def test_refused_role_is_told_with_the_roles_that_would_do(door, home):
    assert door.refusal(enroll(home, "viewer"), HELLO) == {"rows": [("role of the key", "viewer", "driver")]}
    assert door.refusal(keys.new_pair().public, HELLO) == {"rows": [("role of the key", "unknown", "driver")]}


def test_revoked_key_is_unknown_from_then_on(door, home):
    public = enroll(home, "driver")
    assert door.knows("driver", public)
    keys.revoke(home, public)
    assert not door.knows("driver", public)
    assert door.refusal(public, HELLO) == {"rows": [("role of the key", "unknown", "driver")]}


@pytest.mark.parametrize("kind", ["worker", "", None, 5, [], "Driver"])
def test_unknown_kind_is_refused(door, kind):
    refusal = door.refusal("", {**HELLO, "kind": kind})
    assert refusal == {"rows": [("kind", str(kind), "agent or driver or viewer")]}


def test_hello_without_anything_is_refused(door):
    assert door.refusal("", {}) is not None
    assert door.refusal("", {"kind": "driver"}) is not None


@pytest.mark.parametrize("kind", ["driver", "agent"])
def test_python_must_be_the_same_minor_version(door, kind):
    refusal = door.refusal("", {**HELLO, "kind": kind, "python": "3.12.0"})
    assert refusal is not None
    assert ("python", "3.12", "3.11") in refusal["rows"]
    assert refusal["rows"][-1] == ("gpulayer", HELLO["gpulayer"], "0.1.0")
    assert door.refusal("", {**HELLO, "kind": kind, "python": "3.11.0"}) is None


def test_viewer_may_run_any_python_and_must_speak_the_protocol(door):
    viewer = {**HELLO, "kind": "viewer"}
    assert door.refusal("", {**viewer, "python": "3.99"}) is None
    refusal = door.refusal("", {**viewer, "protocol": PROTOCOL + 1})
    assert refusal is not None
    assert ("protocol", PROTOCOL + 1, PROTOCOL) in refusal["rows"]


@pytest.mark.parametrize(("what", "value"), [("pid", "7"), ("pid", None), ("born_s", "now"), ("born_s", None), ("pid", [])])
def test_facts_that_the_agent_works_with_must_be_numbers(door, what, value):
    assert door.refusal("", {**HELLO, what: value}) == {"rows": [(what, repr(value), "a number")]}
