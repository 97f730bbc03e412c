"""EarlyStopping: end a run that no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpulayer.train.callback import Callback
from gpulayer.train.monitor import better_direction, read_monitor

if TYPE_CHECKING:
    from gpulayer.train.state import TrainerState


class EarlyStopping(Callback):
    """Stop when `monitor` has not improved by more than `min_delta` for `patience` validations."""

    def __init__(self, monitor: str, *, min_delta: float = 0.0, patience: int = 3, mode: str | None = None) -> None:
        self.monitor = monitor
        self.mode = better_direction(monitor, mode)
        self.min_delta = abs(min_delta)
        self.patience = patience
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = math.inf if self.mode == "min" else -math.inf

    def setup(self, trainer: TrainerState, pl_module: Any, stage: str) -> None:
        """Forget what an earlier run had seen."""
        self._start_afresh()

    def on_epoch_metrics(self, trainer: TrainerState, pl_module: Any) -> None:
        """Compare, count, and stop."""
        value = read_monitor(trainer, self.monitor)
        if value is None:
            return
        gain = self.best_score - value if self.mode == "min" else value - self.best_score
        if gain > self.min_delta:  # a NaN is never a gain
            self.best_score, self.wait_count = value, 0
            return
        self.wait_count += 1
        if self.wait_count >= self.patience:
            self.stopped_epoch = trainer.current_epoch
            trainer.stop(f"{self.monitor} did not improve for {self.wait_count} epochs (best {self.best_score:.4g})")

    def state_dict(self) -> dict[str, Any]:
        """What it has seen so far."""
        return {name: getattr(self, name) for name in ("wait_count", "stopped_epoch", "best_score", "patience")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what it had seen."""
        for name, value in state_dict.items():
            setattr(self, name, value)
