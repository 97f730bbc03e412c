"""The narrator counts samples and tells how a run goes: rows for the loggers, news for the terminal, a word about NaN.

Only here is the device read during an epoch: every `log_every_n_steps` steps, and ten times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from gpulayer.train.events import EpochEnded, Event, MetricsLogged, NanLoss, Progress, Started
from gpulayer.train.logbook import Means
from gpulayer.train.losswatch import LossWatch
from gpulayer.train.state import TrainerState
from gpulayer.train.strategy import SingleDevice

PROGRESS_INTERVAL_S = 0.1


class Narrator:
    """What one rank says. Rank 0 tells all; the others take part in what needs every rank, and tell of NaN."""

    def __init__(self, strategy: SingleDevice, trainer: TrainerState, emit: Callable[[Event], None]) -> None:
        self._strategy, self._trainer, self._emit = strategy, trainer, emit
        self._reports = strategy.rank == 0
        self._watch = LossWatch()
        self.samples = 0
        self.train_s = 0.0
        self._epoch_began_s = 0.0
        self._epoch_samples = 0
        self._epoch_speed = 0.0
        self._last_news_s = 0.0
        self._last_row_step = 0

    @property
    def nan_step(self) -> int | None:
        """The first optimizer step whose loss was NaN."""
        return self._watch.nan_step

    def begin(self, batches_per_epoch: int | None) -> None:
        """The run begins."""
        if self._reports:
            trainer = self._trainer
            self._emit(Started(trainer.max_epochs, trainer.max_steps, batches_per_epoch, self._strategy.world_size))

    def begin_epoch(self) -> None:
        """The first batch of an epoch is about to be read."""
        self._epoch_began_s, self._epoch_samples = time.perf_counter(), 0

    def watch(self, loss: torch.Tensor) -> None:
        """Keep an eye on this loss."""
        self._watch.add(self._trainer.global_step + 1, loss)

    def count(self, samples: int) -> None:
        """A batch of so many samples (over all ranks) is trained."""
        self._epoch_samples += samples

    def end_batch(self, index: int) -> None:
        """A row if it is time for one, news if it is time for them."""
        trainer, every = self._trainer, self._trainer.log_every_n_steps
        if every and trainer.global_step % every == 0 and trainer.global_step != self._last_row_step:
            self._last_row_step = trainer.global_step
            self._log_row(trainer.logbook.step_values(self._strategy.gather, self._strategy.world_size))
        now_s = time.perf_counter()
        if now_s - self._last_news_s >= PROGRESS_INTERVAL_S:
            self._last_news_s = now_s
            self._check_loss()
            if self._reports:
                live = trainer.logbook.live_values(bar_only=True)
                self._emit(Progress(trainer.current_epoch, index + 1, trainer.global_step, live, self._speed(now_s)))

    def end_training(self) -> None:
        """The epoch's last batch is trained; what follows is not training time."""
        self._check_loss()
        now_s = time.perf_counter()
        self._epoch_speed = self._speed(now_s)
        self.train_s += now_s - self._epoch_began_s
        self.samples += self._epoch_samples

    def record(self, means: Means) -> None:
        """Put means into the trainer's metrics and the loggers."""
        self._trainer.record(means.callback, {**means.steps, **means.logged}, means.bar)
        self._log_row(means.logged)

    def end_epoch(self) -> None:
        """The epoch is over, with validation: show those of its means that are meant for the terminal, or else all."""
        if self._reports:
            trainer = self._trainer
            chosen = {name: value for name, value in trainer.epoch_metrics.items() if name in trainer.progress_bar_metrics}
            plain = {name: value for name, value in trainer.epoch_metrics.items() if not name.endswith(("_step", "_epoch"))}
            shown = dict(sorted((chosen or plain).items(), key=lambda item: not item[0].startswith("train")))
            self._emit(EpochEnded(trainer.current_epoch, trainer.global_step, shown, self._epoch_speed))

    def _log_row(self, values: Mapping[str, float]) -> None:
        if values and self._reports:
            self._trainer.record({}, dict(values), {})
            self._emit(MetricsLogged(self._trainer.global_step, {"epoch": self._trainer.current_epoch, **values}))

    def _check_loss(self) -> None:
        step = self._watch.news()
        if step is not None:
            self._emit(NanLoss(step, self._strategy.rank))

    def _speed(self, now_s: float) -> float:
        return self._epoch_samples / max(now_s - self._epoch_began_s, 1e-9)
