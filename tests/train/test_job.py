from __future__ import annotations

import torch
from torch import nn

from gpulayer.train.job import load_weights, weights_of


def test_weights_land_in_the_tensors_that_are_there():
    theirs, mine = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    theirs(torch.randn(5, 3))
    tensors = [*mine.parameters(), *mine.buffers()]
    load_weights(mine, weights_of(theirs))
    assert all(a is b for a, b in zip(tensors, [*mine.parameters(), *mine.buffers()], strict=True))
    assert torch.equal(mine.running_mean, theirs.running_mean)
    assert mine.num_batches_tracked == 1
