"""The notes that agents leave in the runtime folder, so that drivers and the CLI of the same user find them.

Whoever can write there can have us connect to an agent of theirs and believe it: so the folder must be ours and closed to
others, and an agent's socket is the one in that folder with the agent's name, whatever a record says.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from gpulayer.resources import Host
from gpulayer.wire import security


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
    """Every agent of this user that is running; what agents left that ended without a word is removed.

    Raises `UsageError` if the folder is not ours alone: then somebody else may have left what is in it.
    """
    if not os.path.lexists(folder):
        return []
    security.check_folder(folder)
    found: list[Record] = []
    for path in sorted(folder.glob("*.json")):
        record = _read(path)
        if record is None:
            continue
        if is_running(record.pid, record.born_s):
            found.append(record)
        else:
            _remove_if_stale(path)
    return found


def _read(path: Path) -> Record | None:
    """The record in a file; None if it is being written or removed, or of another version: not ours to judge."""
    try:
        record = replace(Record(**json.loads(path.read_text())), socket_path=str(path.with_suffix(".sock")))
    except (OSError, ValueError, TypeError):
        return None
    if record.name != path.stem or type(record.pid) is not int or not isinstance(record.born_s, float):
        return None
    return record


def _remove_if_stale(path: Path) -> None:
    """Remove what a dead agent left, unless another of its name has begun to take its place: it binds under the same lock."""
    socket_path = path.with_suffix(".sock")
    with security.locked_local(socket_path):
        record = _read(path)
        if record is not None and not is_running(record.pid, record.born_s) and not security.is_served(socket_path):
            remove(path.parent, record.name)


def is_running(pid: int, born_s: float) -> bool:
    """Whether the process that had `pid` at `born_s` still runs."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - born_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
