"""The callbacks there are, by the names that user code imports: `gpulayer.callbacks`."""

from __future__ import annotations

from gpulayer.train.callback import Callback
from gpulayer.train.early_stopping import EarlyStopping
from gpulayer.train.model_checkpoint import ModelCheckpoint

__all__ = ["Callback", "EarlyStopping", "ModelCheckpoint"]
