"""Optimizers and schedulers: made from what the caller gave, read from what `configure_optimizers` returned.

make_optimizer(partial(AdamW, lr=1e-3), net)         # also a class, "adamw", or an instance over net's parameters
parse_optimizers({"optimizer": o, "lr_scheduler": s}, module)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gpulayer.errors import UsageError

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
_FORMS = "an optimizer, [optimizer], ([optimizer], [schedulers]) or {'optimizer': ..., 'lr_scheduler': ...}"


@dataclass(frozen=True)
class SchedulerConfig:
    """A scheduler and when it steps: every `frequency` optimizer steps ("step") or epochs ("epoch")."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False


def make_optimizer(given: Any, model: nn.Module) -> Optimizer:
    """The optimizer over the trainable parameters of `model`."""
    if isinstance(given, Optimizer):
        check_owner(given, model)
        return given
    if isinstance(given, str):
        if given.lower() not in OPTIMIZERS:
            raise UsageError(
                f"optimizer={given!r} is not known; pass partial(torch.optim.AdamW, lr=...) or one of: {', '.join(OPTIMIZERS)}"
            )
        given = OPTIMIZERS[given.lower()]
    if not callable(given):
        raise UsageError(f"optimizer={given!r} is neither an optimizer, nor a function of the parameters, nor a name")
    made = given([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(made, Optimizer):
        raise UsageError(f"optimizer= made a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def check_scheduler(given: Any) -> None:
    """Raise `UsageError` unless it is something that a plain module's scheduler can be made of."""
    if given is not None and not (callable(given) or isinstance(given, Mapping) or hasattr(given, "step")):
        raise UsageError(
            f"lr_scheduler={given!r} is not supported; pass a function of the optimizer, for example "
            "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10), a scheduler over the optimizer that is passed, or a "
            "dict with 'scheduler' and any of 'interval', 'frequency', 'monitor'"
        )


def check_owner(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise `UsageError` unless the optimizer's parameters are the module's."""
    own = {id(parameter) for parameter in module.parameters()}
    foreign = sum(id(parameter) not in own for parameter in parameters_of(optimizer))
    if foreign:
        total = len(parameters_of(optimizer))
        raise UsageError(
            f"{foreign} of the optimizer's {total} parameters belong to another model (or to an earlier copy of this one), so "
            f"training would not change this model; build the optimizer from this model's parameters()"
        )


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of the optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parse_optimizers(returned: Any, module: nn.Module) -> tuple[Optimizer, list[SchedulerConfig]]:
    """The optimizer and the schedulers among what `configure_optimizers` returned, in any of Lightning's forms."""
    optimizers, schedulers = _split(returned)
    if len(optimizers) != 1:
        raise UsageError(f"configure_optimizers returned {len(optimizers)} optimizers; one is supported yet")
    optimizer = optimizers[0]
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"configure_optimizers returned a {type(optimizer).__name__}; allowed: {_FORMS}")
    check_owner(optimizer, module)
    return optimizer, [_scheduler(item) for item in schedulers if item is not None]


def _split(returned: Any) -> tuple[list[Any], list[Any]]:
    if returned is None:
        raise UsageError(f"configure_optimizers returned None; training without an optimizer is not supported. Return {_FORMS}")
    if isinstance(returned, Mapping):
        unknown = set(returned) - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or "optimizer" not in returned:
            raise UsageError(
                f"configure_optimizers returned a dict with keys {sorted(returned)}; allowed: optimizer, lr_scheduler, monitor"
            )
        scheduler = returned.get("lr_scheduler")
        if scheduler is not None and returned.get("monitor"):
            scheduler = {"monitor": returned["monitor"], **_as_dict(scheduler)}
        return [returned["optimizer"]], [scheduler]
    if isinstance(returned, Sequence):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            return list(returned[0]), list(returned[1]) if isinstance(returned[1], (list, tuple)) else [returned[1]]
        if all(isinstance(item, Mapping) for item in returned):
            pairs = [_split(item) for item in returned]
            return [o for pair in pairs for o in pair[0]], [s for pair in pairs for s in pair[1]]
        return list(returned), []
    return [returned], []


def _as_dict(scheduler: Any) -> dict[str, Any]:
    return dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


def _scheduler(given: Any) -> SchedulerConfig:
    options = _as_dict(given)
    known = [field.name for field in fields(SchedulerConfig)]
    unknown = set(options) - set(known)
    if unknown or "scheduler" not in options:
        raise UsageError(f"an lr_scheduler dict has keys {sorted(options)}; needed: scheduler; allowed: {', '.join(known)}")
    if not hasattr(options["scheduler"], "step"):
        raise UsageError(f"an lr_scheduler is a {type(options['scheduler']).__name__}, which has no step()")
    plateau = isinstance(options["scheduler"], ReduceLROnPlateau) or bool(options.get("reduce_on_plateau"))
    options["reduce_on_plateau"] = plateau
    config = SchedulerConfig(**options)
    if config.interval not in ("epoch", "step") or config.frequency < 1:
        raise UsageError(
            f"lr_scheduler interval={config.interval!r}, frequency={config.frequency!r}; allowed: epoch or step, >= 1"
        )
    if plateau and not config.monitor:
        raise UsageError("ReduceLROnPlateau needs to know what to watch: {'scheduler': ..., 'monitor': 'val_loss'}")
    if plateau and config.interval == "step":
        raise UsageError("ReduceLROnPlateau with interval='step' is not supported yet; leave out interval")
    return config
