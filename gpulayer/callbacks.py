"""`gpulayer.callbacks`, as in Lightning: the callbacks of the Trainer."""

from gpulayer.train.callbacks import Callback, EarlyStopping, ModelCheckpoint

__all__ = ["Callback", "EarlyStopping", "ModelCheckpoint"]
