from __future__ import annotations

import threading

import torch
from torch import nn

from gpulayer.train.arguments import TrainerArguments
from gpulayer.train.callback import Callback
from gpulayer.train.job import load_callback
from gpulayer.train.portable import portable_state
from gpulayer.train.state import TrainerState
from gpulayer.wire import serialize


def make_trainer():
    return TrainerState(TrainerArguments(), [], [], None)


class Notes(Callback):
    def __init__(self):
        self.values = []
        self.best = None

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state_dict):
        self.best = f"loaded {state_dict['best']}"


def test_callback_comes_back_with_its_attributes():
    theirs, mine = Notes(), Notes()
    theirs.values, theirs.best, theirs.function = [1, torch.ones(2)], 3, lambda x: x + 1
    load_callback(mine, portable_state(theirs))
    assert mine.values[0] == 1
    assert mine.best == 3
    assert mine.function(1) == 2


def test_callback_with_something_that_cannot_travel_comes_back_with_the_rest():
    theirs, mine = Notes(), Notes()
    theirs.values, theirs.best, theirs.lock, mine.lock = [1], 3, threading.Lock(), "mine"
    load_callback(mine, portable_state(theirs))
    assert (mine.values, mine.best, mine.lock) == ([1], "loaded 3", "mine")


def test_callback_does_not_bring_model_and_trainer_along():
    theirs, mine = Notes(), Notes()
    theirs.model, theirs.trainer, theirs.both = nn.Linear(2, 2), make_trainer(), [1, make_trainer()]
    load_callback(mine, portable_state(theirs))
    assert not hasattr(mine, "model")
    assert not hasattr(mine, "trainer")
    assert serialize.loads(serialize.dumps(theirs.both)) == [1, None]
