"""A gang of real processes and real gloo, without the runtime: what `gpulayer.runtime.gang.Gang` promises, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Listener, wait
from pathlib import Path

import cloudpickle
import pytest

import gpulayer
from gpulayer.errors import TrainingError


@dataclass(frozen=True)
class FakeMember:
    rank: int
    local_rank: int
    node_rank: int
    host: str = "here"
    ip: str = "127.0.0.1"
    devices: tuple[int, ...] = ()


class Workers:
    """The processes behind a gang. They are kept from one gang to the next, for starting them takes seconds."""

    def __init__(self, world_size, folder):
        env = {**os.environ, "PYTHONPATH": str(Path(gpulayer.__path__[0]).parent)}
        worker = str(Path(__file__).with_name("fake_worker.py"))
        self.processes, self.connections = [], []
        for rank in range(world_size):
            with Listener(str(folder / f"r{rank}"), "AF_UNIX") as listener:
                self.processes.append(subprocess.Popen([sys.executable, worker, listener.address], env=env))
                self.connections.append(listener.accept())

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for connection in self.connections:
            connection.close()


class FakeGang:
    def __init__(self, workers):
        self.workers = workers
        self.members = tuple(FakeMember(rank, 0, rank) for rank in range(len(workers.processes)))
        self.published = []

    @property
    def processes(self):
        return self.workers.processes

    def run(self, function, args_per_rank, on_event=None, *, common=()):
        for connection, args in zip(self.workers.connections, args_per_rank, strict=True):
            connection.send_bytes(cloudpickle.dumps((function, (*common, *args))))
        results, open_ = {}, dict(zip(self.workers.connections, range(len(self.members)), strict=True))
        while open_:
            for connection in wait(list(open_)):
                rank = open_[connection]
                kind, value = cloudpickle.loads(connection.recv_bytes())
                if kind == "event":
                    on_event(rank, value)
                    continue
                del open_[connection]
                if kind == "failed":
                    self.stop()
                    raise TrainingError(f"rank {rank} failed: {value}", rank=rank, host="here") from value
                results[rank] = value
        return [results[rank] for rank in range(len(self.members))]

    def publish(self, status):
        self.published.append(status)

    def stop(self):
        self.workers.stop()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            self.stop()


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    """Two workers, started again where a test has ended them."""
    kept = []

    def take(world_size):
        if kept and any(process.poll() is not None for process in kept[0].processes):
            kept.clear()
        if not kept:
            kept.append(Workers(world_size, tmp_path_factory.mktemp("g")))
        return kept[0]

    yield take
    for each in kept:
        each.stop()


@pytest.fixture
def gangs(monkeypatch, workers):
    """Makes the Trainer use fake gangs; the list fills with those that it reserved."""
    made = []
    import gpulayer.train.gang

    def reserve(job):
        devices = job.arguments.devices
        made.append(FakeGang(workers(job.arguments.num_nodes * (devices if isinstance(devices, int) else 1))))
        return made[-1]

    monkeypatch.setattr(gpulayer.train.gang, "reserve", reserve)
    return made
