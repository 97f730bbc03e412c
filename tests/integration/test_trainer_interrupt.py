"""Ctrl-C at every stage of a run: KeyboardInterrupt reaches the caller, nothing is left, session and Trainer work again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.conftest import is_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]

COMMON = """
import glob, os, pathlib, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import gpulayer

def wait(stage):
    print("READY", stage, flush=True)
    while True:
        time.sleep(0.01)

class Net(gpulayer.LightningModule):
    def __init__(self, hang=""):
        super().__init__()
        self.net = torch.nn.Linear(5, 3)
        self.hang = hang
    def training_step(self, batch, batch_idx):
        if self.hang and batch_idx == 1 and self.global_rank == 0:
            wait(self.hang)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Slow:
    def __reduce__(self):
        wait("pickling")

class Heard(gpulayer.Callback):
    def __init__(self):
        self.heard = 0
    def on_exception(self, trainer, pl_module, exception):
        self.heard += isinstance(exception, KeyboardInterrupt) and trainer.interrupted

data = TensorDataset(torch.randn(16, 5), torch.randint(0, 3, (16,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
fsync = os.fsync

def stage(name, trainer, model, save=False):
    if save:
        os.fsync = lambda fd: wait(name)
    try:
        trainer.fit(model, loader)
    except KeyboardInterrupt:
        os.fsync = fsync
        left = [str(path) for path in pathlib.Path("root").rglob("*.tmp")]
        checkpoints = glob.glob("root/**/*.ckpt", recursive=True)
        print("CAUGHT", name, left, len(checkpoints), flush=True)
    else:
        print("NOT INTERRUPTED", name, flush=True)
    steps = trainer.fit(Net(), loader).steps
    print("AGAIN", name, steps, callback.heard, flush=True)
    for path in glob.glob("root/**/*.ckpt", recursive=True):
        os.unlink(path)

callback = Heard()
options = dict(max_epochs=1, accelerator="cpu", default_root_dir="root", callbacks=[callback], enable_progress_bar=False)
"""


class Script:
    """A script that says where it is."""

    def __init__(self, source, folder):
        path = folder / "script.py"
        path.write_text(COMMON + textwrap.dedent(source))
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def wait_for(self, word):
        """The rest of the next line that has `word` in it."""
        for line in self.process.stdout:
            if word in line:
                return line.partition(word)[2].strip()
        raise AssertionError(f"the script ended without {word!r}: {self.errors.read_text()}")

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def interrupt_at(self, stage, checkpoints=0):
        """Interrupt it in `stage`; what its next run came to: steps, and how often the callback has heard of Ctrl-C."""
        assert self.wait_for("READY") == stage
        self.interrupt()
        assert self.wait_for("CAUGHT") == f"{stage} [] {checkpoints}"
        name, *numbers = self.wait_for("AGAIN").split()
        assert name == stage
        return [int(number) for number in numbers]

    def end(self):
        """Let it go on to its end; the exit code."""
        self.process.communicate("", timeout=40)
        return self.process.returncode

    def workers(self):
        """What runs below its agents' zygotes."""
        agents = psutil.Process(self.process.pid).children()
        zygotes = [zygote for agent in agents for zygote in agent.children()]
        return [pid for zygote in zygotes for pid in (child.pid for child in zygote.children(recursive=True)) if not is_gone(pid)]


@pytest.fixture
def script(tmp_path):
    running = []

    def start(source, **env):
        running.append(Script(source, tmp_path, **env))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.communicate()


def test_interrupt_in_this_process_reaches_the_caller_who_trains_again(script):
    run = script("""
        trainer = gpulayer.Trainer(**options)
        stage("step", trainer, Net("step"))
        stage("save", trainer, Net(), save=True)
    """)
    assert run.interrupt_at("step") == [4, 1]
    assert run.interrupt_at("save") == [4, 2]
    assert run.end() == 0


@pytest.mark.slow
def test_interrupt_of_a_gang_reaches_the_caller_who_trains_again_in_the_same_session(script):
    run = script("""
        from threading import Thread
        from gpulayer.runtime.snapshot import collect

        def watch():
            while not any(worker["status"] == "starting" for host in collect()["hosts"] for worker in host["workers"]):
                pass
            print("READY reserve", flush=True)

        with gpulayer.connect(local=2):
            trainer = gpulayer.Trainer(num_nodes=2, **options)
            slow = Net()
            slow.slow = Slow()
            Thread(target=watch).start()
            stage("reserve", trainer, Net("never"))
            stage("pickling", trainer, slow)
            stage("step", trainer, Net("step"))
            stage("save", trainer, Net(), save=True)
            print("READY end", flush=True)
            sys.stdin.read()
    """)
    assert run.interrupt_at("reserve") == [2, 1]
    assert run.interrupt_at("pickling") == [2, 2]
    assert run.interrupt_at("step") == [2, 3]
    assert run.interrupt_at("save") == [2, 4]
    assert run.wait_for("READY") == "end"
    wait_until(lambda: run.workers() == [], 5, "the end of all workers")
    assert run.end() == 0


@pytest.mark.slow
def test_interrupt_that_nobody_catches_ends_the_script_and_all_that_it_started(script):
    run = script("""
        gpulayer.connect(local=2)
        gpulayer.Trainer(num_nodes=2, **options).fit(Net("step"), loader)
    """)
    assert run.wait_for("READY") == "step"
    below = [child.pid for child in psutil.Process(run.process.pid).children(recursive=True)]
    assert len(below) >= 6  # agents, zygotes, workers
    run.interrupt()
    assert run.end() == -signal.SIGINT
    assert run.errors.read_text().rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: all(map(is_gone, below)), 5, "the end of all that it started")


def test_interrupt_of_connect_leaves_nothing_and_connect_works_again(script):
    run = script("""
        print("READY connect", flush=True)
        try:
            gpulayer.connect(local=2)
        except KeyboardInterrupt:
            print("CAUGHT", flush=True)
        sys.stdin.readline()
        with gpulayer.connect():
            print("AGAIN", len(gpulayer.cluster().hosts), flush=True)
    """)
    assert run.wait_for("READY") == "connect"
    process = psutil.Process(run.process.pid)
    wait_until(lambda: len(process.children()) == 2, 10, "both agents")
    agents = [child.pid for child in process.children(recursive=True)]
    run.interrupt()
    run.wait_for("CAUGHT")
    wait_until(lambda: all(map(is_gone, agents)), 5, "the end of both agents")
    run.process.stdin.write("\n")
    run.process.stdin.flush()
    assert run.wait_for("AGAIN") == "1"
    assert run.end() == 0
