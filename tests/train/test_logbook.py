from __future__ import annotations

import math

import pytest
import torch

from gpulayer.errors import UsageError
from gpulayer.train.logbook import Logbook, size_of


def alone(value):
    return [value]


def step_log():
    logbook = Logbook()
    logbook.enter("train", in_step=True)
    return logbook


def test_training_step_values_are_the_last_ones():
    logbook = step_log()
    for value in (1.0, 2.0):
        logbook.begin_batch(torch.ones(4, 2))
        logbook.log("a", value)
    assert logbook.step_values(alone, 1) == {"a": 2.0}
    means = logbook.close_epoch("train", alone)
    assert means.callback == {"a": 2.0}
    assert means.logged == {}
    assert means.steps == {"a": 2.0}


def test_epoch_means_are_weighted_by_batch_size():
    logbook = step_log()
    for size, value in ((3, 1.0), (1, 5.0)):
        logbook.begin_batch((torch.ones(size, 2), None))
        logbook.log("a", torch.tensor([value]), on_step=True, on_epoch=True, prog_bar=True)
        logbook.log("b", value, on_step=False, on_epoch=True, batch_size=1)
    assert logbook.step_values(alone, 1) == {"a_step": 5.0}
    means = logbook.close_epoch("train", alone)
    assert means.callback == {"a": 2.0, "a_epoch": 2.0, "a_step": 5.0, "b": 3.0}
    assert means.steps == {"a_step": 5.0}
    assert means.logged == {"a_epoch": 2.0, "b": 3.0}
    assert means.bar == {"a": 2.0}
    assert logbook.close_epoch("train", alone).callback == {}


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), (max, 3.0), (torch.mean, 2.0)])
def test_reduction_is_the_one_asked_for(reduction, expected):
    logbook = Logbook()
    logbook.enter("validation")
    for value in (1, 2, 3):
        logbook.begin_batch(torch.ones(2))
        logbook.log("a", value, reduce_fx=reduction)
    assert logbook.close_epoch("validation", alone).callback == {"a": expected}


def test_ranks_are_reduced_by_name_and_weight():
    ranks = []
    for sizes in ((4, 2), (), (1,)):
        logbook = Logbook()
        logbook.enter("validation")
        for size in sizes:
            logbook.begin_batch(torch.ones(size))
            logbook.log("a", float(size))
        ranks.append(logbook)
    sent = []
    for logbook in ranks[1:]:
        logbook.close_epoch("validation", lambda value: sent.append(value) or [value])
    means = ranks[0].close_epoch("validation", lambda value: [value, *sent])
    assert means.callback["a"] == pytest.approx((16 + 4 + 1) / 7)


def test_rank_zero_only_takes_rank_zeros_and_exchanges_nothing_by_step():
    ranks = []
    for value in (1.0, 5.0):
        ranks.append(step_log())
        ranks[-1].log("a", value, on_epoch=True, rank_zero_only=True, sync_dist=True)
        ranks[-1].log("b", value, on_epoch=True)
    ranks[0].log("alone", 3.0, on_epoch=True, rank_zero_only=True, sync_dist=True)
    assert ranks[1].step_values(None, 2) == {"a_step": 5.0, "b_step": 5.0}
    sent = []
    ranks[1].close_epoch("train", lambda value: sent.append(value) or [value])
    means = ranks[0].close_epoch("train", lambda value: [value, *sent]).callback
    assert (means["a"], means["a_step"], means["b"], means["b_step"], means["alone"]) == (1.0, 1.0, 3.0, 3.0, 3.0)


def test_a_batch_that_does_not_count_weighs_nothing():
    logbook = step_log()
    logbook.begin_batch(torch.ones(2))
    logbook.log("a", 1.0, on_epoch=True)
    logbook.begin_batch(torch.ones(2), counts=False)
    logbook.log("a", 9.0, on_epoch=True)
    assert logbook.close_epoch("train", alone).callback["a"] == 1.0


def test_a_metric_object_is_computed_and_reset_when_the_epoch_ends():
    class Metric:
        total = 3.0

        def compute(self):
            return torch.tensor(self.total)

        def reset(self):
            self.total = 0.0

    metric, logbook = Metric(), step_log()
    logbook.log("m", metric)
    assert logbook.close_epoch("train", alone).callback == {"m": 3.0}
    assert metric.total == 0.0


def test_several_loaders_are_told_apart():
    logbook = Logbook()
    logbook.enter("validation")
    for number in (0, 1):
        logbook.begin_batch(torch.ones(1), suffix=f"/dataloader_idx_{number}")
        logbook.log("a", number)
        logbook.log("both", number, add_dataloader_idx=False)
    assert logbook.close_epoch("validation", alone).callback == {
        "a/dataloader_idx_0": 0.0,
        "a/dataloader_idx_1": 1.0,
        "both": 0.5,
    }


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.ones(2), {}, "shape \\(2,\\)"),
        ("high", {}, "got a str"),
        (1.0, {"reduce_fx": "median"}, "allowed are mean"),
    ],
)
def test_log_refuses_what_it_cannot_record(value, options, message):
    with pytest.raises(UsageError, match=message):
        step_log().log("a", value, **options)


def test_log_refuses_step_values_in_validation():
    logbook = Logbook()
    logbook.enter("validation")
    with pytest.raises(UsageError, match="in validation"):
        logbook.log("a", 1.0, on_step=True)


def test_nan_stays_nan():
    logbook = step_log()
    logbook.log("a", float("nan"), on_epoch=True)
    assert math.isnan(logbook.close_epoch("train", alone).callback["a"])


def test_size_of_is_the_first_tensors_length():
    x = torch.ones(3, 2)
    assert [size_of(b) for b in (x, (x, 1), {"a": x}, [[x], x], torch.tensor(1.0), "text", ("a", x))] == [3, 3, 3, 3, 1, 1, 3]


def test_live_values_have_the_names_that_lightning_gives_them():
    logbook = step_log()
    logbook.log("a", 1.0, on_epoch=True, prog_bar=True)
    logbook.log("hidden", 2.0, on_epoch=True, logger=False)
    assert logbook.live_values() == {"a": 1.0, "a_step": 1.0, "hidden": 2.0, "hidden_step": 2.0}
    assert logbook.live_values(bar_only=True) == {"a": 1.0}
    assert logbook.live_step_values() == {"a_step": 1.0}
