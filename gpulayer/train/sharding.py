"""How global batches are cut: pure arithmetic, and the sampler that applies it.

sizes of the ranks' slices of the last, incomplete batch of 7 over 3 ranks:  3 2 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from gpulayer.errors import UsageError
from gpulayer.train.rng import RngStream


def slice_of(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where rank's contiguous slice of `total` samples begins and ends; slices differ by one sample at most."""
    base, extra = divmod(total, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def count_batches(samples: int, global_batch: int, drop_last: bool) -> int:
    """Global batches in an epoch."""
    return samples // global_batch if drop_last else -(-samples // global_batch)


class ShardSampler(Sampler[list[int]]):
    """The batches of one rank, as lists of indices into the dataset.

    `pad` gives a rank whose slice is empty one sample to run on (weight 0), so that every rank makes every training step;
    without it such a rank has one batch less.
    """

    def __init__(
        self,
        sampler: Any,
        generator: torch.Generator | None,
        batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        order: RngStream,
        pad: bool,
    ) -> None:
        self.sampler = sampler
        self._generator = generator
        self.global_batch = batch_size * world_size
        self._drop_last = drop_last
        self._rank, self._world_size = rank, world_size
        self._order = order
        self._pad = pad
        self._samples = len(sampler) if isinstance(sampler, Sized) else None

    def __iter__(self) -> Iterator[list[int]]:
        indices = self._draw_order()
        self._samples = len(indices)
        for index in range(count_batches(len(indices), self.global_batch, self._drop_last)):
            group = indices[index * self.global_batch : (index + 1) * self.global_batch]
            first, last = slice_of(len(group), self._rank, self._world_size)
            if first < last:
                yield group[first:last]
            elif self._pad:
                yield group[:1]

    def _draw_order(self) -> list[int]:
        """The order in which one process would go through the data, drawn as one DataLoader draws it: its base seed first."""
        with self._order.active():
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            return list(self.sampler)

    def _known_samples(self) -> int:
        if self._samples is None:
            raise UsageError(f"the sampler {type(self.sampler).__name__} has no length; several ranks need one")
        return self._samples

    def __len__(self) -> int:
        batches = count_batches(self._known_samples(), self.global_batch, self._drop_last)
        if batches and not self._pad and self.held(batches - 1) == 0:
            return batches - 1
        return batches

    def total(self, index: int) -> int:
        """Samples in global batch `index`."""
        return max(0, min(self.global_batch, self._known_samples() - index * self.global_batch))

    def held(self, index: int) -> int:
        """Samples of global batch `index` that are this rank's."""
        first, last = slice_of(self.total(index), self._rank, self._world_size)
        return last - first

    def weight(self, index: int) -> float:
        """What this rank's mean loss counts for: the mean over ranks is then the mean over the batch's samples."""
        return self.held(index) * self._world_size / self.total(index)
