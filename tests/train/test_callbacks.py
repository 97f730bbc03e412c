from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from gpulayer.errors import UsageError
from gpulayer.train import checkpoint as files
from gpulayer.train.callbacks import Callback, EarlyStopping, ModelCheckpoint
from gpulayer.train.module import LightningModule
from gpulayer.train.monitor import better_direction
from gpulayer.train.trainer import Trainer

BATCHES = [(torch.ones(2, 2), torch.ones(2, 1))]


class Scripted(LightningModule):
    """Logs the values that it was given, one an epoch."""

    def __init__(self, **values):
        super().__init__()
        self.net, self.values = nn.Linear(2, 1), values

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        for name, values in self.values.items():
            self.log(name, float(values[self.current_epoch]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, callbacks, epochs=5, every=1, **values):
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        check_val_every_n_epoch=every,
    )
    return trainer.fit(Scripted(**values), BATCHES, BATCHES)


@pytest.mark.parametrize(
    ("name", "direction"),
    [("val_loss", "min"), ("val/acc", "max"), ("accuracy", "max"), ("f1", "max"), ("val_auc", "max"), ("wer_error", "min")],
)
def test_better_direction_is_told_by_the_name(name, direction):
    assert better_direction(name, None) == direction


def test_better_direction_asks_where_the_name_tells_nothing():
    with pytest.raises(UsageError, match="Pass mode="):
        ModelCheckpoint(monitor="quality")
    assert better_direction("quality", "max") == "max"
    with pytest.raises(UsageError, match="allowed"):
        better_direction("quality", "up")


def test_early_stopping_stops_after_patience_and_says_why(tmp_path):
    stopper = EarlyStopping("val_loss", patience=2)
    result = fit(tmp_path, stopper, epochs=9, val_loss=[3, 2, 2.5, 2.1, 1, 1, 1, 1, 1])
    assert (result.epochs, stopper.stopped_epoch, stopper.best_score) == (4, 3, 2.0)
    assert "val_loss did not improve for 2 epochs" in result.stopped


def test_early_stopping_counts_validations_not_epochs(tmp_path):
    assert fit(tmp_path, EarlyStopping("val_loss", patience=2), epochs=8, every=2, val_loss=[1] * 8).epochs == 6


def test_early_stopping_can_be_used_again(tmp_path):
    stopper = EarlyStopping("val_loss", patience=1)
    assert fit(tmp_path, stopper, val_loss=[1, 1, 1, 1, 1]).epochs == 2
    assert fit(tmp_path, stopper, val_loss=[1, 0.9, 0.8, 0.7, 0.6]).epochs == 5


def test_a_monitor_that_nobody_logs_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="monitor='val_acc' was not logged; logged: val_loss"):
        fit(tmp_path, EarlyStopping("val_acc"), val_loss=[1] * 5)


def test_early_stopping_stops_at_once_when_the_value_is_not_finite(tmp_path, capsys):
    nan = float("nan")
    result = fit(tmp_path, EarlyStopping("val_loss", verbose=True), val_loss=[3, nan, 1, 1, 1])
    assert (result.epochs, result.stopped) == (2, "val_loss is nan, which is not finite (best 3)")
    assert capsys.readouterr().out.splitlines() == ["epoch 0: val_loss improved to 3", f"epoch 1: {result.stopped}"]
    assert fit(tmp_path, EarlyStopping("val_loss", check_finite=False), val_loss=[3, nan, 2, 1, 1]).epochs == 5


def test_early_stopping_that_is_not_strict_waits_for_its_metric(tmp_path):
    assert fit(tmp_path, EarlyStopping("val_acc", strict=False), val_loss=[1] * 5).epochs == 5


def test_callbacks_may_look_in_validated_epochs_only(tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, save_on_train_epoch_end=False)
    stopper = EarlyStopping("steps", mode="max", patience=1, check_on_train_epoch_end=False)

    class Same(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log("steps", 1.0)

    assert fit(tmp_path, [Same(), saver, stopper], epochs=6, every=2, val_loss=[1] * 6).epochs == 4
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=1-step=2.ckpt", "epoch=3-step=4.ckpt"]


def test_model_checkpoint_leaves_names_out_of_files_and_tells_what_it_saves(tmp_path, capsys):
    saver = ModelCheckpoint(tmp_path, "e{epoch}-{val_loss:.1f}", monitor="val_loss", auto_insert_metric_name=False, verbose=True)
    fit(tmp_path, saver, epochs=1, val_loss=[0.5])
    assert saver.best_model_path == str(tmp_path / "e0-0.5.ckpt")
    assert capsys.readouterr().out == f"epoch 0: saved {saver.best_model_path} (val_loss 0.5, best 0.5)\n"


@pytest.mark.parametrize("nan_first", [False, True])
def test_model_checkpoint_keeps_the_best(tmp_path, nan_first):
    saver = ModelCheckpoint(tmp_path / "c", "{epoch}-{val_acc:.1f}", monitor="val_acc", save_top_k=2)
    first = float("nan") if nan_first else 0.1
    result = fit(tmp_path, saver, val_acc=[first, 0.5, 0.3, 0.9, 0.2])
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=1-val_acc=0.5.ckpt", "epoch=3-val_acc=0.9.ckpt"]
    assert result.best_model_path == str(tmp_path / "c" / "epoch=3-val_acc=0.9.ckpt")
    assert saver.best_model_score == 0.9
    assert files.load(result.best_model_path)["callbacks"]["ModelCheckpoint"]["best_model_path"] == result.best_model_path


def test_model_checkpoint_without_monitor_keeps_the_newest_and_last(tmp_path):
    saver = ModelCheckpoint(save_last=True)
    result = fit(tmp_path, saver, epochs=3)
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == ["epoch=2-step=3.ckpt", "last.ckpt"]
    assert result.last_model_path == str(folder / "last.ckpt")


def test_model_checkpoint_keeps_all_with_minus_one(tmp_path):
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", "same", save_top_k=-1), epochs=3)
    assert sorted(os.listdir(tmp_path / "c")) == ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]


@pytest.mark.parametrize(
    "given", [{"save_top_k": -2}, {"save_top_k": 3}, {"mode": "min"}]
)  # fmt: skip
def test_model_checkpoint_refuses_what_cannot_work(given):
    with pytest.raises(UsageError):
        ModelCheckpoint(**given)


def test_model_checkpoint_names_what_a_filename_may_hold(tmp_path):
    with pytest.raises(UsageError, match="known: epoch, step, val_loss"):
        fit(tmp_path, ModelCheckpoint(filename="{val_acc}"), val_loss=[1] * 5)


def test_enable_checkpointing_false_with_a_model_checkpoint_is_an_error():
    with pytest.raises(UsageError, match="enable_checkpointing=False"):
        Trainer(callbacks=ModelCheckpoint(), enable_checkpointing=False)


def test_a_callback_may_stop_the_run_in_mid_epoch(tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 1

    trainer = Trainer(max_epochs=3, callbacks=[Stop()], logger=False, enable_checkpointing=False, enable_progress_bar=False)
    result = trainer.fit(Scripted(), BATCHES * 5)
    assert (result.steps, result.stopped) == (2, "trainer.should_stop was set")
