"""A gang of real processes and real gloo, without the runtime: what `gpulayer.runtime.gang.Gang` promises, and no more."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Listener, wait
from pathlib import Path

import cloudpickle
import pytest

from gpulayer.errors import TrainingError


@dataclass(frozen=True)
class FakeMember:
    rank: int
    local_rank: int
    node_rank: int
    host: str = "here"
    ip: str = "127.0.0.1"
    devices: tuple[int, ...] = ()


class FakeGang:
    def __init__(self, world_size, folder):
        self.members = tuple(FakeMember(rank, 0, rank) for rank in range(world_size))
        self.published = []
        self.processes, self.connections = [], []
        for rank in range(world_size):
            with Listener(str(folder / f"r{rank}"), "AF_UNIX") as listener:
                worker = str(Path(__file__).with_name("fake_worker.py"))
                self.processes.append(subprocess.Popen([sys.executable, worker, listener.address]))
                self.connections.append(listener.accept())

    def run(self, function, args_per_rank, on_event=None):
        for connection, args in zip(self.connections, args_per_rank, strict=True):
            connection.send_bytes(cloudpickle.dumps((function, args)))
        results, open_ = {}, dict(zip(self.connections, range(len(self.members)), strict=True))
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
        for process in self.processes:
            process.kill()
            process.wait()
        for connection in self.connections:
            connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop()


@pytest.fixture
def gangs(monkeypatch, tmp_path_factory):
    """Makes the Trainer use fake gangs; the list fills with those that it reserved."""
    made = []
    import gpulayer.train.gang

    def reserve(job):
        count = job.arguments.num_nodes * (job.arguments.devices if isinstance(job.arguments.devices, int) else 1)
        made.append(FakeGang(count, tmp_path_factory.mktemp("g")))
        return made[-1]

    monkeypatch.setattr(gpulayer.train.gang, "reserve", reserve)
    yield made
    for gang in made:
        gang.stop()
