"""Validation: every sample once over all ranks, the random numbers of training untouched, every submodule's mode put back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpulayer.train.data import Feed
from gpulayer.train.logbook import Means
from gpulayer.train.preparation import Parts, positional_arguments
from gpulayer.train.rng import isolated_rng
from gpulayer.train.state import TrainerState
from gpulayer.train.strategy import SingleDevice


class Validation:
    """The validation of a run: `run()` as often as it is due. `record` takes the means before `on_validation_end` is called."""

    def __init__(self, parts: Parts, strategy: SingleDevice, trainer: TrainerState, record: Callable[[Means], None]) -> None:
        self._parts, self._strategy, self._trainer, self._record = parts, strategy, trainer, record
        if parts.val:
            self._arguments = positional_arguments(parts.module.validation_step)
            self._step = parts.precision.wrap(parts.module.validation_step, strategy.root_device)

    def is_due(self, epoch: int) -> bool:
        """Whether to validate at the end of this epoch."""
        return bool(self._parts.val) and (epoch + 1) % self._trainer.arguments.check_val_every_n_epoch == 0

    def run(self) -> None:
        """All validation loaders, once."""
        trainer, hooks = self._trainer, self._parts.hooks
        no_grad = torch.inference_mode if trainer.arguments.inference_mode else torch.no_grad
        trainer.validating, trainer.training = True, False
        with isolated_rng(), evaluating(self._parts.module), no_grad():
            trainer.logbook.enter("validation")
            hooks.call("on_validation_start")
            hooks.call("on_validation_epoch_start")
            for number, feed in enumerate(self._parts.val):
                self._run_loader(number, feed)
            trainer.logbook.enter("validation")
            hooks.call("on_validation_epoch_end")
            self._record(trainer.logbook.close_epoch("validation", self._strategy.gather))
            trainer.validated = True
            hooks.call("on_validation_end")
        trainer.validating, trainer.training = False, True

    def _run_loader(self, number: int, feed: Feed) -> None:
        suffix = f"/dataloader_idx_{number}" if len(self._parts.val) > 1 else ""
        feed.start_epoch(self._trainer.current_epoch)
        try:
            for index, batch in enumerate(feed.batches()):
                self._run_batch(batch, index, number, suffix)
        finally:
            feed.close()

    def _run_batch(self, batch: Any, index: int, number: int, suffix: str) -> None:
        hooks = self._parts.hooks
        batch = self._parts.precision.convert_batch(self._strategy.to_device(batch))
        self._trainer.logbook.begin_batch(batch, suffix=suffix)
        hooks.call("on_validation_batch_start", batch, index, number)
        outputs = self._step(*(batch, index, number)[: self._arguments])
        hooks.call("on_validation_batch_end", outputs, batch, index, number)


@contextmanager
def evaluating(module: nn.Module) -> Generator[None, None, None]:
    """The module in eval mode inside; outside each submodule in the mode it was in, so that a frozen one stays so."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
