"""Checkpoint files: written whole or not at all, loaded without running code.

write(path, {"state_dict": ...})      # temporary file beside the target, fsync, rename; a failure raises
load(path)                            # weights_only=True
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch


def write(path: str | os.PathLike[str], content: dict[str, Any] | bytes) -> None:
    """Make the file at `path` hold `content`; after a failure or Ctrl-C the old file stands and no other is left."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")  # named before it exists, so that no Ctrl-C can lose it
    data = content if isinstance(content, bytes) else to_bytes(content)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def to_bytes(content: dict[str, Any]) -> bytes:
    """What torch.save makes of it: a snapshot that later training steps do not touch."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a checkpoint, tensors on the CPU. Refuses a file that holds code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def is_plain(value: Any) -> bool:
    """Whether `load` will read the value back: numbers, text, tensors, and lists, tuples and dicts of them."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device)):
        return True
    if type(value) in (list, tuple, set):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
