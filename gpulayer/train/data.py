"""Loaders: from what the caller passed to the batches that one rank reads.

One process reads the caller's own DataLoader, as it is. Several ranks read shards: every rank replays the order in which one
process would go through the data, cuts it into global batches of world_size * batch_size, and takes its slice of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from gpulayer.errors import UsageError
from gpulayer.train.arguments import limited
from gpulayer.train.logbook import size_of
from gpulayer.train.rng import RngStream
from gpulayer.train.sharding import ShardSampler

DEFAULT_BATCH_SIZE = 32


def as_loader(data: Any, batch_size: int | None, shuffle: bool, name: str) -> Any:
    """A loader of `data`: a DataLoader or an iterable of batches as it is, a Dataset in a DataLoader of `batch_size` (32)."""
    if isinstance(data, Dataset):
        shuffle = shuffle and not isinstance(data, IterableDataset)
        return DataLoader(data, batch_size=batch_size or DEFAULT_BATCH_SIZE, shuffle=shuffle)
    if batch_size is not None:
        raise UsageError(
            f"batch_size={batch_size} is for a Dataset; the {name} data is a {type(data).__name__}, which has its own batches"
        )
    if isinstance(data, (str, bytes, dict)) or not isinstance(data, Iterable):
        raise UsageError(f"the {name} data is a {type(data).__name__}; pass a DataLoader, a Dataset or an iterable of batches")
    return data


@dataclass(frozen=True)
class LoaderSpec:
    """A DataLoader taken apart, so that it can travel and be put together for one rank. `batch_size` is per rank."""

    dataset: Any
    sampler: Any
    batch_size: int
    drop_last: bool
    generator: torch.Generator | None
    options: dict[str, Any]

    @classmethod
    def of(cls, loader: Any, name: str) -> LoaderSpec:
        """The parts of `loader`. Raises `UsageError` for one that cannot be divided over ranks."""
        _refuse_undividable(loader, name)
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "persistent_workers", "prefetch_factor")
        options = {option: getattr(loader, option) for option in names}
        context = loader.multiprocessing_context
        options["multiprocessing_context"] = context if context is None else context.get_start_method()
        return cls(loader.dataset, loader.sampler, loader.batch_size, loader.drop_last, loader.generator, options)


def _refuse_undividable(loader: Any, name: str) -> None:
    reason = ""
    if not isinstance(loader, DataLoader):
        reason = f"is a {type(loader).__name__}; pass a DataLoader or a Dataset"
    elif isinstance(loader.dataset, IterableDataset):
        reason = "has an IterableDataset, whose order nobody but itself knows; pass a map-style Dataset"
    elif loader.batch_sampler is None:
        reason = "has batch_size=None; give it a batch size"
    elif loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        reason = "has its own batch_sampler; pass a sampler and a batch_size"
    elif isinstance(loader.sampler, DistributedSampler):
        reason = "has a DistributedSampler; leave it out, the Trainer divides the data by itself"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        reason = f"is a {type(loader).__name__} that iterates in its own way; pass a plain DataLoader"
    if reason:
        raise UsageError(f"with several devices the {name} data is divided over the ranks, and this loader {reason}")


class Feed:
    """The batches that this process reads: all of a loader's."""

    def __init__(self, loader: Any, limit: int | float | None = None) -> None:
        self.loader = loader
        self._limit = limit
        self._open: Any = None

    @property
    def length(self) -> int | None:
        """Batches in an epoch, None where the loader does not know."""
        return limited(self.loader_length, self._limit)

    @property
    def loader_length(self) -> int | None:
        """`length` without the limit."""
        return _length(self.loader)

    def batches(self) -> Iterator[Any]:
        """One epoch, as the loader itself goes through it."""
        self._open = iter(self.loader)
        return self._open if self._limit is None else islice(self._open, self.length)

    def weight(self, index: int) -> float:
        """What the loss of batch `index` is multiplied by, so that the mean over ranks is the mean over samples."""
        return 1.0

    def counts(self, index: int) -> bool:
        """Whether batch `index` holds samples of its own, and not one that only fills the rank's turn."""
        return True

    def samples(self, index: int, batch: Any) -> int:
        """Samples in batch `index` over all ranks."""
        return size_of(batch)

    def start_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch it is, if it wants to know."""
        for holder in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if holder is not None and hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def close(self) -> None:
        """End the loader's worker processes, without waiting for the garbage collector (a traceback may keep them)."""
        shut_down = getattr(self._open, "_shutdown_workers", None)
        if shut_down is not None and getattr(self.loader, "_iterator", None) is not self._open:
            shut_down()
        self._open = None

    def abort(self) -> None:
        """`close` that also ends workers which the loader was told to keep: the run has failed."""
        kept = getattr(self.loader, "_iterator", None)
        if kept is not None:
            self.loader._iterator = None
            kept._shutdown_workers()
        self.close()


class ShardFeed(Feed):
    """The batches that one of several ranks reads."""

    def __init__(
        self, spec: LoaderSpec, rank: int, world_size: int, order: RngStream, limit: int | float | None, pad: bool
    ) -> None:
        self.shards = ShardSampler(spec.sampler, spec.generator, spec.batch_size, spec.drop_last, rank, world_size, order, pad)
        super().__init__(DataLoader(spec.dataset, batch_sampler=self.shards, **spec.options), limit)

    def weight(self, index: int) -> float:
        """See `Feed.weight`."""
        return self.shards.weight(index)

    def counts(self, index: int) -> bool:
        """See `Feed.counts`."""
        return self.shards.held(index) > 0

    def samples(self, index: int, batch: Any) -> int:
        """See `Feed.samples`."""
        return self.shards.total(index)

    def start_epoch(self, epoch: int) -> None:
        """See `Feed.start_epoch`."""
        if hasattr(self.shards.sampler, "set_epoch"):
            self.shards.sampler.set_epoch(epoch)


def _length(loader: Any) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over a dataset without a length has __len__ and no length
        return None
