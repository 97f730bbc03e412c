"""From a job to the parts that the loop drives: hooks, feeds, optimizer. What the end has to undo goes on a stack at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gpulayer.errors import UsageError
from gpulayer.train.adapt import check_trainable
from gpulayer.train.data import Feed, LoaderSpec, ShardFeed, as_loader
from gpulayer.train.events import Event
from gpulayer.train.growth import check_only_grown, parts_of
from gpulayer.train.hooks import Hooks, is_lightning, is_overridden, refuse_unsupported
from gpulayer.train.job import FitJob
from gpulayer.train.module import LightningModule
from gpulayer.train.optimizers import SchedulerConfig, parse_optimizers
from gpulayer.train.precision import Precision
from gpulayer.train.rng import RngState, RngStream, seed_everything
from gpulayer.train.state import TrainerState
from gpulayer.train.strategy import SingleDevice


@dataclass(frozen=True)
class Parts:
    """What the loop drives."""

    module: Any
    hooks: Hooks
    train: Feed
    val: tuple[Feed, ...]
    optimizer: Optimizer
    schedulers: list[SchedulerConfig]
    precision: Precision
    scaler: torch.amp.grad_scaler.GradScaler | None
    arrived: frozenset[str]  # the names of the model's parts before setup


def prepare(job: FitJob, strategy: SingleDevice, trainer: TrainerState, emit: Callable[[Event], None], undo: ExitStack) -> Parts:
    """Everything before the first batch, in Lightning's order: setup, loaders, optimizer."""
    module = job.module
    refuse_unsupported(module)
    if job.remote:
        _seed_rank(job, strategy.rank)
    hooks = Hooks(trainer.callbacks, module, trainer)
    _attach(job, strategy, trainer, hooks, emit, undo)
    arrived = parts_of(job.subject)
    _set_up_module(job, trainer, hooks)
    if job.remote:
        check_only_grown(job.subject, arrived)
    precision = Precision.of(job.arguments.precision)
    _place(module, strategy.root_device, precision, undo)
    train, val = _feeds(job, strategy, trainer, undo)
    optimizer, schedulers = parse_optimizers(module.configure_optimizers(), module)  # pyright: ignore[reportCallIssue]
    trainer.optimizers, trainer.lr_scheduler_configs = [optimizer], schedulers
    scaler = precision.scaler(strategy.root_device)
    return Parts(module, hooks, train, val, optimizer, schedulers, precision, scaler, arrived)


def _seed_rank(job: FitJob, rank: int) -> None:
    """Rank 0 continues the caller's random numbers; the others draw their own, so that dropout differs between ranks."""
    if rank == 0:
        job.rng.restore()
    else:
        seed_everything((job.seed + rank) % 2**63, verbose=False)


def _attach(
    job: FitJob, strategy: SingleDevice, trainer: TrainerState, hooks: Hooks, emit: Callable[[Event], None], undo: ExitStack
) -> None:
    place, module = strategy.place, job.module
    trainer.start_afresh()
    trainer.world_size, trainer.global_rank = place.world_size, place.rank
    trainer.local_rank, trainer.node_rank = place.local_rank, place.node_rank
    trainer.strategy, trainer.datamodule = strategy, job.datamodule
    trainer.attach(module, job.subject, hooks, emit)
    holders: list[Any] = [holder for holder in (module, getattr(module, "target", None), job.datamodule) if holder is not None]
    for holder in holders:
        lent = {} if isinstance(holder, LightningModule) or holder is job.datamodule else _lent(holder, trainer)
        undo.callback(_detach, holder, lent)
        holder.trainer = trainer
        vars(holder).update(lent)

    def finish(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        trainer.training = trainer.validating = False
        if error is not None:
            trainer.interrupted = isinstance(error, KeyboardInterrupt)
            hooks.tell_failure(error)
        hooks.call("teardown", "fit")
        if is_overridden(job.datamodule, "teardown"):
            job.datamodule.teardown("fit")

    undo.push(finish)


def _lent(holder: Any, trainer: TrainerState) -> dict[str, Callable[..., Any]]:
    """The methods that a module of another make has for the time of the run, in front of its own."""
    lent: dict[str, Callable[..., Any]] = {"log": trainer.logbook.log, "log_dict": trainer.logbook.log_dict}
    if is_lightning(holder):  # its own look for parts of Lightning's Trainer
        lent.update(print=trainer.print, optimizers=lambda use_pl_optimizer=True: trainer.optimizers[0])
    return lent


def _detach(holder: Any, lent: dict[str, Callable[..., Any]]) -> None:
    for name in lent:
        vars(holder).pop(name, None)
    holder.trainer = None


def _set_up_module(job: FitJob, trainer: TrainerState, hooks: Hooks) -> None:
    if is_overridden(job.datamodule, "setup"):
        job.datamodule.setup("fit")
    hooks.call("setup", "fit")
    if is_overridden(job.module, "configure_model"):
        job.module.configure_model()  # pyright: ignore[reportCallIssue]
    check_trainable(job.module)


def _place(module: nn.Module, device: torch.device, precision: Precision, undo: ExitStack) -> None:
    first = next(module.parameters())
    if first.device != device:
        undo.callback(module.to, first.device)
        module.to(device)
    precision.convert_module(module)


def _feeds(job: FitJob, strategy: SingleDevice, trainer: TrainerState, undo: ExitStack) -> tuple[Feed, tuple[Feed, ...]]:
    """Every rank draws the order of the data from where rank 0's random numbers are now: as one process would."""
    arguments, order = job.arguments, strategy.broadcast(RngState.capture())
    train = job.train if job.train is not None else _own_loader(job, "train_dataloader")
    if train is None:
        raise UsageError("there is no train data: pass it to fit, or define train_dataloader() in the module or the datamodule")
    val = _val_loaders(job)
    if val and not is_overridden(job.module, "validation_step"):
        raise UsageError(f"there is validation data, and {type(job.module).__name__} has no validation_step()")
    feed = _feed(train, order, strategy, "train", arguments.limit_train_batches, undo)
    val_feeds = tuple(_feed(loader, order, strategy, "validation", arguments.limit_val_batches, undo) for loader in val)
    for each, name in ((feed, "train"), *((each, "validation") for each in val_feeds)):
        if each.length == 0 and each.loader_length:
            raise UsageError(f"the limit on {name} batches leaves none of the loader's {each.loader_length}; pass a larger one")
    if feed.length == 0:
        raise UsageError(f"the train loader is empty{_why_empty(feed, strategy)}")
    trainer.num_training_batches = float("inf") if feed.length is None else feed.length
    trainer.num_val_batches = [float("inf") if each.length is None else each.length for each in val_feeds]
    trainer.train_dataloader = feed.loader
    trainer.val_dataloaders = val_feeds[0].loader if len(val_feeds) == 1 else [each.loader for each in val_feeds] or None
    return feed, val_feeds


def _val_loaders(job: FitJob) -> tuple[Any, ...]:
    if job.arguments.limit_val_batches == 0:
        return ()
    return job.val if job.val is not None else as_tuple(_own_loader(job, "val_dataloader"))


def _own_loader(job: FitJob, name: str) -> Any:
    for owner in (job.datamodule, job.module):
        if owner is not None and is_overridden(owner, name):
            return getattr(owner, name)()
    return None


def _feed(source: Any, order: RngState, strategy: SingleDevice, name: str, limit: int | float | None, undo: ExitStack) -> Feed:
    if strategy.world_size == 1:
        feed = Feed(as_loader(source, None, name == "train", name), limit)
    else:
        spec = source if isinstance(source, LoaderSpec) else LoaderSpec.of(as_loader(source, None, name == "train", name), name)
        feed = ShardFeed(spec, strategy.rank, strategy.world_size, RngStream(order), limit, pad=name == "train")

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        feed.close() if error is None else feed.abort()

    undo.push(end)
    return feed


def _why_empty(feed: Feed, strategy: SingleDevice) -> str:
    if isinstance(feed, ShardFeed):
        return (
            f" (one global batch is {feed.shards.global_batch} samples: batch_size times {strategy.world_size} ranks, drop_last)"
        )
    if isinstance(feed.loader, DataLoader):
        loader = feed.loader
        return f": {len(cast(Sized, loader.dataset))} samples, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
    return ""


def as_tuple(loaders: Any) -> tuple[Any, ...]:
    """None, one loader or several, as a tuple. A list counts as several if all of its items are loaders or datasets."""
    if loaders is None:
        return ()
    if isinstance(loaders, (list, tuple)) and all(isinstance(item, (DataLoader, torch.utils.data.Dataset)) for item in loaders):
        return tuple(loaders)
    return (loaders,)


def positional_arguments(function: Callable[..., Any]) -> int:
    """How many arguments, at most 3, `function` takes by position."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 3
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
