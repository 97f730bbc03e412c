"""Bad input and Ctrl-C: a clear error of the right type, nothing left behind, the Trainer usable again."""

from __future__ import annotations

import logging
import os
import signal
import threading
from functools import partial

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpulayer.errors import UsageError
from gpulayer.train.callbacks import Callback, ModelCheckpoint
from gpulayer.train.module import LightningDataModule, LightningModule
from gpulayer.train.trainer import Trainer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SGD = partial(torch.optim.SGD, lr=0.1)


def data(n=16):
    return TensorDataset(torch.randn(n, 4), torch.randn(n, 1))


def fit(model=None, train=None, val=None, trainer=None, **given):
    options = {"loss": "mse", "optimizer": SGD, **given}
    return (trainer or Trainer(max_epochs=1, **QUIET)).fit(
        nn.Linear(4, 1) if model is None else model, data() if train is None else train, val, **options
    )


def frozen():
    return nn.Linear(4, 1).requires_grad_(False)


class StepsOnly(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()


def empty_loader():
    return DataLoader(data(3), batch_size=4, drop_last=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": nn.ReLU()}, "ReLU has no parameters"),
        ({"model": frozen()}, "requires_grad=False"),
        ({"model": 3}, "cannot train a int"),
        ({"optimizer": SGD(nn.Linear(4, 1).parameters())}, "belong to another model"),
        ({"optimizer": None}, "needs optimizer="),
        ({"optimizer": "sdg"}, "one of: sgd"),
        ({"optimizer": lambda p: None}, "made a NoneType"),
        ({"loss": "mae"}, "one of: cross_entropy"),
        ({"loss": None}, "need a loss"),
        ({"metrics": "acc"}, "names of: accuracy"),
        ({"train": empty_loader()}, "train loader is empty: 3 samples, batch_size=4, drop_last=True"),
        ({"train": 3}, "the train data is a int"),
        ({"train": [(torch.ones(2, 4),)]}, "a tuple of 1 items"),
        ({"train": DataLoader(data()), "batch_size": 4}, "batch_size=4 is for a Dataset"),
        ({"ckpt_path": "x.ckpt"}, "does not support it yet"),
        ({"weights_only": False}, "does not support it yet"),
        ({"train_dataloader": data()}, "fit has no argument 'train_dataloader'; did you mean 'train_dataloaders'"),
        ({"model": nn.Linear}, "fit got the class Linear; pass an instance"),
        ({"model": LightningModule()}, r"LightningModule has no training_step\(\)"),
        ({"model": StepsOnly()}, r"StepsOnly has no configure_optimizers\(\)"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler='cosine' is not supported; pass a function of the optimizer"),
        ({"datamodule": LightningDataModule()}, "not both"),
    ],
)
def test_fit_refuses_what_cannot_work(given, message):
    with pytest.raises(UsageError, match=message):
        fit(**given)


def test_fit_refuses_an_iterator_in_its_second_epoch():
    with pytest.raises(UsageError, match="no batch in epoch 1"):
        fit(train=iter([(torch.ones(2, 4), torch.ones(2, 1))]), trainer=Trainer(max_epochs=2, **QUIET))


def test_fit_refuses_a_gpu_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match="sees no such device"):
        fit(trainer=Trainer(accelerator="gpu", devices=1, **QUIET))


class Minimal(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return SGD(self.parameters())


class ForeignOptimizer(Minimal):
    def configure_optimizers(self):
        return SGD(nn.Linear(4, 1).parameters())


class TwoOptimizers(Minimal):
    def configure_optimizers(self):
        return [SGD(self.parameters()), SGD(self.parameters())]


class Manual(Minimal):
    automatic_optimization = False


class OwnStep(Minimal):
    def optimizer_step(self, *args):
        pass


class StrangeLoss(Minimal):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ForeignOptimizer, "belong to another model"),
        (TwoOptimizers, "returned 2 optimizers"),
        (Manual, "manual optimization"),
        (OwnStep, "OwnStep.optimizer_step"),
        (StrangeLoss, "returned a Tensor; allowed"),
    ],
)
def test_fit_refuses_a_module_that_asks_for_what_is_not_there(module, message):
    with pytest.raises(UsageError, match=message):
        Trainer(max_epochs=1, **QUIET).fit(module(), DataLoader(data(), batch_size=4))


def test_fit_refuses_validation_data_without_a_validation_step():
    with pytest.raises(UsageError, match="no validation_step"):
        Trainer(max_epochs=1, **QUIET).fit(Minimal(), data(), data())


def test_fit_refuses_loss_for_a_module_that_has_its_own():
    with pytest.raises(UsageError, match="loss= is for a plain"):
        Trainer(max_epochs=1, **QUIET).fit(Minimal(), data(), loss="mse")


def test_nan_loss_is_a_flag_and_one_line_not_a_crash(caplog):
    batches = [(torch.ones(2, 4), torch.ones(2, 1)) for _ in range(6)]
    batches[3] = (torch.full((2, 4), float("nan")), torch.ones(2, 1))
    with caplog.at_level(logging.WARNING):
        result = fit(train=batches, trainer=Trainer(max_epochs=2, **QUIET))
    assert result.nan_loss
    assert result.steps == 12
    assert [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()] == [
        "the loss was NaN at step 4 (rank 0); training goes on"
    ]
    assert not fit().nan_loss


class Raising(Dataset):
    """Raises, or lets Ctrl-C happen, at one of its samples."""

    def __init__(self, action):
        self.action = action

    def __len__(self):
        return 16

    def __getitem__(self, i):
        if i == 9:
            self.action()
        return torch.ones(4), torch.ones(1)


def bad_sample():
    raise LookupError("sample 9 is broken")


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_loader_keeps_its_type_and_leaves_no_worker(workers):
    loader = DataLoader(Raising(bad_sample), batch_size=4, num_workers=workers)
    with pytest.raises(LookupError, match="sample 9 is broken"):
        fit(train=loader)
    assert psutil.Process().children() == []


class Interrupts(Callback):
    """Presses Ctrl-C at one hook, and notes what it is told."""

    def __init__(self, hook):
        self.told = []
        setattr(self, hook, lambda *args: press_ctrl_c())

    def on_exception(self, trainer, pl_module, exception):
        self.told.append(type(exception))


HOOKS = [
    "setup",
    "on_fit_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_fit_end",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_ctrl_c_reaches_the_caller_from_every_stage(hook, tmp_path):
    net, callback = nn.Linear(4, 1), Interrupts(hook)
    trainer = Trainer(max_epochs=2, callbacks=callback, enable_progress_bar=False, default_root_dir=tmp_path)
    loader = DataLoader(data(), batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(KeyboardInterrupt):
        fit(net, loader, data(), trainer=trainer)
    assert callback.told == [KeyboardInterrupt]
    assert psutil.Process().children() == []
    assert not list(tmp_path.rglob("*.tmp"))
    assert net.training
    trainer.callbacks.remove(callback)
    assert fit(net, data(), data(), trainer=trainer).epochs == 2


def test_ctrl_c_in_save_leaves_no_half_file(tmp_path, monkeypatch):
    trainer = Trainer(max_epochs=3, callbacks=ModelCheckpoint(tmp_path, save_last=True), enable_progress_bar=False, logger=False)
    fsync, calls = os.fsync, []

    def interrupted(descriptor):
        calls.append(descriptor)
        if len(calls) == 6:  # two checkpoints an epoch, file and folder each: in the second epoch's first
            press_ctrl_c()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer=trainer)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert all(name.endswith(".ckpt") for name in left)
    assert all(torch.load(path, weights_only=True)["global_step"] > 0 for path in tmp_path.iterdir())
    assert fit(trainer=trainer).epochs == 3


def test_ctrl_c_at_a_random_moment_reaches_the_caller():
    started = threading.Event()

    class Start(Callback):
        def on_train_batch_end(self, *args):
            started.set()

    def press():
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(max_epochs=-1, callbacks=Start(), **QUIET)
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer=trainer)
    thread.join()


def test_a_module_that_failed_is_detached_and_in_its_old_modes():
    class Net(Minimal):
        def __init__(self):
            super().__init__()
            self.frozen = nn.BatchNorm1d(4).eval()

        def validation_step(self, batch, batch_idx):
            assert not self.training
            raise ArithmeticError

    module = Net()
    with pytest.raises(ArithmeticError):
        Trainer(max_epochs=1, **QUIET).fit(module, data(), data())
    assert module.training
    assert not module.frozen.training
    with pytest.raises(UsageError, match="not attached"):
        _ = module.trainer


def test_a_checkpoint_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = Trainer(max_epochs=1, callbacks=ModelCheckpoint(tmp_path / "file" / "sub"), logger=False, enable_progress_bar=False)
    with pytest.raises(OSError, match=r"sub|file"):
        fit(trainer=trainer)
