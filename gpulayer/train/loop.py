"""The training loop of one rank. It knows nothing of processes: where it runs is the strategy's, whom it tells is `emit`'s.

result = FitLoop(job, strategy, trainer, emit).run()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import nn

from gpulayer.errors import UsageError
from gpulayer.train.clip import clip_gradients
from gpulayer.train.events import Event
from gpulayer.train.growth import added_to
from gpulayer.train.job import FitJob, RankResult, weights_of
from gpulayer.train.monitor import read_monitor
from gpulayer.train.narrator import Narrator
from gpulayer.train.optimizers import parameters_of
from gpulayer.train.preparation import Parts, positional_arguments, prepare
from gpulayer.train.state import TrainerState
from gpulayer.train.strategy import SingleDevice
from gpulayer.train.validation import Validation

log = logging.getLogger(__name__)


class FitLoop:
    """One run on one rank, from the first hook to the result."""

    def __init__(self, job: FitJob, strategy: SingleDevice, trainer: TrainerState, emit: Callable[[Event], None]) -> None:
        self.job = job
        self.strategy = strategy
        self.trainer = trainer
        self.emit = emit
        self.narrator = Narrator(strategy, trainer, emit)
        self.accumulate = job.arguments.accumulate_grad_batches
        self.window_has_loss = False

    def run(self) -> RankResult:
        """Train until a limit is reached or someone stops the run."""
        with ExitStack() as undo:
            self._take(prepare(self.job, self.strategy, self.trainer, self.emit, undo))
            self.hooks.call("on_fit_start")
            self.hooks.call("on_train_start")
            while not self._reason_to_end():
                self._run_epoch()
            self.hooks.call("on_train_end")
            self.hooks.call("on_fit_end")
            return self._result()

    def _take(self, parts: Parts) -> None:
        """Look up once what every step needs."""
        self.parts, self.hooks = parts, parts.hooks
        self.optimizer, self.scaler = parts.optimizer, parts.scaler
        self.step_module = self.strategy.wrap(TrainingStep(parts.module))
        self.forward = parts.precision.wrap(self.step_module, self.strategy.root_device)
        self.validation = Validation(parts, self.strategy, self.trainer, self.narrator.record)
        if not parts.module.training:
            log.warning("the model is in eval mode and is trained in it; call model.train() before fit if that is not meant")
        self.narrator.begin(parts.train.length)

    def _reason_to_end(self) -> str:
        trainer = self.trainer
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return f"max_steps={trainer.max_steps} reached"
        if trainer.max_epochs != -1 and trainer.current_epoch >= trainer.max_epochs:
            return f"max_epochs={trainer.max_epochs} reached"
        return trainer.stop_reason

    # --- an epoch ---------------------------------------------------------------------------------------------------------

    def _run_epoch(self) -> None:
        trainer = self.trainer
        trainer.begin_epoch()
        self.hooks.call("on_train_epoch_start")
        self._train_epoch()
        self._step_schedulers("epoch", trainer.current_epoch + 1)
        if self.validation.is_due(trainer.current_epoch):
            self.validation.run()
        trainer.logbook.enter("train")
        self.hooks.call("on_train_epoch_end")
        self.narrator.record(trainer.logbook.close_epoch("train", self.strategy.gather))
        self._step_plateau_schedulers(trainer.current_epoch + 1)
        self.hooks.call("on_epoch_metrics")
        self.narrator.end_epoch()
        self._stop_together()
        trainer.current_epoch += 1

    def _train_epoch(self) -> None:
        feed, index = self.parts.train, -1
        feed.start_epoch(self.trainer.current_epoch)
        self.trainer.logbook.enter("train", in_step=True)
        self.narrator.begin_epoch()
        try:
            for index, batch, held in self._windows(feed.batches()):
                if self._train_batch(batch, index, held) or self._cut_short():
                    break
        finally:
            feed.close()
        if index < 0:
            raise UsageError(
                f"the train loader gave no batch in epoch {self.trainer.current_epoch}; an iterator can be read only once"
            )
        self.narrator.end_training()

    def _windows(self, batches: Iterator[Any]) -> Iterator[tuple[int, Any, int]]:
        """(index, batch, batches in its accumulation window). The last window holds what is left."""
        length, size = self.parts.train.length, self.accumulate
        if size == 1 or length is not None:
            for index, batch in enumerate(batches):
                yield index, batch, 1 if size == 1 or length is None else min(size, length - index // size * size)
            return
        start = 0
        while window := list(islice(batches, size)):  # only reading ahead tells how many are left
            for index, batch in enumerate(window, start):
                yield index, batch, len(window)
            start += len(window)

    def _cut_short(self) -> bool:
        trainer = self.trainer
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return True
        return bool(trainer.stop_reason) and self.strategy.world_size == 1

    def _stop_together(self) -> None:
        """A rank that wants to stop stops all of them: they need each other."""
        if self.strategy.world_size > 1:
            reasons = [reason for reason in self.strategy.gather(self.trainer.stop_reason) if reason]
            self.trainer.stop_reason = reasons[0] if reasons else ""

    # --- a batch ----------------------------------------------------------------------------------------------------------

    def _train_batch(self, batch: Any, index: int, held: int) -> bool:
        """One batch, and the optimizer's step if it closes its window. True if a hook wants the epoch to end."""
        hooks, feed = self.hooks, self.parts.train
        samples = feed.samples(index, batch)
        batch = self.parts.precision.convert_batch(self.strategy.to_device(batch))
        self.trainer.logbook.begin_batch(batch, feed.counts(index))
        if hooks.call("on_train_batch_start", batch, index):
            if self.strategy.world_size > 1:  # the others would wait for this rank's gradients
                raise UsageError("on_train_batch_start returned -1: with several devices this is not supported yet")
            return True
        opens, closes = index % self.accumulate == 0, index % self.accumulate == held - 1
        with nullcontext() if closes else self.strategy.no_sync(self.step_module):
            outputs = self.forward(batch, index)
            loss = _loss_of(outputs, self.strategy.world_size)
            if opens:
                self.window_has_loss = False
                hooks.call("on_before_zero_grad", self.optimizer)
                self.optimizer.zero_grad()
            if loss is not None:
                self._backward(loss, feed.weight(index) / held)
        if closes and self.window_has_loss:
            self._optimizer_step()
        self.narrator.count(samples)
        hooks.call("on_train_batch_end", outputs, batch, index)
        self.narrator.end_batch(index)
        return False

    def _backward(self, loss: torch.Tensor, factor: float) -> None:
        self.window_has_loss = True
        self.narrator.watch(loss)
        if factor != 1.0:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.hooks.call("on_before_backward", loss)
        loss.backward()
        self.hooks.call("on_after_backward")

    def _optimizer_step(self) -> None:
        arguments = self.job.arguments
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.hooks.call("on_before_optimizer_step", self.optimizer)
        if arguments.gradient_clip_val:
            clip_gradients(
                parameters_of(self.optimizer), arguments.gradient_clip_val, arguments.gradient_clip_algorithm or "norm"
            )
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.trainer.global_step += 1
        self._step_schedulers("step", self.trainer.global_step)

    def _step_schedulers(self, interval: str, count: int) -> None:
        for config in self.parts.schedulers:
            if config.interval == interval and count % config.frequency == 0 and not config.reduce_on_plateau:
                config.scheduler.step()

    def _step_plateau_schedulers(self, epochs: int) -> None:
        """These wait for the epoch's means; the others have stepped before validation, as in Lightning."""
        for config in self.parts.schedulers:
            if config.reduce_on_plateau and config.monitor and epochs % config.frequency == 0:
                value = read_monitor(self.trainer, config.monitor, config.strict)
                if value is not None:
                    config.scheduler.step(value)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def _result(self) -> RankResult:
        trainer, job, narrator = self.trainer, self.job, self.narrator
        ships = job.remote and trainer.is_global_zero
        return RankResult(
            steps=trainer.global_step,
            epochs=trainer.current_epoch,
            samples=narrator.samples,
            train_s=narrator.train_s,
            stopped=trainer.stop_reason or self._reason_to_end(),
            nan_step=narrator.nan_step,
            metrics=trainer.final_metrics,
            logged=trainer.final_logged,
            added=added_to(job.subject, self.parts.arrived) if ships else {},
            weights=weights_of(job.subject) if ships else None,
            optimizer_state=self.optimizer.state_dict() if ships and job.ships_optimizer else None,
        )


class TrainingStep(nn.Module):
    """A module whose forward is a training step: what DistributedDataParallel can watch."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._step = module.training_step
        self._arguments = positional_arguments(self._step)

    def forward(self, batch: Any, batch_idx: int) -> Any:
        """The module's training_step."""
        return self._step(*(batch, batch_idx)[: self._arguments])


def _loss_of(outputs: Any, world_size: int) -> torch.Tensor | None:
    """The loss among what training_step returned; None to skip the batch."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    if outputs is None:
        if world_size == 1:
            return None
        raise UsageError("training_step returned None: with several devices every rank must give a loss for every batch")
    raise UsageError(
        f"training_step returned a {type(outputs).__name__}; allowed: a tensor of one element, a dict with 'loss', None"
    )
