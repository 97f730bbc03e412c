"""Small text files that one user alone may read: keys, and the lists of whom to trust.

Each call opens the folder once, checks that it is ours and closed to others, and then works relative to that descriptor,
so that nobody can put another folder in its place between the check and the use. A file is written whole beside its name
and then linked or renamed to it: a reader sees the old text or the new one, never half of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpulayer.errors import KeyFileError

MAX_FILE_BYTES = 1 << 20

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read(folder: Path, name: str) -> str | None:
    """The file's text, None where there is none. Raises `KeyFileError` where others could have read or written it."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    with _opened_folder(folder) as folder_fd:
        try:
            file_fd = os.open(name, _OPEN_FILE, dir_fd=folder_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refusal(path, error) from None
    with open(file_fd, encoding="utf-8", errors="replace") as file:
        status = os.fstat(file_fd)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileError(f"{path} is not a regular file; remove it", path=str(path))
        _check_private(path, status, "600")
        if status.st_size > MAX_FILE_BYTES:
            raise KeyFileError(f"{path} has {status.st_size} bytes; such a file has at most {MAX_FILE_BYTES}", path=str(path))
        return file.read(MAX_FILE_BYTES)


def create(folder: Path, name: str, text: str) -> bool:
    """Write a file that must not exist yet; False, and nothing changed, if it does (then another process was faster)."""
    with _written_beside(folder, name, text) as (folder_fd, beside):
        try:
            os.link(beside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        except FileExistsError:
            return False
    return True


def replace(folder: Path, name: str, text: str) -> None:
    """Write a file, in the place of the one that is there."""
    with _written_beside(folder, name, text) as (folder_fd, beside):
        os.rename(beside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Generator[None]:
    """Hold the folder's lock, so that two processes that edit a file there do it one after the other."""
    with _opened_folder(folder, make=True) as folder_fd:
        lock_fd = _lock(folder, folder_fd, name)
    try:
        yield
    finally:
        os.close(lock_fd)


def _lock(folder: Path, folder_fd: int, name: str) -> int:
    """Open and lock the folder's lock file, anew if its holder has removed it meanwhile: others would lock another one."""
    while True:
        try:
            lock_fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
        except OSError as error:
            raise _refusal(folder / name, error) from None
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network file systems have no locks; writes there stay whole all the same
                os.close(lock_fd)
                raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock_fd), os.stat(name, dir_fd=folder_fd, follow_symlinks=False)):
                return lock_fd
        os.close(lock_fd)


def stamp(folder: Path, name: str) -> tuple[int, ...]:
    """A value that differs once the file, or who may read it, has changed; () where there is no file."""
    try:
        status = os.stat(folder / name, follow_symlinks=False)
    except OSError:
        return ()
    return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode, status.st_uid)


@contextmanager
def _opened_folder(path: Path, *, make: bool = False) -> Generator[int]:
    try:
        if make:
            _make_folders(path)
        folder_fd = os.open(path, _OPEN_FOLDER)
    except OSError as error:
        raise _refusal(path, error) from None
    try:
        status = os.fstat(folder_fd)
        if make and status.st_uid == os.geteuid():
            os.fchmod(folder_fd, 0o700)
            status = os.fstat(folder_fd)
        _check_private(path, status, "700")
        yield folder_fd
    finally:
        os.close(folder_fd)


def _make_folders(path: Path) -> None:
    """Like `mkdir -p`, but parents too are closed to others whatever the umask: who can write there can swap the folder."""
    for folder in [*reversed(path.absolute().parents), path]:
        with suppress(OSError):  # it is there; or opening the last one fails and says why
            folder.mkdir(mode=0o700)


@contextmanager
def _written_beside(folder: Path, name: str, text: str) -> Generator[tuple[int, str]]:
    """Write `text` to a new file in the folder; give its name, and remove that name afterwards if it is still there."""
    beside = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    with _opened_folder(folder, make=True) as folder_fd:
        try:
            try:
                _write(beside, folder_fd, text)
            except OSError as error:  # a full or read-only disk
                raise _refusal(folder / name, error) from None
            yield folder_fd, beside
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=folder_fd)


def _write(name: str, folder_fd: int, text: str) -> None:
    with open(os.open(name, _CREATE_FILE, 0o600, dir_fd=folder_fd), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_private(path: Path, status: os.stat_result, mode: str) -> None:
    if status.st_uid != os.geteuid():
        text = f"{path} belongs to uid {status.st_uid} and you are uid {os.geteuid()}; remove it or set GPULAYER_HOME"
        raise KeyFileError(text, path=str(path))
    if status.st_mode & 0o077:
        text = f"{path} has mode {status.st_mode & 0o777:o}, others may use it; type: chmod {mode} {shlex.quote(str(path))}"
        raise KeyFileError(text, path=str(path))


def _refusal(path: Path, error: OSError) -> KeyFileError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
        return KeyFileError(f"{path} is a symlink, which could lead anywhere; put the real one in its place", path=str(path))
    return KeyFileError(f"{path}: {error.strerror}", path=str(path))
