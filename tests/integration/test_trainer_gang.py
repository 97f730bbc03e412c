"""The Trainer on the real runtime: two agents, a worker for each rank, gloo between them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpulayer
from gpulayer.errors import ActorDiedError, PlacementError, TrainingError, UsageError, VersionMismatchError
from gpulayer.runtime import session as sessions
from gpulayer.train import checkpoint as files
from tests.conftest import is_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("t")
    return {"GPULAYER_HOME": str(base / "home"), "GPULAYER_RUNTIME_DIR": str(base / "run"), "GPULAYER_LOG": "warning"}


@pytest.fixture(scope="module")
def hosts(folders):
    """One session with two hosts for the whole module: starting one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in folders.items():
            patch.setenv(name, value)
        patch.delenv("GPULAYER_HOSTS", raising=False)
        gpulayer.connect(local=2)
    fit_net(make_net(), 4, num_nodes=2, max_epochs=1)  # each host imports once what its workers need
    yield
    gpulayer.disconnect()


@pytest.fixture
def two(hosts):
    """The session, with nothing running in it before and after a test."""
    yield
    wait_until(lambda: workers() == [], 5, "the end of all workers")


def workers():
    """Processes that work for us: everything below the agents and their zygotes."""
    found = []
    for agent in psutil.Process().children():
        for zygote in agent.children():
            found += [child.pid for child in zygote.children(recursive=True)]
    return [pid for pid in found if not is_gone(pid)]


def data(n=46):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def fit_net(net, batch_size, dataset=None, loss="cross_entropy", loading=None, **trainer):
    torch.manual_seed(9)
    loader = DataLoader(data() if dataset is None else dataset, batch_size=batch_size, shuffle=True, **(loading or {}))
    return gpulayer.Trainer(**{"max_epochs": 2, **QUIET, **trainer}).fit(net, loader, loss=loss, optimizer=SGD)


def assert_close(one, two):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=0)


# --- the same numbers, and everything back in the caller's hands


class Net(gpulayer.LightningModule):
    """What users write: buffers, epoch and step values, validation, a hook."""

    def __init__(self, act=None):
        super().__init__()
        self.save_hyperparameters(ignore="act")
        self.net = make_net()
        self.act = act or (lambda x: x)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = functional.cross_entropy(self.act(self.net(batch[0])), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("count", float(len(batch[0])), reduce_fx="sum")

    def train_dataloader(self):
        return DataLoader(data(), batch_size=8 // self.trainer.world_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data(9), batch_size=2)

    def configure_optimizers(self):
        return SGD(self.parameters())


def test_two_hosts_end_with_the_weights_of_one_process_on_the_doubled_batch(two):
    one, both = make_net(), make_net()
    tensors = list(both.parameters())
    fit_net(one, 8)
    result = fit_net(both, 4, num_nodes=2)
    assert_close(one, both)
    assert all(a is b for a, b in zip(tensors, both.parameters(), strict=True))
    assert (result.world_size, result.steps, result.epochs) == (2, 12, 2)


class Notes(gpulayer.Callback):
    """Keeps plain values, an object of a class of its own module, and what cannot travel."""

    def __init__(self):
        self.epochs = []
        self.last = None
        self.failures = []

    def on_train_start(self, trainer, pl_module):
        self.trainer, self.module, self.lock = trainer, pl_module, threading.Lock()

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append((trainer.current_epoch, trainer.global_rank, trainer.world_size))
        self.last = Point(trainer.global_step, pl_module.seen.item())

    def on_exception(self, trainer, pl_module, exception):
        self.failures.append((type(exception), trainer.interrupted))


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y


def test_module_metrics_files_and_callbacks_come_back_to_the_caller(two, tmp_path, capfd):
    factor = torch.tensor(0.5)
    one, both = Net(lambda x: x * factor), Net(lambda x: x * factor)
    torch.manual_seed(9)
    alone = gpulayer.Trainer(max_epochs=2, **QUIET).fit(one)
    torch.manual_seed(9)
    notes, seen, weight = Notes(), both.seen, both.net[0].weight
    trainer = gpulayer.Trainer(num_nodes=2, max_epochs=2, default_root_dir=tmp_path, callbacks=notes, log_every_n_steps=2)
    result = trainer.fit(both)
    assert_close(one, both)
    assert both.seen is seen
    assert both.net[0].weight is weight
    assert both.seen == 12
    assert (trainer.global_step, trainer.current_epoch, trainer.world_size) == (12, 2, 2)
    assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=1e-5)
    assert trainer.callback_metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], abs=1e-5)
    assert result.metrics["count"] == 9
    assert notes.epochs == [(0, 0, 2), (1, 0, 2)]
    assert (type(notes.last), notes.last.x, notes.last.y) == (Point, 12, 12)
    assert not hasattr(notes, "trainer")
    saved = files.load(result.best_model_path)
    assert result.best_model_path.startswith(str(tmp_path / "gpulayer_logs/version_0/checkpoints"))
    assert torch.equal(saved["state_dict"]["net.0.weight"], both.net[0].weight)
    assert torch.equal(Net.load_from_checkpoint(result.best_model_path).net[0].weight, both.net[0].weight)
    header, *rows = (tmp_path / "gpulayer_logs/version_0/metrics.csv").read_text().splitlines()
    assert {"epoch", "step", "loss_step", "loss_epoch", "val_loss"} <= set(header.split(","))
    assert len(rows) == 6 + 2 * 2
    assert capfd.readouterr().err.count("epoch 2/2  step 12  loss") == 1


class Grown(Net):
    """Its head is made where the data are known."""

    def __init__(self):
        super().__init__()
        self.head = None

    def setup(self, stage):
        self.head = nn.Sequential(nn.Linear(3, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.net.register_buffer("mark", torch.ones(2))
        self.act = lambda x: self.head(x) + self.bias


def test_parts_made_in_setup_come_back_to_the_caller(two):
    one, both = Grown(), Grown()
    torch.manual_seed(9)
    gpulayer.Trainer(max_epochs=2, **QUIET).fit(one)
    torch.manual_seed(9)
    gpulayer.Trainer(max_epochs=2, num_nodes=2, **QUIET).fit(both)
    assert_close(one, both)
    assert list(one.state_dict()) == list(both.state_dict())
    assert both.bias.requires_grad


def test_loader_workers_run_inside_the_workers_of_a_gang(two):
    one, both = make_net(), make_net()
    fit_net(one, 8)
    fit_net(both, 4, num_nodes=2, loading={"num_workers": 2, "persistent_workers": True})
    assert_close(one, both)


def test_two_fits_in_a_row_and_one_inside_a_running_loop_work_in_one_session(two):
    net, again = make_net(), make_net()

    async def cell():
        return fit_net(net, 4, num_nodes=2, max_epochs=1)

    for _ in range(2):
        assert asyncio.run(cell()).steps == 6
        fit_net(again, 8, max_epochs=1)
        assert_close(net, again)


def test_random_numbers_of_the_caller_stand_still_while_others_train(two):
    net = make_net()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    fit_net(net, 4, num_nodes=2, max_epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_nan_loss_is_told_and_training_goes_on(two, caplog):
    def loss(y_hat, y):
        return functional.cross_entropy(y_hat, y) * float("nan")

    with caplog.at_level(logging.WARNING, "gpulayer"):
        result = fit_net(make_net(), 4, num_nodes=2, max_epochs=1, loss=loss)
    assert result.nan_loss
    assert result.steps == 6
    assert [record.message.partition(" (rank")[0] for record in caplog.records] == ["the loss was NaN at step 1"]


# --- what goes wrong on a rank


class Failing(Net):
    """Does something bad in the second step of one rank."""

    def __init__(self, rank, deed):
        super().__init__()
        self.rank, self.deed = rank, deed

    def training_step(self, batch, batch_idx):
        if self.global_rank == self.rank and batch_idx == 1:
            self.deed()
        return super().training_step(batch, batch_idx)


class OutOfLuck(Exception):
    """A type of the user's own."""


def bad_luck():
    raise OutOfLuck("number 13")


def exit_now():
    os._exit(9)


def kill_now():
    os.kill(os.getpid(), signal.SIGKILL)


def fail(model, loader=None, callbacks=None):
    """Fit over two hosts, which fails within five seconds; returns the error."""
    trainer = gpulayer.Trainer(num_nodes=2, max_epochs=1, callbacks=callbacks, **QUIET)
    began = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        trainer.fit(model, loader)
    assert time.monotonic() - began < 5
    return caught.value


@pytest.mark.parametrize("rank", [0, 1])
def test_first_failing_rank_is_named_with_the_users_exception(two, rank):
    notes = Notes()
    error = fail(Failing(rank, bad_luck), callbacks=[notes])
    assert (error.rank, error.host) == (rank, f"local-{rank + 1}")
    assert f"rank {rank} on host local-{rank + 1}" in str(error)
    assert isinstance(error.__cause__, OutOfLuck)
    trace = str(error.__cause__.__cause__)
    assert "bad_luck" in trace
    assert "test_trainer_gang.py" in trace
    assert notes.failures == [(TrainingError, False)]
    assert fit_net(make_net(), 4, num_nodes=2, max_epochs=1).steps == 6


def test_no_failure_gets_lost_in_many_runs(two):
    """The end of a process group while the GIL is held can hang: once in twenty runs it did."""
    for run in range(12):
        assert fail(Failing(run % 2, bad_luck)).rank == run % 2


@pytest.mark.parametrize(("deed", "cause"), [(exit_now, "exit code 9"), (kill_now, "SIGKILL")])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_whose_process_dies_is_named_with_how(two, deed, cause, rank):
    error = fail(Failing(rank, deed))
    assert (error.rank, error.host) == (rank, f"local-{rank + 1}")
    assert isinstance(error.__cause__, ActorDiedError)
    assert cause in str(error)
    assert f"rank {rank} on host local-{rank + 1}" in str(error)


class Hole(Dataset):
    """Has a bad item, which one rank meets."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 9:
            raise ValueError("item 9 is broken")
        return torch.ones(5), 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_train_loader_that_raises_on_one_rank_is_the_cause(two, num_workers):
    error = fail(Net(), DataLoader(Hole(), batch_size=4, num_workers=num_workers))
    assert error.rank == 0  # items 8 to 11
    assert isinstance(error.__cause__, ValueError)
    assert "item 9 is broken" in str(error)


# --- what cannot work


class Stranger(nn.Module):
    def forward(self, x):
        return x


def test_bad_input_is_refused_with_nothing_started(two):
    net, loader = make_net(), DataLoader(data(), batch_size=4)
    trainer = gpulayer.Trainer(num_nodes=2, max_epochs=1, **QUIET)
    with pytest.raises(UsageError, match="train loader is empty"):
        trainer.fit(net, DataLoader(data(0), batch_size=4), loss="mse", optimizer=SGD)
    with pytest.raises(UsageError, match="has no parameters"):
        trainer.fit(Stranger(), loader, loss="mse", optimizer=SGD)
    with pytest.raises(UsageError, match="belong to another model"):
        trainer.fit(net, loader, loss="mse", optimizer=SGD(make_net().parameters()))
    assert trainer.fit(net, loader, loss="cross_entropy", optimizer=SGD(net.parameters())).steps == 6


@pytest.mark.parametrize(("asked", "message"), [({"num_nodes": 3}, "local=3"), ({"num_nodes": 2, "devices": 64}, "64 CPU each")])
def test_more_than_there_is_is_refused_at_once_with_what_each_host_has(two, asked, message, tmp_path):
    began = time.monotonic()
    with pytest.raises(PlacementError, match=message) as caught:
        fit_net(make_net(), 4, **asked, logger=True, default_root_dir=tmp_path)
    assert time.monotonic() - began < 1
    assert list(tmp_path.iterdir()) == []
    assert "local-1: " in str(caught.value)
    assert "local-2: " in str(caught.value)
    assert workers() == []


def test_gpus_that_no_host_has_are_refused(two):
    if any(host.gpus for host in gpulayer.cluster().hosts):
        pytest.skip("the hosts have GPUs")
    with pytest.raises(PlacementError, match="GPU"):
        fit_net(make_net(), 4, num_nodes=2, accelerator="gpu")


def test_hosts_with_different_torch_are_refused(two):
    known = sessions.current().hosts
    last = list(known)[-1]
    genuine = known[last]
    known[last] = replace(genuine, versions={**genuine.versions, "torch": "1.0.0"})
    try:
        with pytest.raises(VersionMismatchError, match="local-2") as caught:
            fit_net(make_net(), 4, num_nodes=2)
    finally:
        known[last] = genuine
    assert torch.__version__ in str(caught.value)
    assert "1.0.0" in str(caught.value)


def test_values_that_cannot_travel_are_named(two):
    net = Net()
    net.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        gpulayer.Trainer(num_nodes=2, max_epochs=1, **QUIET).fit(net)


# --- while it runs


class UntilSeen(gpulayer.Callback):
    """Ends the run when a file appears."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if self.path.exists():
            trainer.should_stop = True


def test_top_shows_the_run_while_it_runs_and_how_it_ended(two, folders, tmp_path):
    mark, seen = tmp_path / "seen", []

    def look():
        try:
            while not (seen and [run for run in runs_in(seen[-1]) if run["state"] == "running" and run["step"]]):
                seen.append(top(folders))
        finally:
            mark.touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    result = gpulayer.Trainer(num_nodes=2, max_epochs=10**6, callbacks=[UntilSeen(mark)], **QUIET).fit(Net())
    watcher.join()
    assert result.stopped == "trainer.should_stop was set"
    run = next(run for run in runs_in(seen[-1]) if run["state"] == "running")
    assert (run["name"], run["ranks"], run["max_steps"]) == ("fit", 2, 6 * 10**6)
    assert run["loss"] > 0
    assert run["samples_s"] > 0
    busy = [worker["label"] for host in seen[-1]["hosts"] for worker in host["workers"] if worker["status"] == "busy"]
    assert sorted(busy) == ["fit rank 0", "fit rank 1"]
    assert [each["state"] for each in runs_in(top(folders)) if each["id"] == run["id"]] == ["finished"]


def runs_in(snapshot):
    return [run for host in snapshot["hosts"] for run in host["runs"]]


def top(folders):
    command = [sys.executable, "-m", "gpulayer.cli", "top", "--json"]
    env = {**os.environ, **folders, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
