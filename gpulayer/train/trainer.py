"""The Trainer.

trainer = gpulayer.Trainer(max_epochs=3)
result = trainer.fit(module, train_loader, val_loader)                                            # Lightning-shaped
result = trainer.fit(net, train_data, val_data, loss="cross_entropy", optimizer=partial(AdamW, lr=1e-3))    # a plain nn.Module

One device: in this process, bit for bit the plain PyTorch loop. Several: the same call, on a gang of workers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpulayer.errors import TrainingError, UsageError
from gpulayer.train.adapt import ObjectModule, PlainModule, adapt
from gpulayer.train.arguments import TrainerArguments, refuse_unknown
from gpulayer.train.callback import Callback
from gpulayer.train.data import LoaderSpec, as_loader
from gpulayer.train.growth import graft
from gpulayer.train.hooks import Hooks, is_overridden, refuse_unsupported, refuse_unsupported_data
from gpulayer.train.job import FitJob, FitResult, RankResult, load_callback, load_weights
from gpulayer.train.loggers import as_loggers
from gpulayer.train.loop import FitLoop
from gpulayer.train.model_checkpoint import ModelCheckpoint
from gpulayer.train.onlookers import publisher, warn_of_idle_hosts
from gpulayer.train.preparation import as_tuple
from gpulayer.train.progress import open_display
from gpulayer.train.refusal import NotYet, refuse_others
from gpulayer.train.reporter import Reporter
from gpulayer.train.rng import RngState, seed_everything
from gpulayer.train.state import TrainerState
from gpulayer.train.strategy import SingleDevice

log = logging.getLogger("gpulayer.train")
_FIT_ARGUMENTS = (
    *("model", "train_dataloaders", "val_dataloaders", "datamodule", "loss", "optimizer", "lr_scheduler", "metrics"),
    "batch_size",
)
_FIT_NOT_YET: NotYet = {"ckpt_path": (None,), "weights_only": (None,)}


class Trainer(TrainerState):
    """Trains a model. Names and defaults are Lightning's; an argument that is unknown or not supported yet is an error.

    max_epochs, max_steps: limits, -1 for none; 1000 epochs if both are left out. max_steps counts optimizer steps.
    num_nodes, devices, accelerator: hosts, devices of each ("auto": all GPUs, or one CPU), "auto", "cpu", "gpu", "cuda", "mps".
    strategy: "auto" or "ddp", of which "ddp_spawn" and "ddp_notebook" are other names (workers are started in one way, from
        scripts and notebooks alike); "ddp_find_unused_parameters_true" for a step that leaves parameters unused.
    precision: "32-true", "64-true", "bf16-true", "16-mixed", "bf16-mixed", or short 32, 64, 16, "bf16". The two "true" formats
        other than 32 change the model's type, and it keeps it.
    gradient_clip_val, gradient_clip_algorithm: limit on the gradients' "norm" (default) or on each "value"; None or 0 for none.
    accumulate_grad_batches: batches of one optimizer step; the last step of an epoch divides by what is left.
    limit_train_batches, limit_val_batches: batches of an epoch (int) or the share of them (float); no validation for 0.
    check_val_every_n_epoch: epochs between two validations, which come after the epoch's training.
    logger: True (a CSVLogger in default_root_dir), False, a logger, or a list. log_every_n_steps: steps between two rows.
    callbacks: a Callback or a list. enable_checkpointing: whether a ModelCheckpoint is added where there is none.
    enable_progress_bar: whether to show a bar (in a terminal) or a line an epoch (elsewhere), on stderr.
    inference_mode: validate in torch.inference_mode (default) or in torch.no_grad.
    default_root_dir: where logs and checkpoints go, the working directory if left out.
    seed: seeds Python, NumPy and torch when fit starts. The model exists by then: call seed_everything before making it.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Any = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        inference_mode: bool = True,
        default_root_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> None:
        given = dict(locals())
        refuse_unknown(unknown, also_known=("logger", "callbacks"))
        arguments = TrainerArguments(**{field.name: given[field.name] for field in fields(TrainerArguments)})
        loggers = as_loggers(logger, str(arguments.default_root_dir))
        super().__init__(arguments, _callbacks(callbacks, bool(arguments.enable_checkpointing)), loggers, None)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: None = None,
        *,
        loss: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        metrics: Any = None,
        batch_size: int | None = None,
        **unknown: Any,
    ) -> FitResult:
        """Train `model` and leave the trained weights in it.

        `model` has `training_step` and `configure_optimizers`, or is a plain nn.Module; then `loss` is a function (y_hat, y) or a
        name, `optimizer` a function of the parameters (partial(AdamW, lr=1e-3)), a name or an instance over its parameters,
        `lr_scheduler` a function of the optimizer, `metrics` names or {name: function(y_hat, y)}. Data are DataLoaders, Datasets
        (then `batch_size` counts, 32 if left out) or iterables of batches. With several ranks the batch size is each rank's;
        weights, buffers, modules and parameters that setup() made, callbacks' attributes, metrics and files come back, while the
        caller's random numbers stand still and other attributes that the module gets in the run stay on the ranks.
        Raises what the user's code raises, KeyboardInterrupt too; with several ranks a TrainingError(rank, host) whose __cause__
        is that. The Trainer can be used again, and a second fit starts at epoch 0 and step 0, with the weights that are there.
        """
        began_s = time.perf_counter()
        refuse_others("fit", {"ckpt_path": ckpt_path, **unknown}, _FIT_ARGUMENTS, _FIT_NOT_YET)
        refuse_unsupported_data(datamodule)
        if datamodule is not None and (train_dataloaders is not None or val_dataloaders is not None):
            raise UsageError("pass loaders or a datamodule, not both")
        module = adapt(model, loss, optimizer, lr_scheduler, metrics)
        refuse_unsupported(module)
        train = None if train_dataloaders is None else as_loader(train_dataloaders, batch_size, shuffle=True, name="train")
        val = tuple(as_loader(each, batch_size, shuffle=False, name="validation") for each in as_tuple(val_dataloaders))
        _prepare_data(module, datamodule)
        job = self._job(module, model, train, val if val_dataloaders is not None else None, datamodule, optimizer)
        with Reporter(open_display(bool(self.arguments.enable_progress_bar)), self.loggers) as reporter:
            if self._devices_here() == 1 and self.num_nodes == 1:
                warn_of_idle_hosts()
                if publish := publisher():
                    reporter.publish_to(publish)
                loop = FitLoop(self._with_log(job), SingleDevice(self._device()), self, reporter.handle)
                results = [loop.run()]
            else:
                results = self._fit_in_gang(job, reporter, optimizer)
        return self._result(results, time.perf_counter() - began_s)

    def _job(
        self, module: nn.Module, model: Any, train: Any, val: tuple[Any, ...] | None, datamodule: Any, optimizer: Any
    ) -> FitJob:
        if self.arguments.seed is not None:
            seed_everything(self.arguments.seed)
        subject = module if isinstance(module, ObjectModule) else model
        return FitJob(
            arguments=self.arguments,
            module=module,
            subject=subject,
            callbacks=self.callbacks,
            rng=RngState.capture(),
            seed=torch.initial_seed(),
            train=train,
            val=val,
            datamodule=datamodule,
            ships_optimizer=isinstance(module, PlainModule) and isinstance(optimizer, Optimizer),
        )

    def _with_log(self, job: FitJob) -> FitJob:
        """The job with the loggers' folder, which is made here: not before the run has its devices."""
        self.log_dir = next((d for each in self.loggers if (d := getattr(each, "log_dir", None))), None)
        return replace(job, log_dir=self.log_dir)

    def _fit_in_gang(self, job: FitJob, reporter: Reporter, optimizer: Any) -> list[RankResult]:
        from gpulayer.train import gang as gangs  # only here: a run on one device needs no runtime

        _warn_of_batch_norm(job.module)
        self.start_afresh()
        travelling = _travelling(job)
        try:
            with gangs.reserve(job) as gang:
                reporter.publish_to(gang.publish)
                results = gangs.fit_in_gang(gang, self._with_log(travelling), reporter.handle)
        except BaseException as error:
            self.interrupted = isinstance(error, KeyboardInterrupt)
            Hooks(self.callbacks, job.module, self).tell_failure(error)  # the caller's own callbacks hear of it too
            if isinstance(error, TrainingError) and isinstance(error.__cause__, UsageError):
                raise error.__cause__ from error  # what the caller gave is wrong, not the rank that noticed
            raise
        self._take_in(job, results, reporter, optimizer)
        return results

    def _take_in(self, job: FitJob, results: list[RankResult], reporter: Reporter, optimizer: Any) -> None:
        """Bring what rank 0 has come to into the caller's objects."""
        self.attach(job.module, job.subject, None, reporter.handle)  # so that save_checkpoint works after the run
        first = results[0]
        assert first.weights is not None
        graft(job.subject, first.added)
        load_weights(job.subject, first.weights)
        if first.optimizer_state is not None:
            optimizer.load_state_dict(first.optimizer_state)
        for callback, state in zip(self.callbacks, first.callbacks, strict=True):
            load_callback(callback, state)
        self.global_step, self.current_epoch, self.world_size = first.steps, first.epochs, len(results)
        self.stop_reason = first.stopped
        self.record(first.metrics, first.logged, {})

    def _result(self, results: list[RankResult], seconds: float) -> FitResult:
        first, checkpoint = results[0], self.checkpoint_callback
        return FitResult(
            metrics=first.metrics,
            steps=first.steps,
            epochs=first.epochs,
            seconds=seconds,
            samples_s=first.samples / max(first.train_s, 1e-9),
            stopped=first.stopped,
            nan_loss=any(result.nan_step is not None for result in results),
            world_size=len(results),
            best_model_path=checkpoint.best_model_path if checkpoint else "",
            last_model_path=checkpoint.last_model_path if checkpoint else "",
            log_dir=self.log_dir,
        )

    def _devices_here(self) -> int:
        devices, accelerator = self.arguments.devices, self.arguments.accelerator
        if isinstance(devices, int):
            return devices
        uses_cuda = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
        return max(1, torch.cuda.device_count()) if uses_cuda else 1

    def _device(self) -> torch.device:
        """The one device of a run in this process."""
        accelerator = self.arguments.accelerator
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        if cuda and accelerator in ("auto", "gpu", "cuda"):
            return torch.device("cuda", torch.cuda.current_device())
        if mps and accelerator in ("auto", "gpu", "mps"):
            return torch.device("mps")
        if accelerator in ("auto", "cpu"):
            return torch.device("cpu")
        raise UsageError(f"accelerator={accelerator!r}, and torch sees no such device here; allowed here: 'auto', 'cpu'")


def _callbacks(given: Any, checkpointing: bool) -> list[Callback]:
    callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for each in callbacks:
        if not hasattr(each, "state_dict") or not hasattr(each, "on_train_start"):
            raise UsageError(f"callbacks: {each!r} is not a gpulayer.Callback")
    savers: list[Callback] = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
    if savers and not checkpointing:
        raise UsageError("enable_checkpointing=False, and there is a ModelCheckpoint among the callbacks; leave one of them out")
    if checkpointing and not savers:
        savers = [ModelCheckpoint()]
    return [each for each in callbacks if each not in savers] + savers  # last, so that what the others decide is in the file


def _prepare_data(module: Any, datamodule: Any) -> None:
    for owner in (datamodule, module):
        if owner is not None and is_overridden(owner, "prepare_data"):
            owner.prepare_data()


def _warn_of_batch_norm(module: nn.Module) -> None:
    kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    layers = [each for each in module.modules() if isinstance(each, kind) and not isinstance(each, nn.SyncBatchNorm)]
    if any(each.training for each in layers):
        log.warning(
            "the model has %d BatchNorm layers: each rank normalizes by its own batches, and ends apart from one process",
            len(layers),
        )


def _travelling(job: FitJob) -> FitJob:
    """The job with its loaders taken apart, for other processes."""
    train = None if job.train is None else LoaderSpec.of(job.train, "train")
    val = None if job.val is None else tuple(LoaderSpec.of(loader, "validation") for loader in job.val)
    return replace(job, train=train, val=val, remote=True)
