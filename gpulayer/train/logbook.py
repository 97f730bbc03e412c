"""The logbook: what `log` records, one slot a name, summed as it comes and read only when someone looks.

A value on the CPU is taken as a number at once; one on a GPU stays there, so that logging never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpulayer.errors import UsageError
from gpulayer.train.refusal import NotYet, refuse_others

REDUCTIONS = ("mean", "sum", "min", "max")
_REDUCTION_OF: Mapping[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    min: "min",
    max: "max",
    sum: "sum",
}
_LOG_ARGUMENTS = (
    *("name", "value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "sync_dist", "add_dataloader_idx"),
    *("batch_size", "rank_zero_only", "metric_attribute"),
)
_NOT_YET: NotYet = {"enable_graph": (False,), "sync_dist_group": (None,)}
Gather = Callable[[Any], list[Any]]


@dataclass(slots=True)
class Slot:
    """One name: its settings (those of the first call in an epoch), its last value and its sum so far."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduction: str
    sync_dist: bool
    rank_zero_only: bool = False
    last: Any = None
    total: Any = None
    weight: float = 0.0
    metric: Any = None

    @property
    def forks(self) -> bool:
        """Whether it shows as `<name>_step` and `<name>_epoch`."""
        return self.on_step and self.on_epoch

    def add(self, value: Any, weight: float) -> None:
        """Take in one value; `weight` is its batch's number of samples."""
        self.last = value
        if weight == 0.0:
            return  # a batch that only fills a rank's turn
        if self.reduction == "mean":
            value = value * weight
        if self.total is None:
            self.total = value
        elif self.reduction == "min":
            self.total = _pick(min, torch.minimum, self.total, value)
        elif self.reduction == "max":
            self.total = _pick(max, torch.maximum, self.total, value)
        else:
            self.total = self.total + value
        self.weight += weight


@dataclass
class Means:
    """What an epoch's slots came to: for callbacks, for the loggers (and `steps`, their last step's), and for the terminal."""

    callback: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)


class Logbook:
    """Where `log` goes. The loop says which part of the run it is in, and which batch."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[str, Slot]] = {"train": {}, "validation": {}}
        self._stage = "train"
        self._in_step = False
        self._suffix = ""
        self._batch: Any = None
        self._batch_size: int | None = None
        self._counts = True

    def enter(self, stage: str, in_step: bool = False) -> None:
        """Values logged from here on belong to `stage`, by default to its steps or to its whole epoch."""
        self._stage, self._in_step = stage, in_step
        self._batch, self._batch_size, self._counts, self._suffix = None, None, True, ""

    def begin_batch(self, batch: Any, counts: bool = True, suffix: str = "") -> None:
        """Values logged from here on are of this batch; those of one that does not count weigh nothing."""
        self._batch, self._batch_size, self._counts, self._suffix = batch, None, counts, suffix

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        *,
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        metric_attribute: str | None = None,
        **others: Any,
    ) -> None:
        """Record `value`: a number, a tensor of one element, or an object with compute() and reset().

        In `training_step` it is a step's value, elsewhere the epoch's mean, unless `on_step` and `on_epoch` say otherwise; with
        both it shows as `<name>_step` and `<name>_epoch`. Means are weighted by `batch_size` (the first tensor's, if left out).
        Epoch values are always reduced over the ranks, except with `rank_zero_only`, which takes rank 0's and may be called there
        alone; step values are rank 0's, or the ranks' mean with `sync_dist`. `metric_attribute` is not needed to find a metric.
        """
        if others:
            refuse_others("log", others, _LOG_ARGUMENTS, _NOT_YET)
        if self._suffix and add_dataloader_idx:
            name += self._suffix
        slots = self._slots[self._stage]
        slot = slots.get(name)
        if slot is None:
            slot = slots[name] = self._open(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist)
            slot.rank_zero_only = rank_zero_only
        if slot.metric is not None:
            return  # it keeps its own sums; read when the epoch ends
        if not self._counts:
            weight = 0.0
        elif not slot.on_epoch or slot.reduction != "mean":
            weight = 1.0
        else:
            weight = float(batch_size if batch_size is not None else self._current_batch_size())
        slot.add(as_scalar(name, value), weight) if slot.on_epoch else setattr(slot, "last", as_scalar(name, value))

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """`log` for each item."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def _open(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        sync: bool,
    ) -> Slot:
        in_training_step = self._stage == "train" and self._in_step
        is_metric = hasattr(value, "compute") and hasattr(value, "reset") and not isinstance(value, torch.Tensor)
        step = (in_training_step and not is_metric) if on_step is None else on_step
        epoch = (not in_training_step or is_metric) if on_epoch is None else on_epoch
        if step and (self._stage == "validation" or not self._in_step):
            where = "validation" if self._stage == "validation" else "an epoch hook"
            raise UsageError(f"log({name!r}, on_step=True) in {where}: not supported; leave out on_step")
        if is_metric and step:
            raise UsageError(f"log({name!r}, <metric object>, on_step=True) is not supported yet; pass on_step=False")
        reduction: Any = _REDUCTION_OF.get(reduce_fx, reduce_fx) if callable(reduce_fx) else reduce_fx
        if reduction not in REDUCTIONS:
            raise UsageError(f"log({name!r}, reduce_fx={reduce_fx!r}): allowed are {', '.join(REDUCTIONS)}")
        slot = Slot(step, epoch, prog_bar, logger is not False, reduction, sync)
        slot.metric = value if is_metric else None
        return slot

    def _current_batch_size(self) -> int:
        if self._batch_size is None:
            self._batch_size = 1 if self._batch is None else size_of(self._batch)
        return self._batch_size

    def step_values(self, gather: Gather, world_size: int) -> dict[str, float]:
        """What goes to the loggers now: the last values of the slots that log by step."""
        slots = self._slots["train"].items()
        values = self.live_step_values()
        synced = [_step_name(name, slot) for name, slot in slots if slot.sync_dist and not slot.rank_zero_only]
        synced = [name for name in synced if name in values] if world_size > 1 else []
        if synced:
            everyone = gather({name: values[name] for name in synced})
            values.update({name: sum(each[name] for each in everyone) / len(everyone) for name in synced})
        return values

    def live_values(self, bar_only: bool = False) -> dict[str, float]:
        """The last value of every name of this epoch's training. Waits for the device."""
        slots = self._slots["train"].items()
        values = {name: float(slot.last) for name, slot in slots if slot.last is not None and (slot.prog_bar or not bar_only)}
        if not bar_only:
            values.update({f"{name}_step": values[name] for name, slot in slots if slot.forks and name in values})
        return values

    def live_step_values(self) -> dict[str, float]:
        """The last value, on this rank, of the slots that log by step. Waits for the device."""
        slots = self._slots["train"].items()
        chosen = {name: slot for name, slot in slots if slot.on_step and slot.logger and slot.last is not None}
        return {_step_name(name, slot): float(slot.last) for name, slot in chosen.items()}

    def close_epoch(self, stage: str, gather: Gather) -> Means:
        """Reduce the stage's slots over its batches and over the ranks, in one exchange, and empty them."""
        slots, self._slots[stage] = self._slots[stage], {}
        means = Means()
        for name, slot, value in _reduce(slots, gather):
            means.callback[name] = value
            shown = f"{name}_epoch" if slot.forks else name
            if slot.forks:
                means.callback.update({shown: value, f"{name}_step": slot.last})
            if slot.on_step and slot.logger:
                means.steps[_step_name(name, slot)] = slot.last
            if slot.logger and slot.on_epoch:
                means.logged[shown] = value
            if slot.prog_bar:
                means.bar[name] = value
        return means

    def clear(self) -> None:
        """Forget everything: a run ends, or a new one begins."""
        self._slots = {"train": {}, "validation": {}}
        self.enter("train")


def _reduce(slots: dict[str, Slot], gather: Gather) -> list[tuple[str, Slot, float]]:
    """(name, slot, value over all ranks), the slot's `last` the ranks' mean.

    A rank that had no batch has no slot: names are matched, not counted.
    """
    own = {name: (slot, *_own_total(slot)) for name, slot in slots.items()}
    merged: dict[str, list[tuple[Slot, float, float]]] = {}
    for rank, rank_slots in enumerate(gather({name: (_settings(slot), *sums) for name, (slot, *sums) in own.items()})):
        for name, (slot, total, weight) in rank_slots.items():
            if rank == 0 or not slot.rank_zero_only:
                merged.setdefault(name, []).append((slot, total, weight))
    return [(name, _with_mean_last(parts), _combine(parts)) for name, parts in merged.items()]


def _settings(slot: Slot) -> Slot:
    last = float(slot.last) if slot.on_step and slot.last is not None else None
    return replace(slot, last=last, total=None, weight=0.0, metric=None)


def _with_mean_last(parts: Sequence[tuple[Slot, float, float]]) -> Slot:
    lasts = [slot.last for slot, _, _ in parts if slot.last is not None]
    return replace(parts[0][0], last=sum(lasts) / len(lasts) if lasts else float("nan"))


def _own_total(slot: Slot) -> tuple[float, float]:
    if slot.metric is not None:
        value = slot.metric.compute()  # an object like this exchanges with the other ranks by itself
        slot.metric.reset()
        return float(value), 1.0
    if not slot.on_epoch:
        return (float(slot.last), 1.0) if slot.last is not None else (0.0, 0.0)
    return (float(slot.total), slot.weight) if slot.total is not None else (0.0, 0.0)


def _combine(parts: Sequence[tuple[Slot, float, float]]) -> float:
    held = [(total, weight) for _, total, weight in parts if weight > 0.0]
    if not held:
        return float("nan")
    slot = parts[0][0]
    if not slot.on_epoch:  # the last step's values: their mean, the same number on every rank
        return sum(total for total, _ in held) / len(held)
    if slot.reduction == "mean":
        return sum(total for total, _ in held) / sum(weight for _, weight in held)
    function = {"sum": sum, "min": min, "max": max}[slot.reduction]
    return float(function(total for total, _ in held))


def _step_name(name: str, slot: Slot) -> str:
    return f"{name}_step" if slot.forks else name


def _pick(plain: Callable[..., Any], tensors: Callable[..., Any], one: Any, other: Any) -> Any:
    return tensors(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else plain(one, other)


def as_scalar(name: str, value: Any) -> Any:
    """A Python number; a tensor that is not on the CPU stays one, detached, and in double precision where the device has it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(f"log({name!r}) got a tensor of shape {tuple(value.shape)}; log one number, for example its mean()")
        if value.device.type == "cpu":
            return float(value.item())
        value = value.detach().reshape(())
        return value.float() if value.device.type == "mps" else value.double()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"log({name!r}) got a {type(value).__name__}; log a number or a tensor of one element") from error


def size_of(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor in it, or 1."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for item in batch:
            if isinstance(item, torch.Tensor) and item.dim():
                return item.shape[0]
            if isinstance(item, (list, tuple, Mapping)):
                return size_of(item)
    return 1
