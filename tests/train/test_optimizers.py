from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gpulayer.errors import UsageError
from gpulayer.train.optimizers import make_optimizer, parse_optimizers

NET = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)
STEP = StepLR(OPTIMIZER, 1)
PLATEAU = ReduceLROnPlateau(OPTIMIZER)


@pytest.mark.parametrize("given", [torch.optim.AdamW, partial(torch.optim.AdamW, lr=1e-3), "adamw", "AdamW"])
def test_make_optimizer_takes_a_class_a_partial_or_a_name(given):
    assert isinstance(make_optimizer(given, NET), torch.optim.AdamW)


def test_make_optimizer_leaves_frozen_parameters_out():
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    assert [len(group["params"]) for group in make_optimizer("sgd", net).param_groups] == [1]


@pytest.mark.parametrize(
    ("returned", "schedulers"),
    [
        (OPTIMIZER, 0),
        ([OPTIMIZER], 0),
        (([OPTIMIZER], []), 0),
        (([OPTIMIZER], [STEP]), 1),
        (([OPTIMIZER], STEP), 1),
        ({"optimizer": OPTIMIZER}, 0),
        ({"optimizer": OPTIMIZER, "lr_scheduler": STEP}, 1),
        ({"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU, "monitor": "val_loss"}, 1),
        (({"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": PLATEAU, "monitor": "val_loss"}},), 1),
    ],
)
def test_every_form_of_lightnings_is_read(returned, schedulers):
    optimizer, configs = parse_optimizers(returned, NET)
    assert optimizer is OPTIMIZER
    assert len(configs) == schedulers
    assert all(config.reduce_on_plateau == (config.scheduler is PLATEAU) for config in configs)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None"),
        (3, "returned a int"),
        ([OPTIMIZER, OPTIMIZER], "2 optimizers"),
        ({"optimiser": OPTIMIZER}, "allowed: optimizer"),
        ({"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU}, "what to watch"),
        ({"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": STEP, "every": 2}}, "allowed: scheduler"),
        ({"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": STEP, "interval": "batch"}}, "epoch or step"),
        ({"optimizer": OPTIMIZER, "lr_scheduler": 3}, "no step"),
        (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), "2 of the optimizer's 2 parameters belong to another model"),
    ],
)
def test_what_cannot_work_is_refused(returned, message):
    with pytest.raises(UsageError, match=message):
        parse_optimizers(returned, NET)
