"""The notes that agents leave in the runtime folder, so that drivers and the CLI of the same user find them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from gpulayer.resources import Host


@dataclass(frozen=True, slots=True)
class Record:
    """One running agent."""

    name: str
    host: str
    socket_path: str
    port: int | None
    pid: int
    born_s: float
    embedded: bool


def write(folder: Path, name: str, host: Host, socket_path: str, port: int | None, embedded: bool) -> Record:
    """Leave a record of this process, whole or not at all."""
    record = Record(name, host.name, socket_path, port, os.getpid(), psutil.Process().create_time(), embedded)
    path = folder / f"{name}.json"
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(json.dumps(asdict(record)))
    draft.replace(path)
    return record


def remove(folder: Path, name: str) -> None:
    """Take away the record, the socket, its lock and what workers left in their folders."""
    for leftover in (f"{name}.json", f"{name}.sock", f".{name}.sock.lock"):
        (folder / leftover).unlink(missing_ok=True)
    shutil.rmtree(folder / f"{name}.work", ignore_errors=True)


def read_all(folder: Path) -> list[Record]:
    """Every agent of this user that is running; what agents left that ended without a word is removed."""
    found: list[Record] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            record = Record(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # being written or removed, or of another version: not ours to judge
        if record.name != path.stem or type(record.pid) is not int or not isinstance(record.born_s, float):
            continue
        if is_running(record.pid, record.born_s):
            found.append(record)
        else:
            remove(folder, record.name)
    return found


def is_running(pid: int, born_s: float) -> bool:
    """Whether the process that had `pid` at `born_s` still runs."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - born_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
