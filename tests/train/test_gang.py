"""Two ranks over gloo end where one process on the doubled batch ends."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from gpulayer.errors import TrainingError, UsageError
from gpulayer.resources import Device, Host
from gpulayer.train import checkpoint as files
from gpulayer.train.callbacks import Callback, EarlyStopping, ModelCheckpoint
from gpulayer.train.gang import resolve
from gpulayer.train.module import LightningModule
from gpulayer.train.trainer import Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks have no path to this file
pytestmark = pytest.mark.timeout(120)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def data(n=46):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class RandomOrder(Sampler):
    """A sampler of one's own, drawing from the global generator."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n)[torch.randperm(self.n)].tolist())

    def __len__(self):
        return self.n


def fit(world_size, net, batch_size, optimizer=SGD, val=None, trainer=None, **loading):
    torch.manual_seed(9)
    loader = DataLoader(data(), batch_size=batch_size, **(loading or {"shuffle": True}))
    trainer = {"max_epochs": 3, **QUIET, **(trainer or {})}
    return Trainer(num_nodes=world_size, **trainer).fit(
        net, loader, val, loss="cross_entropy", optimizer=optimizer, metrics="accuracy" if val else None
    )


CASES = {
    "shuffle, last batch uneven": ({}, {}),
    "one sample in the last batch": ({"shuffle": True, "half": 3}, {}),
    "accumulation and clipping": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "drop_last and loader workers": ({"shuffle": True, "drop_last": True, "num_workers": 1}, {}),
    "a sampler of one's own": ({"sampler": RandomOrder(46)}, {"max_steps": 5, "max_epochs": -1}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_where_one_process_on_the_doubled_batch_ends(gangs, case):
    loading, trainer = dict(CASES[case][0]), CASES[case][1]
    half = loading.pop("half", 4)
    one, two = make_net(), make_net()
    alone = fit(1, one, 2 * half, trainer=trainer, **loading)
    before = [id(p) for p in two.parameters()]
    together = fit(2, two, half, trainer=trainer, **loading)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=0)
    assert [id(p) for p in two.parameters()] == before
    assert together.metrics["train_loss"] == pytest.approx(alone.metrics["train_loss"], abs=1e-5)
    assert (together.steps, together.world_size) == (alone.steps, 2)


def test_two_ranks_train_an_optimizer_instance_and_hand_back_its_state(gangs):
    one, two = make_net(), make_net()
    fit(1, one, 8, optimizer=ADAM)
    optimizer = ADAM(two.parameters())
    fit(2, two, 4, optimizer=optimizer)
    assert torch.allclose(one[0].weight, two[0].weight, atol=1e-5, rtol=0)
    assert optimizer.state[two[0].weight]["step"] == 18


def test_two_ranks_validate_every_sample_once(gangs):
    val = DataLoader(data(7), batch_size=2)
    net = make_net()
    result = fit(2, net, 4, val=val)
    x, y = data(7).tensors
    with torch.no_grad():
        assert result.metrics["val_loss"] == pytest.approx(functional.cross_entropy(net(x), y).item(), abs=1e-6)
        assert result.metrics["val_accuracy"] == pytest.approx((net(x).argmax(1) == y).float().mean().item(), abs=1e-6)


class Net(LightningModule):
    def __init__(self, fail_on_rank=None):
        super().__init__()
        self.net = make_net()
        self.fail_on_rank = fail_on_rank
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        if self.fail_on_rank == self.global_rank and batch_idx == 1:
            raise KeyError("not in this batch")
        self.seen += 1
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("world", self.trainer.world_size, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("count", float(len(batch[0])), reduce_fx="sum")

    def train_dataloader(self):
        return DataLoader(data(), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data(9), batch_size=2)

    def configure_optimizers(self):
        return SGD(self.parameters())


class Notes(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append((trainer.current_epoch, trainer.global_rank))


def test_two_ranks_bring_logs_checkpoints_and_callbacks_to_the_caller(gangs, tmp_path, capfd):
    module, notes = Net(), Notes()
    saver, stopper = ModelCheckpoint(monitor="loss"), EarlyStopping("val_loss", patience=50)
    trainer = Trainer(
        num_nodes=2, max_epochs=2, callbacks=[notes, saver, stopper], default_root_dir=tmp_path, log_every_n_steps=2
    )
    result = trainer.fit(module)
    assert notes.epochs == [(0, 0), (1, 0)]
    assert module.seen == 12
    assert result.metrics["count"] == 9
    assert result.metrics["world"] == 2
    saved = files.load(result.best_model_path)
    assert torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight)
    assert saved["global_step"] == trainer.global_step == 12
    rows = (tmp_path / "gpulayer_logs/version_0/metrics.csv").read_text().splitlines()
    assert {"loss_step", "loss_epoch", "val_loss"} <= set(rows[0].split(","))
    assert capfd.readouterr().err.count("epoch 1/2  step 6") == 1
    assert gangs[0].published[-1]["ranks"] == 2
    assert module._trainer is None
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.equal(files.load(tmp_path / "after.ckpt")["state_dict"]["net.0.weight"], module.net[0].weight)


def test_the_failing_rank_is_named_with_its_error(gangs):
    trainer = Trainer(num_nodes=2, max_epochs=1, **QUIET)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(Net(fail_on_rank=1))
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(process.poll() is not None for process in gangs[0].processes)
    assert trainer.fit(Net()).steps == 6


class Broken(Callback):
    def __init__(self):
        self.heard = []

    def on_exception(self, trainer, pl_module, exception):
        self.heard.append((type(exception), type(pl_module)))
        raise OSError("no disk")


def test_the_callers_callbacks_hear_of_a_failed_run_and_cannot_hide_it(gangs, caplog):
    broken = Broken()
    with pytest.raises(TrainingError, match="not in this batch") as caught:
        Trainer(num_nodes=2, max_epochs=1, callbacks=[broken], **QUIET).fit(Net(fail_on_rank=0))
    assert broken.heard == [(TrainingError, Net)]
    assert isinstance(caught.value.__cause__, KeyError)
    assert "on_exception failed while the run ended with TrainingError" in caplog.text


def test_a_loader_too_small_for_one_global_batch_is_refused(gangs):
    loader = DataLoader(data(7), batch_size=4, drop_last=True)
    with pytest.raises(UsageError, match="one global batch is 8 samples"):
        Trainer(num_nodes=2, **QUIET).fit(make_net(), loader, loss="mse", optimizer=SGD)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Stream(), "IterableDataset"),
        (DataLoader(data(), batch_sampler=[[0, 1], [2, 3]]), "batch_sampler"),
        (DataLoader(data(), batch_size=None), "batch_size=None"),
        ([(torch.ones(2, 5), torch.ones(2))], "is a list"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused(gangs, loader, message):
    with pytest.raises(UsageError, match=message):
        Trainer(num_nodes=2, **QUIET).fit(make_net(), loader, loss="mse", optimizer=SGD)
    assert gangs == []


def test_auto_takes_what_the_hosts_have():
    def host(gpus):
        return Host(**{**FIELDS, "devices": tuple(Device("cuda", i, "g") for i in range(gpus))})

    assert resolve("auto", "auto", 2, [host(0), host(0)]) == (1, "cpu")
    assert resolve("auto", "auto", 2, [host(4), host(2), host(0)]) == (2, "gpu")
    assert resolve(4, "auto", 2, [host(4), host(2)]) == (4, "gpu")  # more than there are: Gang.reserve says so
    assert resolve(2, "auto", 1, [host(0), host(1)]) == (2, "gpu")
    assert resolve("auto", "auto", 2, [host(4), host(0)]) == (1, "gpu")
    assert resolve(2, "auto", 1, [host(0), host(0)]) == (2, "cpu")
    assert resolve(2, "auto", 1, [Host(**{**FIELDS, "devices": (Device("metal", 0, "M"),)})]) == (2, "cpu")
    assert resolve(2, "cpu", 1, [host(4)]) == (2, "cpu")
    assert resolve("auto", "gpu", 1, [host(0)]) == (1, "gpu")
    with pytest.raises(UsageError, match="mps"):
        resolve(2, "mps", 1, [])


FIELDS = {"id": bytes(8), "name": "h", "address": "h:1", "cpus": 4, "memory_bytes": 1}


class EndsEarlyOnOneRank(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.global_rank == 1 and batch_idx == 1 else None


def test_a_rank_that_would_end_its_epoch_alone_is_refused(gangs):
    with pytest.raises(UsageError, match="returned -1: with several devices"):
        Trainer(num_nodes=2, max_epochs=1, **QUIET).fit(EndsEarlyOnOneRank())


def test_batch_norm_over_ranks_is_warned_of_once(gangs, caplog):
    def fit_with(*layers):
        caplog.clear()
        net = nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3))
        fit(2, net, 4, trainer={"max_epochs": 1})
        return [record.message for record in caplog.records if "BatchNorm" in record.message]

    assert fit_with(nn.BatchNorm1d(8), nn.BatchNorm1d(8)) == [
        "the model has 2 BatchNorm layers: each rank normalizes by its own batches, and ends apart from one process"
    ]
    assert fit_with(nn.Tanh()) == []


def test_two_ranks_name_step_and_epoch_values_as_one_process_does(gangs):
    trainer = Trainer(num_nodes=2, max_epochs=1, **QUIET)
    trainer.fit(Net())
    assert {"loss", "loss_step", "loss_epoch", "world"} <= set(trainer.callback_metrics)
    assert {"loss_step", "loss_epoch", "world"} <= set(trainer.logged_metrics)
    assert "loss" not in trainer.logged_metrics
