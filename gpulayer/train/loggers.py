"""Loggers write metrics on the caller's machine, wherever the run is. CSVLogger is the default."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gpulayer.errors import UsageError


@runtime_checkable
class Logger(Protocol):
    """What a Trainer wants of a logger; Lightning's loggers have it."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take one row; `step` is the optimizer step it belongs to."""
        ...


class CSVLogger:
    """Rows in `save_dir/name/version_N/metrics.csv`, one column a metric; N is the first free number or `version`."""

    def __init__(self, save_dir: str | os.PathLike[str], name: str = "gpulayer_logs", version: int | str | None = None) -> None:
        self._root = Path(save_dir).expanduser().absolute() / name
        self._version = version
        self._folder: Path | None = None
        self._columns: list[str] = []
        self.name = name

    @property
    def version(self) -> int | str:
        """The number or name of this logger's folder; the first look makes the folder."""
        _ = self.log_dir
        assert self._version is not None
        return self._version

    @property
    def log_dir(self) -> str:
        """The folder of this logger; the first look makes it."""
        if self._folder is None:
            self._folder = self._claim()
        return str(self._folder)

    def _claim(self) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        if self._version is not None:
            folder = self._root / (f"version_{self._version}" if isinstance(self._version, int) else self._version)
            folder.mkdir(exist_ok=True)
            return folder
        taken = [int(path.name[8:]) for path in self._root.glob("version_*") if path.name[8:].isdigit()]
        number = max(taken, default=-1) + 1
        while True:
            folder = self._root / f"version_{number}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took it just now
                number += 1
                continue
            self._version = number
            return folder

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row; a metric that was not there before adds a column."""
        row: dict[str, Any] = {**metrics, "step": step}
        path = Path(self.log_dir) / "metrics.csv"
        if not self._columns and path.exists():
            self._columns = _header(path)
        new = sorted(set(row) - set(self._columns))
        if new:
            self._add_columns(path, new)
        with open(path, "a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _add_columns(self, path: Path, new: list[str]) -> None:
        rows: list[dict[str, Any]] = []
        if path.exists():
            with open(path, newline="") as file:
                rows = list(csv.DictReader(file))
        self._columns = _ordered(self._columns + new)
        temporary = path.with_name(path.name + ".tmp")
        try:
            with open(temporary, "w", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def finalize(self, status: str) -> None:
        """Nothing is left to write."""


def as_loggers(logger: Any, root: str) -> list[Any]:
    """The loggers that the Trainer's `logger` argument stands for: True or None is a CSVLogger, False none."""
    if logger is True or logger is None:
        return [CSVLogger(root)]
    if logger is False:
        return []
    loggers = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    for each in loggers:
        if not isinstance(each, Logger):
            raise UsageError(f"logger={each!r} has no log_metrics(metrics, step); pass a logger, a list of them, True or False")
    return loggers


class RelayLogger:
    """The caller's loggers as a rank sees them: what is logged here is written there."""

    def __init__(self, log_dir: str | None, send: Any) -> None:
        self.log_dir = log_dir
        self._send = send

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send one row to the caller's loggers."""
        self._send({name: float(value) for name, value in metrics.items()}, step)


def _header(path: Path) -> list[str]:
    with open(path, newline="") as file:
        return next(csv.reader(file), [])


def _ordered(columns: list[str]) -> list[str]:
    return [name for name in ("epoch", "step") if name in columns] + [name for name in columns if name not in ("epoch", "step")]
