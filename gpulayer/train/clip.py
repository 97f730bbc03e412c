"""Gradient clipping, with no wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def clip_gradients(parameters: Sequence[torch.Tensor], limit: float, algorithm: str) -> None:
    """Limit the gradients' total norm ("norm") or each of their values ("value") to `limit`."""
    if algorithm == "norm":
        clip_grad_norm_(parameters, limit)
    else:
        clip_grad_value_(parameters, limit)
