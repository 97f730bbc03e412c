"""The number formats of a run: what the model holds, what autocast computes in, whether the loss is scaled.

Precision.of("bf16-mixed")      # also 32, 64, 16, "bf16" and None, as Lightning has them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpulayer.errors import UsageError

_SHORT = {None: "32-true", "32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_TRUE = {"32-true": None, "64-true": torch.float64, "bf16-true": torch.bfloat16}
_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """A format by its long name. `model_dtype` is None where the model stays as it was made."""

    name: str
    model_dtype: torch.dtype | None
    autocast_dtype: torch.dtype | None

    @classmethod
    def of(cls, name: str | int | None) -> Precision:
        """The format called `name`, long or short. Raises `UsageError` for any other."""
        text = name if name is None else str(name)
        long = _SHORT.get(text, text)
        if isinstance(name, bool) or long not in {**_TRUE, **_MIXED}:
            allowed = ", ".join([*_TRUE, *_MIXED, "32", "64", "16", "bf16"])
            raise UsageError(f"precision={name!r} is not supported; allowed: {allowed}")
        assert long is not None
        return cls(long, _TRUE.get(long), _MIXED.get(long))

    def convert_module(self, module: nn.Module) -> None:
        """Give the module the format's own type, in place; it keeps that type after the run."""
        if self.model_dtype is not None:
            module.to(self.model_dtype)

    def convert_batch(self, batch: Any) -> Any:
        """The batch with its floating tensors in the model's type."""
        if self.model_dtype is None:
            return batch
        dtype = self.model_dtype
        return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def wrap(self, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """`function` under autocast, or itself where there is none: no cost that is not needed."""
        if self.autocast_dtype is None:
            return function
        dtype = self.autocast_dtype

        def autocasted(*args: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return function(*args)

        return autocasted

    def scaler(self, device: torch.device) -> torch.amp.grad_scaler.GradScaler | None:
        """What scales the loss so that float16 gradients do not vanish; None for the other formats."""
        if self.autocast_dtype is not torch.float16:
            return None
        return torch.amp.grad_scaler.GradScaler(device.type)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` applied to every tensor in its lists, tuples, named tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return _same_kind(value, {key: map_tensors(item, function) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if hasattr(value, "to") and hasattr(value, "items"):  # a BatchEncoding or the like: a mapping that moves itself
        mapping: Any = value
        return type(mapping)({key: map_tensors(item, function) for key, item in mapping.items()})
    return value


def _same_kind(original: dict[Any, Any], mapped: dict[Any, Any]) -> Any:
    return mapped if type(original) is dict else type(original)(mapped)
