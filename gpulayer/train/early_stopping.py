"""EarlyStopping: end a run that no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpulayer.train.callback import Callback
from gpulayer.train.monitor import better_direction, read_monitor
from gpulayer.train.refusal import NotYet, refuse_others

if TYPE_CHECKING:
    from gpulayer.train.state import TrainerState


_ARGUMENTS = ("monitor", "min_delta", "patience", "mode", "verbose", "strict", "check_finite", "check_on_train_epoch_end")
_NOT_YET: NotYet = {"stopping_threshold": (None,), "divergence_threshold": (None,), "log_rank_zero_only": (False, True)}


class EarlyStopping(Callback):
    """Stop when `monitor` has not improved by more than `min_delta` for `patience` validations.

    `check_finite`: stop at once when it is NaN or infinite. `strict`: a monitor that nobody logs is an error.
    `check_on_train_epoch_end=False`: look only in epochs that are validated. `verbose` prints what is seen, on rank 0.
    """

    def __init__(
        self,
        monitor: str,
        *,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: str | None = None,
        verbose: bool = False,
        strict: bool = True,
        check_finite: bool = True,
        check_on_train_epoch_end: bool | None = None,
        **others: Any,
    ) -> None:
        refuse_others("EarlyStopping", others, _ARGUMENTS, _NOT_YET)
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.check_on_train_epoch_end = check_on_train_epoch_end
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
        if self.check_on_train_epoch_end is False and not trainer.validated:
            return
        value = read_monitor(trainer, self.monitor, self.strict)
        if value is None:
            return
        if self.check_finite and not math.isfinite(value):
            self._stop(trainer, f"{self.monitor} is {value}, which is not finite (best {self.best_score:.4g})")
            return
        gain = self.best_score - value if self.mode == "min" else value - self.best_score
        if gain > self.min_delta:  # a NaN is never a gain
            if self.verbose:
                trainer.print(f"epoch {trainer.current_epoch}: {self.monitor} improved to {value:.5g}")
            self.best_score, self.wait_count = value, 0
            return
        self.wait_count += 1
        if self.wait_count >= self.patience:
            self._stop(trainer, f"{self.monitor} did not improve for {self.wait_count} epochs (best {self.best_score:.4g})")

    def _stop(self, trainer: TrainerState, reason: str) -> None:
        self.stopped_epoch = trainer.current_epoch
        trainer.stop(reason)
        if self.verbose:
            trainer.print(f"epoch {trainer.current_epoch}: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """What it has seen so far."""
        return {name: getattr(self, name) for name in ("wait_count", "stopped_epoch", "best_score", "patience")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what it had seen."""
        for name, value in state_dict.items():
            setattr(self, name, value)
