"""LightningModule: a model that says how it is trained. Lightning's names, one import away.

class Net(gpulayer.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpulayer.errors import UsageError
from gpulayer.train import checkpoint as files
from gpulayer.train.refusal import NotYet, refuse_others

if TYPE_CHECKING:
    from gpulayer.train.state import TrainerState

_LOAD_ARGUMENTS = ("checkpoint_path", "map_location", "strict")
_LOAD_NOT_YET: NotYet = {"hparams_file": (None,), "weights_only": (None, True)}
Self_ = TypeVar("Self_", bound="LightningModule")


class HyperParameters(dict[str, Any]):
    """A dict whose items are attributes too: `hparams["lr"]` and `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no hyperparameter {name!r}; known: {', '.join(self) or '(none)'}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class ModuleHooks:
    """Every hook of a module, doing nothing. The loop calls only those that are overridden."""

    def prepare_data(self) -> None:
        """Download or write data: called once, in the caller's process, before anything else."""

    def setup(self, stage: str) -> None:
        """Called in every rank before the loaders and the optimizer are made; `stage` is "fit"."""

    def teardown(self, stage: str) -> None:
        """Called in every rank when the run is over."""

    def configure_model(self) -> None:
        """Called in every rank after `setup`."""

    def on_fit_start(self) -> None:
        """The run begins."""

    def on_fit_end(self) -> None:
        """The run is over."""

    def on_train_start(self) -> None:
        """The first epoch is about to begin."""

    def on_train_end(self) -> None:
        """The last epoch is over."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self) -> None:
        """An epoch's batches and its validation are over; values logged here are the epoch's."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a batch; returning -1 ends the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch."""

    def on_validation_start(self) -> None:
        """Validation begins; the module is in eval mode."""

    def on_validation_end(self) -> None:
        """Validation is over and its means are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; values logged here belong to the validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before the gradients are dropped."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Before backward; `loss` is what backward starts from."""

    def on_after_backward(self) -> None:
        """The gradients of this batch are there."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The gradients are whole, unscaled, and not clipped yet."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written (rank 0)."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint what `on_save_checkpoint` added."""


class LightningModule(ModuleHooks, nn.Module):
    """An nn.Module with `training_step` and `configure_optimizers`, and what these two want to know."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self._trainer: TrainerState | None = None
        self._hparams = HyperParameters()

    def configure_optimizers(self) -> Any:
        """The optimizer, alone or with schedulers, in any of Lightning's forms."""
        raise UsageError(f"{type(self).__name__} has no configure_optimizers(); define it and return an optimizer")

    @property
    def trainer(self) -> TrainerState:
        """The run this module is in. Raises `UsageError` outside of one."""
        if self._trainer is None:
            raise UsageError(f"{type(self).__name__} is not attached to a Trainer: `trainer` is there during fit only")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: TrainerState | None) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Record `value` under `name`; see `gpulayer.train.logbook.Logbook.log` for the options. Outside fit it does nothing."""
        if self._trainer is not None:
            self._trainer.logbook.log(name, value, *args, **options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """`log` for each item."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once, not once a rank."""
        if self.global_rank == 0:
            print(*values, **options)

    def optimizers(self) -> Optimizer:
        """The optimizer of this run."""
        return self.trainer.optimizers[0]

    def lr_schedulers(self) -> Any:
        """The scheduler of this run, a list where there are several, None where there is none."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers if len(schedulers) > 1 else next(iter(schedulers), None)

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, from 0."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def global_rank(self) -> int:
        """This process among all of the run."""
        return self._trainer.global_rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """This process among those of its host."""
        return self._trainer.local_rank if self._trainer else 0

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self._trainer.logger if self._trainer else None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        first = next(self.parameters(), None)
        return torch.get_default_dtype() if first is None else first.dtype

    def freeze(self) -> None:
        """Stop training every parameter, and evaluate."""
        self.requires_grad_(False).eval()

    def unfreeze(self) -> None:
        """The opposite of `freeze`."""
        self.requires_grad_(True).train()

    @property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` kept."""
        return self._hparams

    def save_hyperparameters(
        self, *names: Any, ignore: str | Sequence[str] | None = None, frame: FrameType | None = None, **others: Any
    ) -> None:
        """Keep the arguments of the constructor that calls this (all, or those named) in `hparams` and in checkpoints.

        `frame` is the constructor's where something else calls this. Loggers are not told: `logger=True` is an error.
        """
        refuse_others("save_hyperparameters", others, ("ignore", "frame"), {"logger": (False,)})
        if not all(isinstance(name, str) for name in names):
            raise UsageError("save_hyperparameters takes names of arguments; an object that holds them is not supported yet")
        here = inspect.currentframe()
        caller = frame or (here.f_back if here else None)
        assert caller is not None
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        given = _arguments_of(caller.f_locals, type(self))
        unknown = set(names) - set(given)
        if unknown:
            raise UsageError(f"save_hyperparameters: {sorted(unknown)} are not arguments of __init__; known: {sorted(given)}")
        chosen = {name: value for name, value in given.items() if name not in ignored and (not names or name in names)}
        self._hparams.update(chosen)

    @classmethod
    def load_from_checkpoint(
        cls: type[Self_],
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        strict: bool | None = None,
        **changes: Any,
    ) -> Self_:
        """A new module from a checkpoint: built with the saved hyperparameters and `changes`, on the CPU or on `map_location`.

        `strict` (default) refuses a checkpoint whose weights have other names than the module's.
        """
        place = f"{cls.__name__}.load_from_checkpoint"
        if map_location is not None and not isinstance(map_location, (str, int, torch.device)):
            raise UsageError(f"{place}(map_location={map_location!r}): pass a device; other forms are not supported yet")
        accepted = inspect.signature(cls.__init__).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        others = {k: v for k, v in changes.items() if k not in accepted and (k in _LOAD_NOT_YET or not open_ended)}
        refuse_others(place, others, {*_LOAD_ARGUMENTS, *accepted} - {"self", "kwargs", "args"}, _LOAD_NOT_YET)
        changes = {k: v for k, v in changes.items() if k not in others}
        content = files.load(checkpoint_path)
        saved = {k: v for k, v in content.get("hyper_parameters", {}).items() if open_ended or k in accepted}
        module = cls(**{**saved, **changes})
        module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"], strict=strict is not False)
        return module if map_location is None else module.to(map_location)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}  # the run does not travel or get copied with the module


def _arguments_of(local: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """The constructor's arguments, as they stand in the frame of the constructor."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(owner.__init__).parameters.items():
        if name == "self" or name not in local:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(local[name])
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            given[name] = local[name]
    return given


class LightningDataModule:
    """Loaders with their preparation, to pass as `fit(model, datamodule=...)`. Override what you need."""

    trainer: TrainerState | None = None

    def prepare_data(self) -> None:
        """Download or write data: called once, in the caller's process."""

    def setup(self, stage: str) -> None:
        """Called in every rank before the loaders are made; `stage` is "fit"."""

    def teardown(self, stage: str) -> None:
        """Called in every rank when the run is over."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}
