"""Lightning's own arguments of its helpers: what asks for nothing is let through, the rest is named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from gpulayer.errors import UsageError
from gpulayer.train import checkpoint as files
from gpulayer.train.callbacks import EarlyStopping, ModelCheckpoint
from gpulayer.train.logbook import Logbook
from gpulayer.train.module import LightningModule
from gpulayer.train.refusal import refuse_others
from gpulayer.train.rng import seed_everything


class Net(LightningModule):
    def __init__(self, width=2, **saving):
        super().__init__()
        self.save_hyperparameters("width", **saving)
        self.net = nn.Linear(width, 1)


class Sized(LightningModule):
    def __init__(self, width=2):
        super().__init__()
        self.net = nn.Linear(width, 1)


def log(**options):
    Logbook().log("a", 1.0, **options)


def stopper(**options):
    EarlyStopping("val_loss", **options)


def test_refuse_others_compares_type_and_value():
    refuse_others("f", {"a": 1, "b": None}, (), {"a": (1,), "b": (None,)})
    with pytest.raises(UsageError, match=r"f\(a=True\): Lightning has this argument, GPUlayer does not support it yet"):
        refuse_others("f", {"a": True}, (), {"a": (1,)})
    with pytest.raises(UsageError, match="f has no argument 'zzz'; known: abc, def"):
        refuse_others("f", {"zzz": 1}, ("def", "abc"), {})


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (log, {"enable_graph": False, "rank_zero_only": True, "metric_attribute": "acc", "sync_dist_group": None}),
        (Net, {"logger": False, "ignore": None}),
        (ModelCheckpoint, {"save_weights_only": False, "every_n_epochs": 1, "verbose": False, "save_on_train_epoch_end": True}),
        (ModelCheckpoint, {"every_n_train_steps": None, "train_time_interval": None, "auto_insert_metric_name": False}),
        (ModelCheckpoint, {"save_last": None, "save_on_exception": False, "enable_version_counter": True}),
        (stopper, {"verbose": True, "strict": False, "check_finite": False, "check_on_train_epoch_end": None}),
        (stopper, {"stopping_threshold": None, "divergence_threshold": None, "log_rank_zero_only": False}),
    ],
)
def test_helpers_take_lightnings_arguments_that_ask_for_nothing_or_are_done(call, options):
    call(**options)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (log, {"enable_graph": True}, r"log\(enable_graph=True\).*not support it yet"),
        (log, {"on_epochs": True}, "log has no argument 'on_epochs'; did you mean 'on_epoch'"),
        (seed_everything, {"seed": 1, "worker": True}, "no argument 'worker'; did you mean 'workers'"),
        (seed_everything, {"seed": "1"}, "whole number"),
        (Net, {"logger": True}, r"save_hyperparameters\(logger=True\).*not support it yet"),
        (Net, {"ignores": "x"}, "did you mean 'ignore'"),
        (ModelCheckpoint, {"save_weights_only": True}, "not support it yet"),
        (ModelCheckpoint, {"every_n_epochs": 2}, "not support it yet"),
        (ModelCheckpoint, {"save_last": "link"}, "save_last='link'"),
        (ModelCheckpoint, {"save_topk": 1}, "did you mean 'save_top_k'"),
        (stopper, {"stopping_threshold": 0.1}, "not support it yet"),
        (stopper, {"patiense": 1}, "did you mean 'patience'"),
    ],
)
def test_helpers_refuse_what_is_not_done_and_name_the_nearest(call, options, message):
    with pytest.raises(UsageError, match=message):
        call(**options)


def test_seed_everything_seeds_all_generators_and_workers_too():
    drawn = []
    for _ in range(2):
        assert seed_everything(3, workers=True, verbose=False) == 3
        loader = torch.utils.data.DataLoader(Draws(), num_workers=2)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item(), [batch.tolist() for batch in loader]))
    assert drawn[0] == drawn[1]
    first, second = drawn[0][3]
    assert first != second


class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def test_save_hyperparameters_reads_the_frame_it_is_given():
    import inspect

    class Framed(LightningModule):
        def __init__(self, a, b=2):
            super().__init__()
            self.keep(inspect.currentframe())

        def keep(self, frame):
            self.save_hyperparameters(frame=frame, ignore=["b"])

    assert Framed(1).hparams == {"a": 1}
    with pytest.raises(UsageError, match="names of arguments"):
        Framed(1).save_hyperparameters({"a": 1})


@pytest.fixture
def saved(tmp_path):
    files.write(tmp_path / "a.ckpt", {"state_dict": Sized(3).state_dict(), "hyper_parameters": {"width": 3}})
    return tmp_path / "a.ckpt"


def test_load_from_checkpoint_takes_a_device_and_strict(saved):
    assert Sized.load_from_checkpoint(saved, "meta").device.type == "meta"
    assert (
        Sized.load_from_checkpoint(saved, map_location=torch.device("cpu"), strict=None, weights_only=True).net.in_features == 3
    )
    files.write(saved, {"state_dict": {"net.bias": torch.ones(1)}, "hyper_parameters": {}})
    assert Sized.load_from_checkpoint(saved, strict=False, hparams_file=None).net.bias == 1
    with pytest.raises(RuntimeError, match="Missing key"):
        Sized.load_from_checkpoint(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map_location": {"cuda:0": "cpu"}}, "not supported yet"),
        ({"hparams_file": "h.yaml"}, "not support it yet"),
        ({"weights_only": False}, "not support it yet"),
        ({"widht": 3}, "Sized.load_from_checkpoint has no argument 'widht'; did you mean 'width'"),
    ],
)
def test_load_from_checkpoint_refuses_the_rest(saved, options, message):
    with pytest.raises(UsageError, match=message):
        Sized.load_from_checkpoint(saved, **options)
