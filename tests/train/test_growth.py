from __future__ import annotations

import pytest
import torch
from torch import nn

from gpulayer.errors import UsageError
from gpulayer.train.growth import added_to, check_only_grown, graft, parts_of


def make_model():
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(2, 3))
    model.head = None
    return model


def grow(model):
    model.head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.body.add_module("tail", nn.Linear(3, 3))
    model.scale = nn.Parameter(torch.ones(3), requires_grad=False)
    model.body[0].register_buffer("mean", torch.arange(3.0))


def test_what_was_added_is_grafted_by_name():
    theirs, mine = make_model(), make_model()
    before = parts_of(theirs)
    grow(theirs)
    added = added_to(theirs, before)
    assert sorted(added) == ["body.0.mean", "body.tail", "head", "scale"]
    graft(mine, added)
    assert {**mine.state_dict()}.keys() == {**theirs.state_dict()}.keys()
    assert torch.equal(mine.head[0].weight, theirs.head[0].weight)
    assert mine.head[0].weight is not theirs.head[0].weight
    assert [(name, p.requires_grad) for name, p in mine.named_parameters()] == [
        (name, p.requires_grad) for name, p in theirs.named_parameters()
    ]


def test_model_that_stayed_the_same_adds_nothing():
    model = make_model()
    before = parts_of(model)
    model.body[0] = nn.Linear(2, 5)  # the same names: its weights travel as weights
    check_only_grown(model, before)
    assert added_to(model, before) == {}


def test_model_that_lost_a_part_is_refused():
    model = make_model()
    before = parts_of(model)
    del model.body[0]
    with pytest.raises(UsageError, match=r"took body\.0, body\.0\.bias"):
        check_only_grown(model, before)
