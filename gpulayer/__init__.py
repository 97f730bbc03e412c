"""Train PyTorch on every GPU you can reach: one Trainer, from your laptop to many machines.

Names are loaded when they are first used, so that `import gpulayer` and the command line cost milliseconds and import
neither torch nor zmq.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpulayer import callbacks as callbacks
    from gpulayer import errors as errors
    from gpulayer import loggers as loggers
    from gpulayer.errors import GPUlayerError as GPUlayerError
    from gpulayer.runtime.actors import ActorHandle as ActorHandle
    from gpulayer.runtime.actors import get_actor as get_actor
    from gpulayer.runtime.actors import kill as kill
    from gpulayer.runtime.connect import cluster as cluster
    from gpulayer.runtime.connect import connect as connect
    from gpulayer.runtime.connect import disconnect as disconnect
    from gpulayer.runtime.refs import ObjectRef as ObjectRef
    from gpulayer.runtime.remote import cancel as cancel
    from gpulayer.runtime.remote import get as get
    from gpulayer.runtime.remote import put as put
    from gpulayer.runtime.remote import remote as remote
    from gpulayer.runtime.remote import wait as wait
    from gpulayer.train.callbacks import Callback as Callback
    from gpulayer.train.module import LightningDataModule as LightningDataModule
    from gpulayer.train.module import LightningModule as LightningModule
    from gpulayer.train.rng import seed_everything as seed_everything
    from gpulayer.train.trainer import Trainer as Trainer

_HOME = {
    "ActorHandle": "gpulayer.runtime.actors",
    "Callback": "gpulayer.train.callbacks",
    "GPUlayerError": "gpulayer.errors",
    "LightningDataModule": "gpulayer.train.module",
    "LightningModule": "gpulayer.train.module",
    "ObjectRef": "gpulayer.runtime.refs",
    "Trainer": "gpulayer.train.trainer",
    "cancel": "gpulayer.runtime.remote",
    "cluster": "gpulayer.runtime.connect",
    "connect": "gpulayer.runtime.connect",
    "disconnect": "gpulayer.runtime.connect",
    "get": "gpulayer.runtime.remote",
    "get_actor": "gpulayer.runtime.actors",
    "kill": "gpulayer.runtime.actors",
    "put": "gpulayer.runtime.remote",
    "remote": "gpulayer.runtime.remote",
    "seed_everything": "gpulayer.train.rng",
    "wait": "gpulayer.runtime.remote",
}
_MODULES = {"callbacks": "gpulayer.callbacks", "errors": "gpulayer.errors", "loggers": "gpulayer.loggers"}

__all__ = [
    "ActorHandle",
    "Callback",
    "GPUlayerError",
    "LightningDataModule",
    "LightningModule",
    "ObjectRef",
    "Trainer",
    "__version__",
    "callbacks",
    "cancel",
    "cluster",
    "connect",
    "disconnect",
    "errors",
    "get",
    "get_actor",
    "kill",
    "loggers",
    "put",
    "remote",
    "seed_everything",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'gpulayer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
