"""What one run is (FitJob), what a rank hands back (RankResult), and what the caller gets (FitResult)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpulayer.train.arguments import TrainerArguments
from gpulayer.train.callback import Callback
from gpulayer.train.rng import RngState


@dataclass(frozen=True)
class FitJob:
    """A run, whole: it travels in one piece, so that an optimizer still holds the model's own parameters at the other end.

    `module` is what the loop drives, `subject` the caller's model inside it; loaders are None where the module brings its own.
    """

    arguments: TrainerArguments
    module: nn.Module
    subject: nn.Module
    callbacks: list[Callback]
    rng: RngState
    seed: int
    train: Any = None
    val: tuple[Any, ...] | None = None
    datamodule: Any = None
    log_dir: str | None = None
    remote: bool = False
    ships_optimizer: bool = False


@dataclass(frozen=True)
class RankResult:
    """What one rank hands back. What was added to the model, weights, optimizer state and callbacks come from rank 0 alone,
    and only from afar."""

    steps: int
    epochs: int
    samples: int
    train_s: float
    stopped: str
    nan_step: int | None
    metrics: dict[str, float]
    logged: dict[str, float]
    added: dict[str, Any] = field(default_factory=dict[str, Any])
    weights: dict[str, torch.Tensor] | None = None
    optimizer_state: dict[str, Any] | None = None
    callbacks: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class FitResult:
    """How a run went. `metrics` are the last value of each name; `seconds` is the whole of fit, `samples_s` training alone."""

    metrics: dict[str, float]
    steps: int
    epochs: int
    seconds: float
    samples_s: float
    stopped: str
    nan_loss: bool
    world_size: int
    best_model_path: str = ""
    last_model_path: str = ""
    log_dir: str | None = None


def weights_of(subject: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in _tensors_of(subject).items()}


def load_weights(subject: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put the values into the model's own tensors, so that whoever holds one of them holds the trained one."""
    own = _tensors_of(subject)
    for name, value in weights.items():
        tensor = own[name]
        if tensor.dtype == value.dtype and tensor.shape == value.shape:
            tensor.data.copy_(value)
        else:  # the run had a format of its own (bf16-true, 64-true), or a lazy parameter took its shape
            tensor.data = value.to(tensor.device)


def load_callback(callback: Callback, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Put what `portable_state` made on a rank into the caller's object."""
    attributes, state_dict = state
    vars(callback).update(attributes)
    if state_dict:
        callback.load_state_dict(state_dict)


def _tensors_of(subject: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
