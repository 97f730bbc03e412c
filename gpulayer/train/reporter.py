"""The caller's end of a run, here or in a gang: its events become a bar, rows, files and a status."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from gpulayer.train import checkpoint as files
from gpulayer.train.events import CheckpointDropped, CheckpointReady, EpochEnded, Event, MetricsLogged, NanLoss, Progress, Started
from gpulayer.train.progress import NoDisplay

STATUS_INTERVAL_S = 0.5
logger = logging.getLogger("gpulayer.train")


class Reporter:
    """Takes the events of one run. As a context manager it ends the display and the loggers, whatever happened."""

    def __init__(self, display: NoDisplay, loggers: Sequence[Any]) -> None:
        self._display = display
        self._loggers = list(loggers)
        self._publish: Callable[[dict[str, Any]], None] | None = None
        self._status: dict[str, Any] = {}
        self._published_s = 0.0
        self._nan_told = False

    def publish_to(self, publish: Callable[[dict[str, Any]], None]) -> None:
        """Also tell where the run is to `publish`, at most twice a second (what `gpulayer top` shows)."""
        self._publish = publish
        self._status = {"name": "fit", "state": "starting", "started_s": time.time()}
        self._tell(force=True)

    def handle(self, event: Event) -> None:
        """Act on one event."""
        match event:
            case Started():
                self._display.start(event)
                self._tell(force=True, state="running", ranks=event.world_size, max_steps=_total_steps(event), step=0, epoch=0)
            case Progress():
                self._display.advance(event)
                self._tell(step=event.step, epoch=event.epoch, samples_s=event.samples_s, loss=_loss(event.metrics))
            case EpochEnded():
                self._display.end_epoch(event)
                self._tell(step=event.step, epoch=event.epoch, samples_s=event.samples_s, loss=_loss(event.metrics))
            case MetricsLogged():
                for each in self._loggers:
                    each.log_metrics(dict(event.metrics), event.step)
            case CheckpointReady():
                files.write(event.path, event.content)
            case CheckpointDropped():
                _remove(event.path)
            case NanLoss():
                if not self._nan_told:
                    self._nan_told = True
                    logger.warning("the loss was NaN at step %d (rank %d); training goes on", event.step, event.rank)

    def _tell(self, force: bool = False, **news: Any) -> None:
        if self._publish is None:
            return
        self._status.update({name: value for name, value in news.items() if value is not None})
        now_s = time.monotonic()
        if force or now_s - self._published_s >= STATUS_INTERVAL_S:
            self._published_s = now_s
            self._publish(dict(self._status))

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._display.stop()
        self._tell(force=True, state="finished" if error is None else "failed")
        for each in self._loggers:
            if hasattr(each, "finalize"):
                each.finalize("success" if error is None else "failed")


def _total_steps(event: Started) -> int | None:
    if event.max_steps != -1:
        return event.max_steps
    if event.batches_per_epoch is None or event.max_epochs == -1:
        return None
    return event.batches_per_epoch * event.max_epochs


def _loss(metrics: dict[str, float]) -> float | None:
    return next((value for name, value in metrics.items() if "loss" in name), None)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # someone took it away already
        os.unlink(path)
