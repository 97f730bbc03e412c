from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from gpulayer.train.rng import RngState, RngStream, isolated_rng
from gpulayer.train.sharding import ShardSampler, count_batches, slice_of


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [0, 1, 4, 7, 12])
def test_slices_are_contiguous_even_and_complete(total, world_size):
    slices = [slice_of(total, rank, world_size) for rank in range(world_size)]
    assert [i for first, last in slices for i in range(first, last)] == list(range(total))
    sizes = [last - first for first, last in slices]
    assert max(sizes) - min(sizes) <= 1


def test_count_batches_drops_or_keeps_the_last():
    assert (count_batches(10, 4, True), count_batches(10, 4, False), count_batches(0, 4, False)) == (2, 3, 0)


def shards(n, world_size, batch_size, pad=True, drop_last=False):
    order = RngState.capture()
    return [
        ShardSampler(SequentialSampler(range(n)), None, batch_size, drop_last, r, world_size, RngStream(order), pad)
        for r in range(world_size)
    ]


@pytest.mark.parametrize("n", [9, 12, 13, 17])
@pytest.mark.parametrize("world_size", [2, 3])
def test_weighted_mean_over_ranks_is_the_mean_over_samples(n, world_size):
    ranks = shards(n, world_size, 3)
    assert len({len(rank) for rank in ranks}) == 1
    for index, groups in enumerate(zip(*ranks, strict=True)):
        whole = list(range(n))[index * 3 * world_size : (index + 1) * 3 * world_size]
        means = [sum(group) / len(group) * rank.weight(index) for rank, group in zip(ranks, groups, strict=True)]
        assert sum(means) / world_size == pytest.approx(sum(whole) / len(whole))


@pytest.mark.parametrize("n", [1, 5, 8, 9])
def test_without_padding_every_sample_is_read_once(n):
    ranks = shards(n, 3, 2, pad=False)
    read = [i for rank in ranks for batch in rank for i in batch]
    assert sorted(read) == list(range(n))
    assert all(len(list(rank)) == len(rank) for rank in ranks)


def test_drop_last_counts_global_batches():
    ranks = shards(11, 2, 2, drop_last=True)
    assert [len(rank) for rank in ranks] == [2, 2]
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(8))


@pytest.mark.parametrize("own_generator", [False, True])
def test_the_order_is_the_one_that_one_process_draws(own_generator):
    def generator():
        return torch.Generator().manual_seed(4) if own_generator else None

    torch.manual_seed(3)
    state = RngState.capture()
    alone = generator()
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=alone)
    expected = [[x.tolist() for (x,) in loader] for _ in range(2)]
    mine = generator()
    ranks = [ShardSampler(RandomSampler(data, generator=mine), mine, 2, False, 0, 2, RngStream(state), True)]
    again = generator()
    ranks.append(ShardSampler(RandomSampler(data, generator=again), again, 2, False, 1, 2, RngStream(state), True))
    for epoch in expected:
        assert [a + b for a, b in zip(*ranks, strict=True)] == epoch


def test_isolated_rng_puts_every_generator_back():
    with isolated_rng():
        expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    with isolated_rng():
        torch.rand(9)
        random.random()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected
