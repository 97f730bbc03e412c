"""`gpulayer up`, `down` and `status`, typed as a user types them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

import gpulayer
from gpulayer.config import Settings
from gpulayer.runtime import records
from tests.agents import read_pids
from tests.conftest import ROOT, is_gone, wait_until

Done = subprocess.CompletedProcess


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def type_in(*words: str) -> Done[str]:
    """Run `gpulayer WORDS`."""
    command = [sys.executable, "-m", "gpulayer.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def running() -> list[records.Record]:
    return records.read_all(Settings.from_environment().runtime_dir)


@pytest.fixture
def up(own_folders: Path) -> Iterator[Callable[..., records.Record]]:
    """Start an agent in the background on any port; all are ended afterwards."""

    def start(*words: str) -> records.Record:
        before = {record.pid for record in running()}
        done = type_in("up", "--detach", "--port", "0", *words)
        assert done.returncode == 0, done.stderr
        (record,) = (record for record in running() if record.pid not in before)
        return record

    yield start
    for record in running():
        os.kill(record.pid, signal.SIGKILL)
        wait_until(lambda pid=record.pid: is_gone(pid), 5, "the end of the agent")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- up


def test_up_detach_says_pid_port_and_how_to_end_it(own_folders, up):
    port = free_port()
    done = type_in("up", "--detach", "--port", str(port), "--name", "tower", "--zone", "lab", "--cpus", "1.5")
    assert done.returncode == 0
    (record,) = running()
    log = own_folders / "run" / "agent.log"
    said = f"agent running: pid {record.pid}, port {port}, log {log}; end it with: gpulayer down\n"
    assert done.stdout == said
    assert log.stat().st_mode & 0o777 == 0o600
    assert (record.name, record.host, record.embedded) == (f"agent-{port}", "tower", False)
    with gpulayer.connect() as connection:
        (host,) = connection.hosts
        assert (host.name, host.zone, host.cpus, host.address) == ("tower", "lab", 1.5, f"127.0.0.1:{port}")
    assert not is_gone(record.pid), "it outlives its driver"


def test_up_runs_in_the_foreground_until_interrupted(own_folders):
    command = [sys.executable, "-m", "gpulayer.cli", "up", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid, "the command itself becomes the agent"
        below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    assert (process.returncode, out, err) == (0, "", "")
    assert below
    assert all(map(is_gone, below))
    assert list((own_folders / "run").iterdir()) == []


def test_up_refuses_a_port_on_which_an_agent_runs(up):
    record = up()
    done = type_in("up", "--detach", "--port", str(record.port))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"(pid {record.pid}); end it with: gpulayer down --port {record.port}" in done.stderr


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_up_says_that_a_port_is_taken(own_folders, detach):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = type_in("up", "--port", str(port), *detach)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot listen on tcp://127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
    assert running() == []


@pytest.mark.parametrize("detach", [[], ["--detach"]])
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3"])
def test_up_on_an_open_address_needs_a_key_and_says_what_to_type(own_folders, address, detach):
    done = type_in("up", "--port", "0", "--bind", address, *detach)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"to listen on {address!r}, which others can reach, you need a key first; type: gpulayer keys make\n" in done.stderr
    assert "gpulayer keys add PUBLIC --role driver" in done.stderr
    assert not (own_folders / "home" / "identity.key").exists(), "none is made behind the user's back"
    assert running() == []


def test_up_on_an_open_address_starts_with_a_key(own_folders, up):
    assert type_in("keys", "make").returncode == 0
    record = up("--bind", "0.0.0.0")
    listening = [c.laddr for c in psutil.Process(record.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("0.0.0.0", record.port)]


def test_up_refuses_a_key_file_that_others_can_read(own_folders):
    assert type_in("keys", "make").returncode == 0
    (own_folders / "home" / "identity.key").chmod(0o644)
    done = type_in("up", "--detach", "--port", "0")
    assert done.returncode == 1
    assert "others may use it; type: chmod 600" in done.stderr


@pytest.mark.parametrize("cpus", ["0", "-1", "nan", "inf"])
def test_up_refuses_a_number_of_cpus_that_is_none(own_folders, cpus):
    done = type_in("up", "--port", "0", f"--cpus={cpus}")
    assert done.returncode == 1
    assert "leave it out to offer all" in done.stderr


def test_up_refuses_a_runtime_folder_of_somebody_else(own_folders):
    run = own_folders / "run"
    run.mkdir()
    os.chown(run, 12345, 12345) if os.geteuid() == 0 else pytest.skip("only root can make one")
    done = type_in("up", "--port", "0")
    assert done.returncode == 1
    assert f"{run} is not a folder of yours (owner uid 12345)" in done.stderr
    assert "Traceback" not in done.stderr


# --- down


def test_down_ends_the_agent_and_all_that_it_runs(own_folders, up, tmp_path):
    @gpulayer.remote
    class Parent:
        def start(self, path):
            command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
            with open(path, "a") as file:
                subprocess.Popen(command, stdout=file, start_new_session=True)

    record = up()
    with gpulayer.connect():
        parent = Parent.remote()
        gpulayer.get(parent.start.remote(str(tmp_path / "pids")))
        pids = read_pids(tmp_path / "pids", 1) + [child.pid for child in psutil.Process(record.pid).children(recursive=True)]
        done = type_in("down")
        assert done.stdout == f"agent ended: pid {record.pid}, port {record.port}\n"
        assert (done.returncode, done.stderr) == (0, "")
        assert all(map(is_gone, [record.pid, *pids])), "when it says so, it is so"
        with pytest.raises(gpulayer.errors.HostLostError, match="is shutting down"):
            gpulayer.get(parent.start.remote("x"), timeout=5)
    assert [path.name for path in (own_folders / "run").iterdir()] == ["agent.log"]


def test_down_without_an_agent_says_so(own_folders):
    done = type_in("down")
    assert (done.returncode, done.stdout, done.stderr) == (0, "no agent runs on this machine\n", "")
    assert type_in("down", "--port", "7").stdout == "no agent runs on this machine on port 7\n"


def test_down_asks_which_one_where_several_run(up):
    one, two = up(), up()
    done = type_in("down")
    assert done.returncode == 1
    assert all(str(record.port) in done.stderr for record in (one, two))
    assert type_in("down", "--port", str(one.port)).returncode == 0
    assert [record.pid for record in running()] == [two.pid]
    assert type_in("down").returncode == 0
    assert running() == []


def test_down_leaves_embedded_agents_alone(session):
    assert type_in("down").stdout == "no agent runs on this machine\n"
    assert len(running()) == 1


# --- status


def test_status_lists_what_a_host_has(up):
    record = up("--name", "tower", "--cpus", "2")
    done = type_in("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"tower  127.0.0.1:{record.port}  2/2 CPU free  0 GPU")
    assert f"python {sys.version.split()[0]}  torch {version('torch')}" in done.stdout


def test_status_as_json_has_hosts_devices_versions_and_libraries(up):
    up("--name", "tower")
    (host,) = json.loads(type_in("status", "--json").stdout)["hosts"]
    assert (host["name"], host["status"], host["workers"]) == ("tower", "up", [])
    assert host["devices"][-1]["kind"] == "cpu"
    assert host["memory_bytes"] > host["memory_used_bytes"] > 0
    assert {"python", "torch", "gpulayer"} <= set(host["versions"])
    assert isinstance(host["libraries"], dict)


def test_status_without_an_agent_says_what_to_type(own_folders):
    done = type_in("status")
    assert (done.returncode, done.stdout) == (1, "")
    assert "gpulayer up" in done.stderr


def test_status_of_a_host_that_is_not_there_is_lost_with_its_reason(up):
    record, port = up("--name", "tower"), free_port()
    done = type_in("status", f"127.0.0.1:{record.port}", f"127.0.0.1:{port}")
    assert done.returncode == 1
    up_line, lost_line = done.stdout.splitlines()
    assert up_line.startswith("tower ")
    assert lost_line.startswith(f"127.0.0.1:{port}  lost: ")
    assert "nothing listens" in lost_line


def test_status_shows_an_embedded_agent_too(session):
    assert "this machine only" in type_in("status").stdout
