"""Which hooks a run has. The lists are made once; a hook that nobody overrides costs a lookup and is not called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpulayer.errors import UsageError
from gpulayer.train.callback import Callback
from gpulayer.train.module import LightningDataModule, LightningModule, ModuleHooks

log = logging.getLogger(__name__)

HOOKS = (
    *("setup", "teardown", "on_exception", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_epoch_metrics"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint"),
)
_CALLBACK_ONLY = ("on_exception", "on_epoch_metrics")

# Lightning lets a module replace these parts of the loop. We do not call them, so a module that has them is refused.
_NOT_YET = (
    *("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "lr_scheduler_step"),
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "configure_callbacks"),
    *("configure_sharded_model", "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
)
_DATA_NOT_YET = (
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "state_dict", "load_state_dict"),
    *("on_save_checkpoint", "on_load_checkpoint", "on_exception"),
)
_OUR_BASES = (Callback, LightningModule, ModuleHooks, LightningDataModule)
_LIGHTNING_BASES = {"LightningModule", "ModelHooks", "DataHooks", "CheckpointHooks", "Callback", "LightningDataModule"}


class Hooks:
    """The hooks of some callbacks and a module, ready to call."""

    def __init__(self, callbacks: Sequence[Any], module: Any, trainer: Any) -> None:
        self._table = {name: _collect(name, callbacks, module, trainer) for name in HOOKS}

    def call(self, name: str, *args: Any) -> bool:
        """Call every hook of that name, callbacks first. True if one returned -1, which means: no more of this."""
        stop = False
        for hook in self._table[name]:
            stop = hook(*args) == -1 or stop
        return stop

    def tell_failure(self, error: BaseException) -> None:
        """Call `on_exception`. A hook that fails in it is logged: it must not hide why the run did."""
        try:
            self.call("on_exception", error)
        except Exception:  # told in full here; raised, it would hide the error that ends the run
            log.exception("on_exception failed while the run ended with %s", type(error).__name__)

    def has(self, name: str) -> bool:
        """Whether anyone overrides that hook."""
        return bool(self._table[name])


def is_overridden(owner: Any, name: str) -> bool:
    """Whether `owner` has a method of that name that is not the empty one of a base class, ours or Lightning's."""
    if name in getattr(owner, "__dict__", {}):
        return True
    for cls in type(owner).__mro__:
        if name in cls.__dict__:
            return cls not in _OUR_BASES and not (_of_lightning(cls) and cls.__name__ in _LIGHTNING_BASES)
    return False


def is_lightning(module: Any) -> bool:
    """Whether `module` is a LightningModule of Lightning's own make."""
    return any(_of_lightning(cls) and cls.__name__ == "LightningModule" for cls in type(module).__mro__)


def _of_lightning(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def refuse_unsupported(module: Any) -> None:
    """Raise `UsageError` if the module replaces a part of the loop that cannot be replaced yet."""
    _refuse_hooks(module, _NOT_YET)
    if not getattr(module, "automatic_optimization", True):
        raise UsageError("automatic_optimization=False: manual optimization is not supported yet")


def refuse_unsupported_data(datamodule: Any) -> None:
    """Raise `UsageError` if the datamodule has a part in the loop that we do not give it yet."""
    _refuse_hooks(datamodule, _DATA_NOT_YET)


def _refuse_hooks(owner: Any, names: Sequence[str]) -> None:
    for name in names:
        if is_overridden(owner, name):
            raise UsageError(f"{type(owner).__name__}.{name}: Lightning has this hook, GPUlayer does not support it yet")


def _collect(name: str, callbacks: Sequence[Any], module: Any, trainer: Any) -> tuple[Callable[..., Any], ...]:
    found: list[Callable[..., Any]] = [
        partial(getattr(callback, name), trainer, module) for callback in callbacks if is_overridden(callback, name)
    ]
    if name not in _CALLBACK_ONLY and is_overridden(module, name):
        found.append(getattr(module, name))
    return tuple(found)
