from __future__ import annotations

import os

import pytest

import gpulayer
from gpulayer.errors import ConnectError
from gpulayer.runtime import records, snapshot
from tests.conftest import is_gone, wait_until


def test_collect_without_any_agent_says_what_to_type():
    with pytest.raises(ConnectError, match="gpulayer up"):
        snapshot.collect()


def test_collect_shows_workers_and_who_leases_what(two_hosts):
    @gpulayer.remote(num_cpus=1, host="local-2")
    class Thing:
        def pid(self):
            return os.getpid()

    thing = Thing.options(name="the-thing").remote()
    pid = gpulayer.get(thing.pid.remote())
    seen = {host["name"]: host for host in snapshot.collect()["hosts"]}
    assert set(seen) == {"local-1", "local-2"}
    assert seen["local-1"]["workers"] == []
    (worker,) = seen["local-2"]["workers"]
    assert (worker["pid"], worker["label"], worker["name"], worker["kind"]) == (pid, "Thing", "the-thing", "actor")
    assert seen["local-2"]["cpus_free"] == seen["local-2"]["cpus"] - 1
    assert gpulayer.get(thing.pid.remote()) == pid  # looking has disturbed nothing


def test_collect_shows_a_host_that_cannot_be_reached_as_lost(start_agent):
    _, ready = start_agent("--port", "0", "--name", "up")
    up, down = snapshot.collect([f"127.0.0.1:{ready['port']}", "127.0.0.1:1"])["hosts"]
    assert (up["name"], up["status"]) == ("up", "up")
    assert (down["name"], down["status"]) == ("127.0.0.1:1", "lost")
    assert "nothing listens" in down["error"]


def test_shut_down_ends_an_agent(start_agent, own_folders):
    process, ready = start_agent("--port", "0", "--name", "up")
    (record,) = records.read_all(own_folders / "run")
    assert snapshot.shut_down(record) == ready["pid"]
    assert process.wait(10) == 0
    wait_until(lambda: is_gone(ready["pid"]), 1)
    assert records.read_all(own_folders / "run") == []
