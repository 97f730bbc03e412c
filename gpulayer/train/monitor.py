"""A monitored metric: which way is better, and what it is in this epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer.errors import UsageError

if TYPE_CHECKING:
    from gpulayer.train.state import TrainerState

_RISING = ("acc", "f1", "auc", "precision", "recall", "iou", "r2", "bleu")
_FALLING = ("loss", "error", "err", "mse", "mae", "rmse", "perplexity", "ppl", "nll")


def better_direction(monitor: str, mode: str | None) -> str:
    """ "min" or "max": the given one, or the one that the metric's name tells. Raises `UsageError` where it tells nothing."""
    if mode in ("min", "max"):
        return mode
    if mode is not None:
        raise UsageError(f"mode={mode!r} is not supported; allowed: 'min', 'max'")
    words = monitor.lower().replace("/", "_").replace("-", "_").split("_")
    if any(word.startswith(_FALLING) for word in words):
        return "min"
    if any(word.startswith(_RISING) for word in words):
        return "max"
    raise UsageError(f"is a high {monitor!r} good or bad? Pass mode='max' or mode='min' beside monitor={monitor!r}")


def read_monitor(trainer: TrainerState, monitor: str, strict: bool = True) -> float | None:
    """The monitored value of this epoch; None if it was not measured in it. `UsageError` if nobody logs it and strict."""
    if monitor in trainer.epoch_metrics:
        return trainer.epoch_metrics[monitor]
    if not strict or monitor in trainer.final_metrics or not trainer.validation_was_due:
        return None
    known = ", ".join(sorted(trainer.final_metrics)) or "(nothing was logged)"
    raise UsageError(f"monitor={monitor!r} was not logged; logged: {known}")
