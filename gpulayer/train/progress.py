"""How a run looks: in a terminal a bar that does not get in the way of prints, elsewhere one plain line an epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from gpulayer.train.events import EpochEnded, Progress, Started


class NoDisplay:
    """Shows nothing."""

    def start(self, event: Started) -> None:
        """The run begins."""

    def advance(self, event: Progress) -> None:
        """The run is here."""

    def end_epoch(self, event: EpochEnded) -> None:
        """An epoch is over."""

    def stop(self) -> None:
        """The run is over, one way or another. May be called twice, or before `start`."""


class LineDisplay(NoDisplay):
    """One plain line an epoch."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._max_epochs = -1

    def start(self, event: Started) -> None:
        """See `NoDisplay`."""
        self._max_epochs = event.max_epochs

    def end_epoch(self, event: EpochEnded) -> None:
        """See `NoDisplay`."""
        print(epoch_line(event, self._max_epochs), file=self._stream, flush=True)


class BarDisplay(NoDisplay):
    """A bar for the epoch that runs, under one line for each that is over. Drawn when there is news: no thread, no timer."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
        )
        self._bar = Bar(*columns, console=Console(file=stream), auto_refresh=False, transient=True)
        self._task: Any = None
        self._max_epochs = -1

    def start(self, event: Started) -> None:
        """See `NoDisplay`."""
        self._max_epochs = event.max_epochs
        self._task = self._bar.add_task(self._title(0), total=event.batches_per_epoch, news="")
        self._bar.start()

    def advance(self, event: Progress) -> None:
        """See `NoDisplay`."""
        news = "  ".join([*_pairs(event.metrics), f"{event.samples_s:.0f} samples/s"])
        self._bar.update(self._task, completed=event.batch, description=self._title(event.epoch), news=news, refresh=True)

    def end_epoch(self, event: EpochEnded) -> None:
        """See `NoDisplay`."""
        self._bar.console.print(epoch_line(event, self._max_epochs), markup=False, highlight=False)
        self._bar.reset(self._task, description=self._title(event.epoch + 1), news="")

    def stop(self) -> None:
        """Take the bar away and give the cursor back."""
        self._bar.stop()

    def _title(self, epoch: int) -> str:
        return f"epoch {_of(epoch + 1, self._max_epochs)}"


def open_display(enabled: bool, stream: TextIO | None = None) -> NoDisplay:
    """What suits the stream (stderr, if left out)."""
    stream = sys.stderr if stream is None else stream
    if not enabled or stream is None:  # a program without a console has no stderr
        return NoDisplay()
    return BarDisplay(stream) if stream.isatty() else LineDisplay(stream)


def epoch_line(event: EpochEnded, max_epochs: int) -> str:
    """`epoch 1/3  step 46  train_loss 0.412  1520 samples/s`"""
    parts = [
        f"epoch {_of(event.epoch + 1, max_epochs)}",
        f"step {event.step}",
        *_pairs(event.metrics),
        f"{event.samples_s:.0f} samples/s",
    ]
    return "  ".join(parts)


def _pairs(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {_number(value)}" for name, value in metrics.items()]


def _number(value: float) -> str:
    return f"{value:.3f}" if 0.01 <= abs(value) < 10_000 or value == 0 else f"{value:.3g}"


def _of(number: int, limit: int) -> str:
    return str(number) if limit == -1 else f"{number}/{limit}"
