"""ModelCheckpoint: keep the best or the newest checkpoints of a run, as files on the caller's machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gpulayer.errors import UsageError
from gpulayer.train.callback import Callback
from gpulayer.train.monitor import better_direction, read_monitor
from gpulayer.train.refusal import NotYet, refuse_others

if TYPE_CHECKING:
    from gpulayer.train.state import TrainerState


_ARGUMENTS = (
    *("dirpath", "filename", "monitor", "mode", "save_last", "save_top_k", "verbose", "auto_insert_metric_name"),
    "save_on_train_epoch_end",
)
_NOT_YET: NotYet = {
    "save_weights_only": (False,),
    "every_n_epochs": (None, 1),
    "every_n_train_steps": (None, 0),
    "train_time_interval": (None,),
    "save_on_exception": (False,),
    "enable_version_counter": (True,),
}


class ModelCheckpoint(Callback):
    """Save at the end of every epoch; keep the `save_top_k` best by `monitor` (-1: all), or the newest without one.

    `dirpath` defaults to `checkpoints` in the first logger's folder, or in the Trainer's `default_root_dir`. In `filename` each
    `{name}` becomes `name=value`, without `auto_insert_metric_name` the value alone. `save_on_train_epoch_end=False` saves only
    in epochs that are validated. `verbose` prints what is saved.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        mode: str | None = None,
        save_last: bool | None = False,
        save_top_k: int = 1,
        verbose: bool = False,
        auto_insert_metric_name: bool = True,
        save_on_train_epoch_end: bool | None = None,
        **others: Any,
    ) -> None:
        refuse_others("ModelCheckpoint", others, _ARGUMENTS, _NOT_YET)
        if save_last not in (True, False, None):
            raise UsageError(f"save_last={save_last!r} is not supported; pass True or False")
        if save_top_k < -1:
            raise UsageError(f"save_top_k={save_top_k} is not -1 (all), 0 (none) or more")
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise UsageError(f"save_top_k={save_top_k} needs monitor=, the metric that tells which are best")
        if monitor is None and mode is not None:
            raise UsageError(f"mode={mode!r} needs monitor=, the metric that it is about")
        self.dirpath = os.path.abspath(os.path.expanduser(dirpath)) if dirpath is not None else None
        self.filename = filename or "{epoch}-{step}"
        self.monitor = monitor
        self.mode = better_direction(monitor, mode) if monitor else None
        self.save_last = bool(save_last)
        self.verbose = verbose
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.save_top_k = save_top_k
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.last_model_path = ""
        self.kept: dict[str, float] = {}

    def setup(self, trainer: TrainerState, pl_module: Any, stage: str) -> None:
        """Choose the folder; forget what an earlier run kept."""
        self._start_afresh()
        if self.dirpath is None:
            self.dirpath = os.path.join(trainer.log_dir or trainer.default_root_dir, "checkpoints")

    def on_epoch_metrics(self, trainer: TrainerState, pl_module: Any) -> None:
        """Save, and drop what is no longer among the best."""
        if self.save_on_train_epoch_end is False and not trainer.validated:
            return
        score = float(trainer.global_step) if self.monitor is None else read_monitor(trainer, self.monitor)
        if score is not None and self.save_top_k != 0:
            self._keep(trainer, score)
        if self.save_last:
            self.last_model_path = self._path("last")
            trainer.save_checkpoint(self.last_model_path)

    def _keep(self, trainer: TrainerState, score: float) -> None:
        worst_first = sorted(self.kept, key=lambda path: self._rank(self.kept[path]), reverse=True)
        full = 0 < self.save_top_k <= len(self.kept)
        if full and self._rank(score) > self._rank(self.kept[worst_first[0]]):
            return
        path = self._unused(self._path(self._render(trainer)))
        self.kept[path] = score
        best = min(self.kept, key=lambda kept: (self._rank(self.kept[kept]), kept != path))
        self.best_model_path = best
        self.best_model_score = None if self.monitor is None else self.kept[best]
        trainer.save_checkpoint(path)
        if self.verbose:
            reason = "" if self.monitor is None else f" ({self.monitor} {score:.5g}, best {self.best_model_score:.5g})"
            trainer.print(f"epoch {trainer.current_epoch}: saved {path}{reason}")
        if full:  # only now: until the new one is written, the old one is the only one
            del self.kept[worst_first[0]]
            trainer.drop_checkpoint(worst_first[0])

    def _rank(self, score: float) -> float:
        """Lower is better; NaN is worse than anything."""
        if score != score:
            return float("inf")
        return score if self.mode == "min" else -score

    def _path(self, stem: str) -> str:
        assert self.dirpath is not None
        return os.path.join(self.dirpath, stem + ".ckpt")

    def _unused(self, path: str) -> str:
        stem = path.removesuffix(".ckpt")
        version = 1
        while path in self.kept:
            path, version = f"{stem}-v{version}.ckpt", version + 1
        return path

    def _render(self, trainer: TrainerState) -> str:
        values = {**trainer.epoch_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
        text = self.filename
        for name in sorted(values, key=len, reverse=True) if self.auto_insert_metric_name else ():
            for opening in (f"{{{name}:", f"{{{name}}}"):
                text = text.replace(opening, f"{name}=" + opening)
        try:
            return text.format(**values)
        except (KeyError, ValueError, IndexError) as error:
            known = ", ".join(sorted(values))
            raise UsageError(
                f"ModelCheckpoint filename={self.filename!r} cannot be filled in ({error!r}); known: {known}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """What was kept."""
        names = ("best_model_path", "best_model_score", "last_model_path", "kept", "dirpath")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with what was kept."""
        for name, value in state_dict.items():
            setattr(self, name, value)
