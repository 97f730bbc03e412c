"""A LightningModule in a run: hooks in Lightning's order, log, hparams, schedulers, loaders of its own."""

from __future__ import annotations

import copy
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from gpulayer.errors import UsageError
from gpulayer.train import checkpoint as files
from gpulayer.train.callbacks import Callback
from gpulayer.train.hooks import HOOKS, Hooks, is_overridden
from gpulayer.train.module import LightningDataModule, LightningModule
from gpulayer.train.trainer import Trainer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SGD = partial(torch.optim.SGD, lr=0.1)


def data(n=8):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.randint(0, 2, (n,), generator=generator))


class Net(LightningModule):
    def __init__(self, width=4, name="net"):
        super().__init__()
        self.save_hyperparameters(ignore="name")
        self.net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_loss": functional.cross_entropy(self.net(batch[0]), batch[1])}, prog_bar=True)

    def configure_optimizers(self):
        return SGD(self.parameters())


def loader(n=8):
    return DataLoader(data(n), batch_size=4)


def test_hooks_are_called_in_lightnings_order_callbacks_first():
    calls = []

    def note(owner, name):
        return lambda self, *args, **kwargs: calls.append((owner, name))

    left_out = {"on_exception", "on_epoch_metrics", "on_load_checkpoint", "on_save_checkpoint"}
    names = [name for name in HOOKS if name not in left_out]
    module = type("Hooked", (Net,), {name: note("module", name) for name in names})()
    callback = type("Noted", (Callback,), {name: note("callback", name) for name in names})()
    Trainer(max_epochs=1, callbacks=callback, **QUIET).fit(module, loader(4), loader(4))
    assert [c for c in calls if c[0] == "module"] == [("module", name) for owner, name in calls if owner == "callback"]
    assert calls[0] == ("callback", "setup")
    assert [name for owner, name in calls if owner == "module"] == [
        "setup",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_a_hook_that_returns_minus_one_ends_the_epoch():
    class Half(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    assert Trainer(max_epochs=2, **QUIET).fit(Half(), loader(16)).steps == 2


def test_training_step_may_skip_a_batch():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    assert Trainer(max_epochs=1, **QUIET).fit(Skips(), loader(12)).steps == 2


def test_hooks_that_nobody_overrides_are_not_there():
    hooks = Hooks([Callback()], Net(), None)
    assert not any(hooks.has(name) for name in HOOKS)
    assert is_overridden(Net(), "training_step")
    assert not is_overridden(Net(), "setup")
    assert not is_overridden(None, "setup")


def test_module_reads_the_run_while_it_is_in_it():
    seen = {}

    class Reads(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            trainer = self.trainer
            seen.update(step=self.global_step, epoch=self.current_epoch, loss=trainer.callback_metrics["train_loss"].item())
            seen.update(
                batches=trainer.num_training_batches, total=trainer.estimated_stepping_batches, zero=trainer.is_global_zero
            )
            seen.update(optimizer=type(self.optimizers()).__name__, schedulers=self.lr_schedulers(), device=str(self.device))

    module = Reads()
    trainer = Trainer(max_epochs=3, **QUIET)
    trainer.fit(module, loader())
    assert seen.pop("loss") > 0
    assert seen == {
        "step": 6, "epoch": 2, "batches": 2, "total": 6, "zero": True, "optimizer": "SGD", "schedulers": None, "device": "cpu"
    }  # fmt: skip
    assert (trainer.global_step, trainer.current_epoch) == (6, 3)
    assert (module.global_step, module.current_epoch) == (0, 0)
    copy.deepcopy(module)
    module.log("outside", 1.0)


def test_fit_takes_loaders_from_the_module_or_a_datamodule():
    class Own(Net):
        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return [loader(), loader(4)]

    result = Trainer(max_epochs=1, **QUIET).fit(Own())
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(result.metrics)

    class Data(LightningDataModule):
        def __init__(self):
            self.calls = []

        def prepare_data(self):
            self.calls.append("prepare_data")

        def setup(self, stage):
            self.calls.append(stage)

        def teardown(self, stage):
            self.calls.append("teardown")

        def train_dataloader(self):
            assert self.trainer.max_epochs == 1
            return loader()

    datamodule = Data()
    assert Trainer(max_epochs=1, **QUIET).fit(Net(), datamodule=datamodule).steps == 2
    assert datamodule.calls == ["prepare_data", "fit", "teardown"]
    with pytest.raises(UsageError, match="no train data"):
        Trainer(**QUIET).fit(Net())


def test_parameters_made_in_setup_are_trained():
    class Late(Net):
        def __init__(self):
            LightningModule.__init__(self)

        def setup(self, stage):
            self.net = nn.Linear(4, 2)

    assert Trainer(max_epochs=1, **QUIET).fit(Late(), loader()).steps == 2


def test_epoch_schedulers_and_plateau_step_at_the_end_of_epochs():
    rates = []

    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = SGD(self.parameters())
            step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1e9)
            return [optimizer], [{"scheduler": step, "frequency": 2}, {"scheduler": plateau, "monitor": "val_loss"}]

        def on_train_epoch_start(self):
            rates.append(self.optimizers().param_groups[0]["lr"])

    Trainer(max_epochs=4, **QUIET).fit(Scheduled(), loader(), loader())
    assert rates == pytest.approx([0.1, 0.01, 0.0005, 0.00005])


def test_check_val_every_n_epoch_is_kept():
    class Counts(Net):
        validations = 0

        def on_validation_end(self):
            self.validations += 1
            assert "val_loss" in self.trainer.callback_metrics

    module = Counts()
    Trainer(max_epochs=5, check_val_every_n_epoch=2, **QUIET).fit(module, loader(), loader())
    assert module.validations == 2


def test_hyperparameters_and_weights_come_back_from_a_checkpoint(tmp_path):
    module = Net(width=7, name="x")
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "a.ckpt", name="y")
    assert loaded.hparams == module.hparams == {"width": 7}
    assert loaded.hparams.width == 7
    assert torch.equal(loaded.net[0].weight, module.net[0].weight)
    assert {"epoch", "global_step", "state_dict", "callbacks", "optimizer_states", "lr_schedulers", "hyper_parameters"} <= set(
        files.load(tmp_path / "a.ckpt")
    )


def test_save_hyperparameters_refuses_a_name_that_is_no_argument():
    class Wrong(LightningModule):
        def __init__(self, a):
            super().__init__()
            self.save_hyperparameters("b")

    with pytest.raises(UsageError, match="not arguments"):
        Wrong(1)


def foreign_lightning():
    """Modules that look as Lightning's do: base hooks of their own, a trainer setter, log that needs Lightning's Trainer."""
    package = types.ModuleType("lightning.pytorch.core.module")

    class LightningModule(nn.Module):  # named as Lightning's is, for that is what is looked at
        _trainer = None

        @property
        def trainer(self):
            return self._trainer

        @trainer.setter
        def trainer(self, trainer):
            object.__setattr__(self, "_trainer", trainer)

        def log(self, *args, **kwargs):
            raise RuntimeError("this is Lightning's own log")

        def optimizer_step(self, *args):
            raise RuntimeError("this is Lightning's own loop")

        def validation_step(self, *args):
            raise RuntimeError("a stub")

        def on_train_start(self):
            raise RuntimeError("a stub")

    LightningModule.__module__ = package.__name__
    return LightningModule


def test_a_real_lightning_module_runs_without_lightning():
    base = foreign_lightning()

    class Foreign(base):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            assert self.trainer.max_epochs == 2
            return loss

        def configure_optimizers(self):
            return SGD(self.parameters())

    module = Foreign()
    result = Trainer(max_epochs=2, **QUIET).fit(module, loader())
    assert result.metrics["train_loss"] > 0
    assert module.trainer is None
    assert "log" not in vars(module)
    assert "lightning" not in sys.modules


def test_hyperparameters_that_are_objects_stay_out_of_checkpoints(tmp_path, caplog):
    module = Net()
    module.hparams.function = len
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert files.load(tmp_path / "a.ckpt")["hyper_parameters"] == {"width": 4}
    assert "hyperparameters function" in caplog.text
    with pytest.raises(AttributeError, match="known: width, function"):
        _ = module.hparams.depth


def test_save_checkpoint_before_fit_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="before fit"):
        Trainer(**QUIET).save_checkpoint(tmp_path / "a.ckpt")


def test_metrics_have_lightnings_names_in_an_epoch_and_after_it():
    seen = []

    class Both(Net):
        def training_step(self, batch, batch_idx):
            self.log("a", float(batch_idx), True, on_step=True, on_epoch=True)
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for metrics in (self.trainer.callback_metrics, self.trainer.logged_metrics):
                seen.append({name: value.item() for name, value in metrics.items()})

    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(Both(), loader(12))
    assert seen[:2] == [{"a": 0.0, "a_step": 0.0}, {"a_step": 0.0}]
    assert seen[-2:] == [{"a": 2.0, "a_step": 2.0, "a_epoch": 1.0}, {"a_step": 2.0, "a_epoch": 1.0}]
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {"a": 1.0, "a_step": 2.0, "a_epoch": 1.0}
    assert {name: value.item() for name, value in trainer.logged_metrics.items()} == {"a_step": 2.0, "a_epoch": 1.0}


@pytest.mark.parametrize(
    "name", ["transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "state_dict", "load_state_dict"]
)
def test_a_datamodules_hook_that_is_not_called_is_refused(name):
    datamodule = type(
        "Data", (LightningDataModule,), {name: lambda self, *args: None, "train_dataloader": lambda self: loader()}
    )()
    with pytest.raises(UsageError, match=f"Data.{name}: Lightning has this hook, GPUlayer does not support it yet"):
        Trainer(max_epochs=1, **QUIET).fit(Net(), datamodule=datamodule)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_limit_val_batches_of_zero_means_no_validation(limit):
    class NoValidation(Net):
        def on_validation_start(self):
            raise AssertionError("validated")

    result = Trainer(max_epochs=1, limit_val_batches=limit, **QUIET).fit(NoValidation(), loader(), loader())
    assert set(result.metrics) == {"train_loss"}


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_share_of_less_than_one_batch_is_refused(name):
    with pytest.raises(UsageError, match="leaves none of the loader's 2"):
        Trainer(max_epochs=1, **{f"limit_{name}_batches": 0.3}, **QUIET).fit(Net(), loader(), loader())


def test_a_real_lightning_module_without_a_training_step_is_told_so():
    base = foreign_lightning()
    base.training_step = base.configure_optimizers = lambda self, *args: None  # Lightning's stubs

    class Forgot(base):
        net = nn.Linear(4, 2)

    with pytest.raises(UsageError, match=r"Forgot has no training_step\(\)"):
        Trainer(max_epochs=1, **QUIET).fit(Forgot(), loader())
