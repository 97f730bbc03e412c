"""What a Trainer is told, checked once, before anything runs.

    arguments = TrainerArguments(max_epochs=3, devices=2)      # raises UsageError for what cannot work
    refuse_unknown({"max_epoch": 3})                           # raises UsageError: did you mean max_epochs?

Names and defaults are Lightning's. What Lightning knows and we do not do yet is refused by name; only the value that asks
for nothing (Lightning's default) is let through, so that nothing is accepted and ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpulayer.errors import UsageError
from gpulayer.train.precision import Precision
from gpulayer.train.refusal import NotYet, refuse_others

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
STRATEGIES = ("auto", "ddp", "ddp_spawn", "ddp_notebook", "ddp_find_unused_parameters_true")
CLIP_ALGORITHMS = ("norm", "value")
DEFAULT_MAX_EPOCHS = 1000

# Lightning arguments that are not supported yet, with the values that ask for nothing.
NOT_YET: NotYet = {
    "fast_dev_run": (False,),
    "min_epochs": (None,),
    "min_steps": (None,),
    "max_time": (None,),
    "limit_test_batches": (None, 1.0),
    "limit_predict_batches": (None, 1.0),
    "overfit_batches": (0.0,),
    "val_check_interval": (None, 1.0),
    "num_sanity_val_steps": (None, 0),
    "enable_model_summary": (None, False),
    "deterministic": (None, False),
    "benchmark": (None,),
    "use_distributed_sampler": (True,),
    "profiler": (None,),
    "detect_anomaly": (False,),
    "barebones": (False,),
    "plugins": (None,),
    "sync_batchnorm": (False,),
    "reload_dataloaders_every_n_epochs": (0,),
    "enable_autolog_hparams": (True,),
    "model_registry": (None,),
    "suggest_integrations": (True, False),
}

# Arguments that Lightning had once, with what took their place.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("gpus", "num_gpus"), "pass accelerator='gpu' and devices=, the number of GPUs of each node"),
    "num_processes": "pass accelerator='cpu' and devices=, the number of processes of each node",
    "resume_from_checkpoint": "fit(ckpt_path=...) took its place in Lightning, and GPUlayer does not support it yet",
    "ckpt_path": "it is an argument of fit, which GPUlayer does not support yet",
    "distributed_backend": "pass strategy=",
    "checkpoint_callback": "pass enable_checkpointing=",
    "progress_bar_refresh_rate": "pass enable_progress_bar=",
}


@dataclass(frozen=True)
class TrainerArguments:
    """The plain values among a Trainer's arguments. `max_epochs` and `max_steps` are -1 where there is no limit."""

    max_epochs: int | None = None
    max_steps: int = -1
    num_nodes: int = 1
    devices: int | str = "auto"
    accelerator: str = "auto"
    strategy: str = "auto"
    precision: str | int | None = "32-true"
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    accumulate_grad_batches: int = 1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    check_val_every_n_epoch: int = 1
    log_every_n_steps: int | None = None
    enable_progress_bar: bool | None = None
    enable_checkpointing: bool | None = None
    inference_mode: bool = True
    default_root_dir: str | os.PathLike[str] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_epochs is None:
            self._set("max_epochs", DEFAULT_MAX_EPOCHS if self.max_steps == -1 else -1)
        self._set("devices", _device_count(self.devices))
        self._set("precision", Precision.of(self.precision).name)
        self._set("gradient_clip_algorithm", self.gradient_clip_algorithm or "norm")
        self._set("log_every_n_steps", 50 if self.log_every_n_steps is None else self.log_every_n_steps)
        self._set("enable_progress_bar", _switch("enable_progress_bar", self.enable_progress_bar))
        self._set("enable_checkpointing", _switch("enable_checkpointing", self.enable_checkpointing))
        self._set("default_root_dir", os.path.abspath(os.path.expanduser(self.default_root_dir or os.getcwd())))
        self._check()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        for name in ("max_epochs", "max_steps"):
            _integer(name, getattr(self, name), least=-1)
        for name in ("num_nodes", "accumulate_grad_batches", "check_val_every_n_epoch"):
            _integer(name, getattr(self, name), least=1)
        _integer("log_every_n_steps", self.log_every_n_steps, least=0)
        if self.seed is not None:
            _integer("seed", self.seed, least=0, most=2**32 - 1)
        _one_of("accelerator", self.accelerator, ACCELERATORS)
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("gradient_clip_algorithm", self.gradient_clip_algorithm, CLIP_ALGORITHMS)
        _switch("inference_mode", self.inference_mode)
        clip = self.gradient_clip_val
        if clip is not None and not (_is_number(clip) and clip >= 0):
            raise UsageError(f"gradient_clip_val={clip!r} is not a number >= 0; None or 0 clips nothing")
        for name in ("limit_train_batches", "limit_val_batches"):
            _limit(name, getattr(self, name))

    @property
    def log_interval_steps(self) -> int:
        """Optimizer steps between two rows of step values in the loggers; 0 for none."""
        return self.log_every_n_steps or 0


def refuse_unknown(given: Mapping[str, Any], also_known: Iterable[str] = ()) -> None:
    """Raise `UsageError` for the first argument that we do not know or do not do yet."""
    known = {field.name for field in fields(TrainerArguments)} | set(also_known)
    refuse_others("Trainer", given, known, NOT_YET, INSTEAD)


def limited(length: int | None, limit: int | float | None) -> int | None:
    """How many of `length` batches an epoch takes: a whole number counts, a fraction is a share. None is unknown."""
    if limit is None:
        return length
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    return None if length is None else int(length * limit)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        allowed = f"a whole number >= {least}" + (f" and <= {most}" if most is not None else "")
        note = " (-1: no limit)" if least == -1 else ""
        raise UsageError(f"{name}={value!r} is not {allowed}{note}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r} is not supported; allowed: {', '.join(allowed)}")


def _switch(name: str, value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not True or False")
    return value


def _device_count(devices: Any) -> int | str:
    if devices in ("auto", -1, "-1"):
        return "auto"
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise UsageError(f"devices={devices!r} is not supported; pass how many per node (a whole number >= 1) or 'auto'")
    return devices


def _limit(name: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    share = isinstance(value, float) and 0.0 < value <= 1.0
    if _is_number(value) and value == 0:
        if name == "limit_train_batches":
            raise UsageError(f"{name}={value!r}: an epoch without batches trains nothing; leave it out, or pass 1 or more")
        return
    if value is not None and not (whole or share):
        raise UsageError(f"{name}={value!r} is neither a number of batches >= 1 nor a share in (0.0, 1.0]")
