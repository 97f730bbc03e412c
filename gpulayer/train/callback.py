"""Callback: code that runs at the points of a run.

class Print(gpulayer.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        print(trainer.current_epoch, trainer.callback_metrics)

With several ranks every rank has its own copy of a callback; after the run the caller's object has the attributes of rank 0's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from gpulayer.train.state import TrainerState


class Callback:
    """Every hook of a callback, doing nothing. The loop calls only those that are overridden."""

    def setup(self, trainer: TrainerState, pl_module: Any, stage: str) -> None:
        """Before the loaders and the optimizer are made."""

    def teardown(self, trainer: TrainerState, pl_module: Any, stage: str) -> None:
        """The run is over."""

    def on_fit_start(self, trainer: TrainerState, pl_module: Any) -> None:
        """The run begins."""

    def on_fit_end(self, trainer: TrainerState, pl_module: Any) -> None:
        """The run is over, without an error."""

    def on_train_start(self, trainer: TrainerState, pl_module: Any) -> None:
        """The first epoch is about to begin."""

    def on_train_end(self, trainer: TrainerState, pl_module: Any) -> None:
        """The last epoch is over."""

    def on_train_epoch_start(self, trainer: TrainerState, pl_module: Any) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self, trainer: TrainerState, pl_module: Any) -> None:
        """An epoch's batches and its validation are over."""

    def on_epoch_metrics(self, trainer: TrainerState, pl_module: Any) -> None:
        """All means of the epoch are in `trainer.callback_metrics`, the same on every rank: the place to decide by them."""

    def on_train_batch_start(self, trainer: TrainerState, pl_module: Any, batch: Any, batch_idx: int) -> int | None:
        """Before a batch; returning -1 ends the epoch here."""

    def on_train_batch_end(self, trainer: TrainerState, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch."""

    def on_validation_start(self, trainer: TrainerState, pl_module: Any) -> None:
        """Validation begins."""

    def on_validation_end(self, trainer: TrainerState, pl_module: Any) -> None:
        """Validation is over and its means are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: TrainerState, pl_module: Any) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: TrainerState, pl_module: Any) -> None:
        """After the last validation batch."""

    def on_validation_batch_start(
        self, trainer: TrainerState, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, trainer: TrainerState, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch."""

    def on_before_zero_grad(self, trainer: TrainerState, pl_module: Any, optimizer: Optimizer) -> None:
        """Before the gradients are dropped."""

    def on_before_backward(self, trainer: TrainerState, pl_module: Any, loss: torch.Tensor) -> None:
        """Before backward."""

    def on_after_backward(self, trainer: TrainerState, pl_module: Any) -> None:
        """The gradients of this batch are there."""

    def on_before_optimizer_step(self, trainer: TrainerState, pl_module: Any, optimizer: Optimizer) -> None:
        """The gradients are whole, unscaled, and not clipped yet."""

    def on_exception(self, trainer: TrainerState, pl_module: Any, exception: BaseException) -> None:
        """The run ends by an exception, KeyboardInterrupt among them."""

    def on_save_checkpoint(self, trainer: TrainerState, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written (rank 0)."""

    def on_load_checkpoint(self, trainer: TrainerState, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint what `on_save_checkpoint` added."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
