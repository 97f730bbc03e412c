"""Whatever the caller trains, as a module with `training_step` and `configure_optimizers`.

adapt(lightning_module)                                             # itself
adapt(net, loss="cross_entropy", optimizer=partial(AdamW, lr=1e-3)) # a PlainModule around it
adapt(object_with_training_step)                                    # an ObjectModule around it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from gpulayer.errors import UsageError
from gpulayer.train.hooks import HOOKS, is_lightning, is_overridden
from gpulayer.train.module import LightningModule
from gpulayer.train.optimizers import check_owner, check_scheduler, make_optimizer

LOSSES: Mapping[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
    "nll": functional.nll_loss,
    "huber": functional.huber_loss,
}


def accuracy(y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The share of samples whose highest score (or, with one score each, its sign) is at the label."""
    single = y_hat.shape == y.shape
    predicted = (y_hat > 0).to(y.dtype) if single else y_hat.argmax(dim=1)
    return (predicted == y).float().mean()


_STEPS = ("training_step", "validation_step", "configure_optimizers", "train_dataloader", "val_dataloader", "prepare_data")
METRICS: Mapping[str, Callable[..., Any]] = {"accuracy": accuracy}


class PlainModule(LightningModule):
    """A plain nn.Module with a loss, an optimizer and metrics. Logs train_loss, val_loss and val_<metric>."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor] | None,
        optimizer: Any,
        lr_scheduler: Any,
        metrics: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss  # an nn.Module here becomes a submodule, and so reaches the device with the model
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._metrics = dict(metrics)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        loss, _, _ = self._evaluate(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss and the metrics of one batch."""
        loss, y_hat, y = self._evaluate(batch)
        self.log("val_loss", loss, prog_bar=True)
        for name, metric in self._metrics.items():
            self.log(f"val_{name}", metric(y_hat, y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """The optimizer that was given, made here unless it is an instance, with its scheduler."""
        optimizer = make_optimizer(self._optimizer, self.model)
        if self._lr_scheduler is None:
            return optimizer
        scheduler = self._lr_scheduler(optimizer) if callable(self._lr_scheduler) else self._lr_scheduler
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _evaluate(self, batch: Any) -> tuple[torch.Tensor, Any, Any]:
        if isinstance(batch, Mapping) and self.loss is None:
            output = self.model(**batch)
            loss = getattr(output, "loss", None)
            if loss is None:
                raise UsageError(
                    f"the batch is a dict, and model(**batch) gave a {type(output).__name__} without .loss; pass loss="
                )
            return loss, getattr(output, "logits", None), batch.get("labels")
        if not (isinstance(batch, Sequence) and len(batch) == 2):
            raise UsageError(
                f"a plain nn.Module is trained on batches (x, y), or on dicts (loss= left out) where the output "
                f"has .loss; the loader gave {_kind(batch)}. Write a gpulayer.LightningModule for any other form"
            )
        if self.loss is None:
            raise UsageError(f"batches (x, y) need a loss: fit(..., loss='cross_entropy'); known names: {', '.join(LOSSES)}")
        x, y = batch
        y_hat = self.model(x)
        return self.loss(y_hat, y), y_hat, y


class ObjectModule(LightningModule):
    """An object that is no nn.Module but has `training_step`, `configure_optimizers` and modules among its attributes."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        vars(self)["target"] = target
        for name, value in vars(target).items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
        for name in (*HOOKS, *_STEPS):
            if callable(getattr(target, name, None)):
                vars(self)[name] = getattr(target, name)


def adapt(
    model: Any, loss: Any = None, optimizer: Any = None, lr_scheduler: Any = None, metrics: Any = None
) -> LightningModule | nn.Module:
    """The module to train. Raises `UsageError` where `model` and the other arguments do not fit together."""
    _check_form(model)
    if callable(getattr(model, "training_step", None)) and callable(getattr(model, "configure_optimizers", None)):
        _refuse_extras(loss=loss, optimizer=optimizer, lr_scheduler=lr_scheduler, metrics=metrics)
        module = model if isinstance(model, nn.Module) else ObjectModule(model)
    elif isinstance(model, nn.Module):
        if optimizer is None:
            raise UsageError("a plain nn.Module needs optimizer=, for example partial(torch.optim.AdamW, lr=1e-3), and loss=")
        check_scheduler(lr_scheduler)
        module = PlainModule(model, _loss(loss), optimizer, lr_scheduler, _metrics(metrics))
    else:
        raise UsageError(f"cannot train a {type(model).__name__}; pass an nn.Module, or an object with training_step "
                         "and configure_optimizers")  # fmt: skip
    check_trainable(module)
    if isinstance(optimizer, Optimizer):
        check_owner(optimizer, module)
    return module


def _check_form(model: Any) -> None:
    if isinstance(model, type):
        raise UsageError(f"fit got the class {model.__name__}; pass an instance of it: fit({model.__name__}(...))")
    of_lightning = isinstance(model, LightningModule) or is_lightning(model)
    steps = is_overridden(model, "training_step") if of_lightning else callable(getattr(model, "training_step", None))
    optimizers = callable(getattr(model, "configure_optimizers", None))
    if steps != optimizers:
        missing, there = ("configure_optimizers", "training_step") if steps else ("training_step", "configure_optimizers")
        also = "it is a LightningModule" if of_lightning else f"it has {there}()"
        raise UsageError(f"{type(model).__name__} has no {missing}(); define it ({also}, which needs both)")


def check_trainable(module: nn.Module) -> None:
    """Raise `UsageError` for a module in which there is nothing to train."""
    parameters = list(module.parameters())
    if not parameters and not _makes_parameters_later(module):
        raise UsageError(f"{_name(module)} has no parameters, so there is nothing to train")
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise UsageError(f"every parameter of {_name(module)} has requires_grad=False, so there is nothing to train")


def _makes_parameters_later(module: nn.Module) -> bool:
    return is_overridden(module, "setup") or is_overridden(module, "configure_model")


def _name(module: nn.Module) -> str:
    inner = module.model if isinstance(module, PlainModule) else module
    return type(inner).__name__


def _refuse_extras(**extras: Any) -> None:
    for name, value in extras.items():
        if value is not None:
            raise UsageError(f"{name}= is for a plain nn.Module; this model has its own training_step and configure_optimizers")


def _loss(loss: Any) -> Any:
    if loss is None or (callable(loss) and not isinstance(loss, str)):
        return loss
    if loss not in LOSSES:
        raise UsageError(f"loss={loss!r} is not known; pass a function (y_hat, y) or one of: {', '.join(LOSSES)}")
    return LOSSES[loss]


def _metrics(metrics: Any) -> dict[str, Callable[..., Any]]:
    if metrics is None:
        return {}
    if isinstance(metrics, str):
        metrics = [metrics]
    named = dict(metrics) if isinstance(metrics, Mapping) else {name: name for name in metrics}
    chosen: dict[str, Callable[..., Any]] = {}
    for name, metric in named.items():
        if not callable(metric) and metric not in METRICS:
            raise UsageError(
                f"metrics: {metric!r} is not known; pass {{name: function(y_hat, y)}} or names of: {', '.join(METRICS)}"
            )
        chosen[str(name)] = metric if callable(metric) else METRICS[metric]
    return chosen


def _kind(batch: Any) -> str:
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return f"a {type(batch).__name__} of {len(batch)} items"
    return f"a {type(batch).__name__}"
