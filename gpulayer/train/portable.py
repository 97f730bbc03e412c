"""What of a callback goes back to the caller when its rank has finished."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpulayer.errors import GPUlayerError
from gpulayer.train.callback import Callback
from gpulayer.train.state import TrainerState
from gpulayer.wire import serialize


def portable_state(callback: Callback) -> tuple[dict[str, Any], dict[str, Any]]:
    """A callback's attributes, those that can travel, and its state_dict if there are others.

    Model and trainer stay out: the caller has his own.
    """
    own = {name: value for name, value in vars(callback).items() if not isinstance(value, (nn.Module, TrainerState))}
    able = {name: value for name, value in own.items() if _travels(value)}
    return able, {} if len(able) == len(own) else callback.state_dict()


def _travels(value: Any) -> bool:
    try:
        serialize.dumps(value)
    except GPUlayerError:
        return False
    return True
