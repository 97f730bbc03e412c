"""TrainerState: what user code reads as `trainer`, in the caller's process and in every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpulayer.errors import UsageError
from gpulayer.train import checkpoint as files
from gpulayer.train.arguments import TrainerArguments
from gpulayer.train.callback import Callback
from gpulayer.train.early_stopping import EarlyStopping
from gpulayer.train.events import CheckpointDropped, CheckpointReady, Event
from gpulayer.train.hooks import Hooks
from gpulayer.train.logbook import Logbook
from gpulayer.train.model_checkpoint import ModelCheckpoint
from gpulayer.train.optimizers import SchedulerConfig
from gpulayer.train.rng import RngState

log = logging.getLogger(__name__)
FORMAT = "2.0.0"  # the version of Lightning's checkpoint layout that ours can be read as


class TrainerState:
    """The arguments of a run, where it is, and what it has measured (`callback_metrics`: CPU tensors, as Lightning's are)."""

    sanity_checking = False  # there is no validation before training

    def __init__(
        self, arguments: TrainerArguments, callbacks: Sequence[Callback], loggers: Sequence[Any], log_dir: str | None
    ) -> None:
        self.arguments = arguments
        self.callbacks = list(callbacks)
        self.loggers = list(loggers)
        self.log_dir = log_dir
        self.logbook = Logbook()
        self.global_rank = self.local_rank = self.node_rank = 0
        self.world_size = 1
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget an earlier run."""
        self.logbook.clear()
        self.global_step = 0
        self.current_epoch = 0
        self.training = self.validating = self.validated = False
        self.interrupted = False
        self.stop_reason = ""
        self.num_training_batches: int | float = 0
        self.num_val_batches: list[int | float] = []
        self.epoch_metrics: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.strategy: Any = None
        self._subject: nn.Module | None = None
        self._hooks: Hooks | None = None
        self._emit: Callable[[Event], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a run stays in its process: what holds it travels without it

    def begin_epoch(self) -> None:
        """Nothing is measured yet in this epoch."""
        self.training, self.validated = True, False
        self.epoch_metrics.clear()
        self.logbook.enter("train")

    def attach(self, module: nn.Module, subject: nn.Module, hooks: Hooks | None, emit: Callable[[Event], None]) -> None:
        """Belong to a run: of `module`, whose weights are `subject`'s, telling `emit`."""
        self.lightning_module, self._subject, self._hooks, self._emit = module, subject, hooks, emit

    @property
    def max_epochs(self) -> int:
        """The limit, or -1."""
        return -1 if self.arguments.max_epochs is None else self.arguments.max_epochs

    @property
    def max_steps(self) -> int:
        """The limit in optimizer steps, or -1."""
        return self.arguments.max_steps

    @property
    def num_nodes(self) -> int:
        """Hosts asked for."""
        return self.arguments.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices of each host."""
        return self.world_size // self.arguments.num_nodes

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches that make one optimizer step."""
        return self.arguments.accumulate_grad_batches

    @property
    def gradient_clip_val(self) -> float | None:
        """The limit on gradients, or None."""
        return self.arguments.gradient_clip_val

    @property
    def precision(self) -> str:
        """The format's long name."""
        return str(self.arguments.precision)

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two rows of step values."""
        return self.arguments.log_interval_steps

    @property
    def default_root_dir(self) -> str:
        """Where files go that nobody gave a place."""
        return str(self.arguments.default_root_dir)

    @property
    def validation_was_due(self) -> bool:
        """Whether this epoch has all the means that it will ever have: it was validated, or nothing is."""
        return self.validated or not self.num_val_batches

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the rank that reports."""
        return self.global_rank == 0

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint."""
        return next((c for c in self.callbacks if isinstance(c, ModelCheckpoint)), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping."""
        return next((c for c in self.callbacks if isinstance(c, EarlyStopping)), None)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run, infinite where nobody can know."""
        if self.max_epochs == -1 or self.num_training_batches == float("inf"):
            return self.max_steps if self.max_steps != -1 else float("inf")
        steps = -(-int(self.num_training_batches) // self.accumulate_grad_batches) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Everything measured so far, by name; during an epoch with the last step's values."""
        return {name: torch.tensor(value) for name, value in {**self._metrics, **self.logbook.live_values()}.items()}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """What is meant for the loggers, by name; during an epoch with the last step's values."""
        return {name: torch.tensor(value) for name, value in {**self._logged, **self.logbook.live_step_values()}.items()}

    @property
    def final_metrics(self) -> dict[str, float]:
        """`callback_metrics` as numbers, without waiting for anything."""
        return dict(self._metrics)

    @property
    def final_logged(self) -> dict[str, float]:
        """`logged_metrics` as numbers."""
        return dict(self._logged)

    def record(self, callback: dict[str, float], logged: dict[str, float], bar: dict[str, float]) -> None:
        """Take in what a part of an epoch came to."""
        self.epoch_metrics.update(callback)
        self._metrics.update(callback)
        self._logged.update(logged)
        self.progress_bar_metrics.update(bar)

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this batch; with several ranks after this epoch, so that all of them stop together."""
        return bool(self.stop_reason)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.stop_reason = "trainer.should_stop was set" if value else ""

    def stop(self, reason: str) -> None:
        """End the run, and say why in the result."""
        self.stop_reason = reason

    def print(self, *values: Any, **options: Any) -> None:
        """Print once, not once a rank."""
        if self.is_global_zero:
            print(*values, **options)

    def save_checkpoint(self, filepath: str) -> None:
        """Write a checkpoint on the caller's machine. May be called on every rank; rank 0's counts."""
        if self._subject is None or self._emit is None:
            raise UsageError("save_checkpoint: there is nothing to save before fit")
        if self.is_global_zero:
            self._emit(CheckpointReady(str(filepath), self._checkpoint(self._subject)))

    def drop_checkpoint(self, filepath: str) -> None:
        """Remove a checkpoint from the caller's machine."""
        if self.is_global_zero and self._emit is not None:
            self._emit(CheckpointDropped(filepath))

    def _checkpoint(self, subject: nn.Module) -> dict[str, Any]:
        content: dict[str, Any] = {
            "epoch": self.current_epoch,
            "global_step": self.global_step,
            "pytorch-lightning_version": FORMAT,
            "state_dict": subject.state_dict(),
            "callbacks": {callback.state_key: callback.state_dict() for callback in self.callbacks},
            "optimizer_states": [optimizer.state_dict() for optimizer in self.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in self.lr_scheduler_configs],
            "hyper_parameters": _plain_hyperparameters(subject),
            "gpulayer": {"torch_rng": RngState.capture().torch, "world_size": self.world_size},
        }
        if self._hooks is not None:
            self._hooks.call("on_save_checkpoint", content)
        return content


def _plain_hyperparameters(subject: nn.Module) -> dict[str, Any]:
    """Those that a checkpoint can hold: it is read without running code, so objects stay out."""
    hparams: Any = getattr(subject, "hparams", None)
    given: dict[str, Any] = dict(hparams) if isinstance(hparams, Mapping) else {}
    left_out = [name for name, value in given.items() if not files.is_plain(value)]
    if left_out:
        log.warning("not in the checkpoint, for they are objects: hyperparameters %s", ", ".join(left_out))
    return {name: value for name, value in given.items() if name not in left_out}
