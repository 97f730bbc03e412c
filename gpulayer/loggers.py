"""`gpulayer.loggers`, as in Lightning: where the Trainer's metrics go."""

from gpulayer.train.loggers import CSVLogger, Logger

__all__ = ["CSVLogger", "Logger"]
