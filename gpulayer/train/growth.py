"""What setup() and configure_model() add to a model on the ranks, so that the caller's model can have it too.

before = parts_of(model)          # as the model arrived at its rank
added = added_to(model, before)   # after training, on rank 0
graft(callers_model, added)       # the caller's model has the same modules and tensors by name
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from gpulayer.errors import UsageError


def parts_of(model: nn.Module) -> frozenset[str]:
    """The names of all modules, parameters and buffers."""
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    return frozenset(name for part in named for name, _ in part)


def check_only_grown(model: nn.Module, before: frozenset[str]) -> None:
    """Raise `UsageError` if something that the caller's model has is gone: it could not take the weights back."""
    gone = sorted(before - parts_of(model))
    if gone:
        raise UsageError(
            f"setup() or configure_model() took {', '.join(gone[:4])} away from the model: with several devices the caller's "
            f"model could not take the weights back; make the model's parts in __init__, or only add to them"
        )


def added_to(model: nn.Module, before: frozenset[str]) -> dict[str, Any]:
    """What is new since `before`, by name, on the CPU: whole modules, and parameters and buffers of those that were there."""
    modules = {name: module for name, module in model.named_modules() if name not in before}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    added: dict[str, Any] = {name: copy.deepcopy(part).cpu() for name, part in modules.items() if _owner(name) not in modules}
    return added | {name: _on_cpu(t) for name, t in tensors.items() if name not in before and _owner(name) not in modules}


def graft(model: nn.Module, added: dict[str, Any]) -> None:
    """Put each part where it stands in the rank's model."""
    for name, part in added.items():
        owner, own_name = model.get_submodule(_owner(name)), name.rpartition(".")[2]
        if isinstance(part, (nn.Module, nn.Parameter)):
            setattr(owner, own_name, part)
        else:
            owner.register_buffer(own_name, part)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    on_cpu = tensor.detach().cpu()
    return nn.Parameter(on_cpu, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else on_cpu
