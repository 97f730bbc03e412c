"""Records of running agents: left, found, and removed when their agent is no more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from gpulayer.errors import UsageError
from gpulayer.resources import Host
from gpulayer.runtime import records
from gpulayer.runtime.records import Record
from gpulayer.wire import security
from tests.conftest import wait_until

HOST = Host(id=b"12345678", name="here", address="", cpus=1, memory_bytes=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def leave(folder: Path, name: str, /, **changes: object) -> Path:
    """A record as another agent would leave it."""
    mine = records.write(folder, name, HOST, str(folder / f"{name}.sock"), 7770, False)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(asdict(mine) | changes))
    return path


def test_record_says_who_left_it(folder):
    socket_path = str(folder / "agent-7770.sock")
    record = records.write(folder, "agent-7770", HOST, socket_path, 7770, embedded=False)
    born_s = psutil.Process().create_time()
    assert record == Record("agent-7770", "here", socket_path, 7770, os.getpid(), born_s, False)
    assert records.read_all(folder) == [record]
    assert [path.name for path in folder.iterdir()] == ["agent-7770.json"], "no draft is left"


def test_all_agents_are_found_in_the_order_of_their_names(folder):
    for name, port in (("b", None), ("a", 1), ("c", 2)):
        records.write(folder, name, HOST, f"/{name}", port, embedded=port is None)
    assert [(record.name, record.port, record.embedded) for record in records.read_all(folder)] == [
        ("a", 1, False),
        ("b", None, True),
        ("c", 2, False),
    ]


def test_folder_that_is_not_there_has_none(folder):
    assert records.read_all(folder / "nowhere") == []


def test_remove_takes_everything_of_that_agent_and_nothing_else(folder):
    for name in ("one", "two"):
        leave(folder, name)
        for leftover in (f"{name}.sock", f".{name}.sock.lock"):
            (folder / leftover).touch()
        (folder / f"{name}.work" / "worker").mkdir(parents=True)
        (folder / f"{name}.work" / "worker" / "file").touch()
    records.remove(folder, "one")
    records.remove(folder, "one")
    assert sorted(path.name for path in folder.iterdir()) == [".two.sock.lock", "two.json", "two.sock", "two.work"]


def test_record_of_an_agent_that_ended_is_removed_with_its_remains(folder):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    leave(folder, "dead", pid=process.pid)
    leave(folder, "alive")
    (folder / "dead.sock").touch()
    (folder / "dead.work").mkdir()
    assert [record.name for record in records.read_all(folder)] == ["alive"]
    assert [path.name for path in folder.iterdir()] == ["alive.json"]


def test_record_with_an_impossible_pid_is_removed(folder):
    leave(folder, "strange", pid=-1)
    assert records.read_all(folder) == []
    assert list(folder.iterdir()) == []


def test_other_process_with_the_same_pid_is_not_the_agent(folder):
    leave(folder, "old", born_s=psutil.Process().create_time() - 100)
    assert records.read_all(folder) == []


def test_zombie_does_not_run():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        born_s = psutil.Process(process.pid).create_time()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, 10)
        assert not records.is_running(process.pid, born_s)
    assert not records.is_running(process.pid, born_s)
    assert records.is_running(os.getpid(), psutil.Process().create_time())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '"x"', "null", "{}", '{"name": "x"}', b"\xff".decode("latin-1"), '{"unknown": 1}']
)
def test_what_is_no_record_is_left_alone(folder, text):
    (folder / "strange.json").write_text(text, encoding="latin-1")
    leave(folder, "alive")
    assert [record.name for record in records.read_all(folder)] == ["alive"]
    assert (folder / "strange.json").exists()


@pytest.mark.parametrize("changes", [{"pid": "x"}, {"pid": None}, {"born_s": "x"}, {"name": 7}, {"name": "../x"}])
def test_record_with_nonsense_in_it_is_not_believed(folder, changes):
    (folder.parent / "x.json").write_text("{}")
    leave(folder, "strange", **changes)
    assert [record.name for record in records.read_all(folder)] == []
    assert (folder.parent / "x.json").exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o701])
def test_folder_that_others_may_enter_is_refused(folder, mode):
    leave(folder, "agent")
    folder.chmod(mode)
    with pytest.raises(UsageError, match="chmod 700"):
        records.read_all(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_somebody_else_is_refused(folder):
    leave(folder, "agent")
    os.chown(folder, 65534, 65534)
    with pytest.raises(UsageError, match="owner uid 65534"):
        records.read_all(folder)


def test_folder_that_is_a_symlink_is_refused(folder):
    (folder / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="not a folder of yours"):
        records.read_all(folder / "link")


@pytest.mark.parametrize("elsewhere", ["/tmp/trap.sock", "", 7, None])
def test_socket_of_an_agent_is_the_one_in_the_folder_whatever_its_record_says(folder, elsewhere):
    leave(folder, "agent", socket_path=elsewhere)
    assert [record.socket_path for record in records.read_all(folder)] == [str(folder / "agent.sock")]


def test_remains_are_spared_when_another_agent_has_begun_to_take_the_place(folder):
    """It has bound the socket and not yet left its record."""
    leave(folder, "agent", born_s=1.0)
    with socket.socket(socket.AF_UNIX) as newcomer:
        newcomer.bind(str(folder / "agent.sock"))
        newcomer.listen()
        assert records.read_all(folder) == []
        assert (folder / "agent.sock").exists()


def test_remains_are_judged_anew_once_their_lock_is_free(folder):
    """Another agent of that name started between the look and the removal."""
    path = leave(folder, "agent", born_s=1.0)
    found: list[list[Record]] = []
    with security.locked_local(folder / "agent.sock"):
        reader = threading.Thread(target=lambda: found.append(records.read_all(folder)))
        reader.start()
        waits = f"{os.getpid()}"
        wait_until(lambda: any("->" in line and waits in line for line in Path("/proc/locks").read_text().splitlines()), 10)
        (folder / "agent.sock").touch()
        leave(folder, "agent")
    reader.join()
    assert path.exists()
    assert (folder / "agent.sock").exists()
    assert [record.name for record in records.read_all(folder)] == ["agent"]
