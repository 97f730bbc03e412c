"""What an agent shows of itself."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from dataclasses import replace

import pytest

import gpulayer
from gpulayer.agent import state
from gpulayer.agent.leases import Leases
from gpulayer.resources import Device
from tests.agents import Inside, inside
from tests.conftest import wait_until

GPUS = tuple(Device("cuda", index, "a GPU", f"GPU-{index}", 1 << 34) for index in range(2))


@pytest.fixture
def host(own_folders):
    with inside(name="tower", zone="lab", cpus=4) as host:
        agent = host.agent
        agent.host = replace(agent.host, devices=(*GPUS, *agent.host.devices))
        agent.leases = Leases(agent.host, agent.pool, lambda: None)
        yield host


def snapshot(host: Inside) -> dict:
    found = host.do(lambda: state.snapshot(host.agent))
    assert json.loads(json.dumps(found)) == found, "plain values only"
    return found


def test_idle_host_shows_what_it_has(host):
    seen = snapshot(host)
    assert (seen["name"], seen["zone"], seen["status"], seen["address"]) == ("tower", "lab", "up", "")
    assert seen["id"] == host.agent.id.hex()
    assert (seen["cpus"], seen["cpus_free"], seen["waiting"]) == (4, 4, 0)
    assert 0 < seen["memory_used_bytes"] < seen["memory_bytes"]
    assert 0 <= seen["uptime_s"] < 60
    assert seen["workers"] == seen["runs"] == []
    gpu, *_, cpu = seen["devices"]
    assert (gpu["kind"], gpu["index"], gpu["uuid"], gpu["leased_by"]) == ("cuda", 0, "GPU-0", [])
    assert (gpu["utilization"], gpu["memory_used_bytes"]) == (None, None), "what nobody measures is not made up"
    assert cpu["kind"] == "cpu"


def test_worker_shows_its_lease_its_owner_and_what_it_does(host):
    @gpulayer.remote
    class Busy:
        def work(self, seconds):
            time.sleep(seconds)

    with gpulayer.connect():
        busy = Busy.options(name="bee", num_gpus=1, num_cpus=1).remote()
        gpulayer.get(busy.work.remote(0))
        wait_until(lambda: snapshot(host)["workers"][0]["calls"] == 2, 5, "the count of calls: constructor and method")
        pending = busy.work.remote(60)
        wait_until(lambda: snapshot(host)["workers"][0]["status"] == "busy", 5, "the notice that it is busy")
        seen = snapshot(host)
        (worker,) = seen["workers"]
        assert (worker["label"], worker["name"], worker["kind"], worker["what"]) == ("Busy", "bee", "actor", "Busy.work")
        assert (worker["cpus"], worker["gpus"], worker["devices"]) == (1, 1, [0])
        assert worker["pid"] > 0
        assert worker["memory_bytes"] > 1 << 20
        assert 0 <= worker["busy_s"] < 30
        assert worker["driver"].endswith(f":{os.getpid()}")
        assert [device["leased_by"] for device in seen["devices"]] == [["Busy"], [], []]
        assert seen["cpus_free"] == 3
        gpulayer.cancel(pending)
        wait_until(lambda: snapshot(host)["workers"][0]["status"] == "idle", 5, "the notice that it is idle")
        assert snapshot(host)["workers"][0]["busy_s"] == 0
    wait_until(lambda: snapshot(host)["workers"] == [], 5, "the end of the worker")


def test_requests_that_wait_are_counted(host):
    with gpulayer.connect():
        sleep = gpulayer.remote(time.sleep).options(num_cpus=4)
        pending = [sleep.remote(60), sleep.remote(61)]
        wait_until(lambda: snapshot(host)["waiting"] >= 1, 10, "a request that waits")
        assert snapshot(host)["cpus_free"] == 0
        for ref in pending:
            gpulayer.cancel(ref, force=True)


def test_worker_that_starts_is_shown_as_starting(host):
    def ask() -> dict:
        body = {"cpus": 1, "gpus": 0, "kind": "task", "label": "young"}
        host.agent.leases.request(b"nobody", body, lambda answer: None)
        return state.snapshot(host.agent)["workers"][0]

    young = host.do(ask)
    assert (young["status"], young["pid"], young["memory_bytes"], young["driver"]) == ("starting", 0, 0, "")
    host.do(lambda: host.agent.leases.end_all_of(b"nobody", "enough"))


def test_training_run_is_shown_until_its_driver_goes(host):
    from gpulayer.runtime import session as sessions

    with gpulayer.connect():
        session = sessions.current()
        for step in (1, 2):
            session.io.post(lambda step=step: session.endpoint.tell(session.endpoint.home, "run", run={"id": "r", "step": step}))
        me = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"
        wait_until(lambda: snapshot(host)["runs"] == [{"id": "r", "step": 2, "driver": me}], 5, "the run")
    wait_until(lambda: snapshot(host)["runs"] == [], 5, "the end of the run")
