"""Which call a worker started last, in a shared page that outlives it, and that its agent may look at meanwhile.

Tasks are sent to a worker ahead of their turn. When it dies, those that it never started may run elsewhere, and only those:
a call that was started may have done something, and is not run again. The worker notes each start here before it touches the
call; its agent reads the note once the process is gone.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from gpulayer.resources import Address

_LAYOUT = struct.Struct(">16sQ48s")


class StartMark:
    """The note of one worker: the caller's address, its number for the call, and the call's name."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)

    @classmethod
    def create(cls, path: Path) -> StartMark:
        """Make an empty note."""
        path.touch(mode=0o600)
        path.write_bytes(bytes(_LAYOUT.size))
        return cls(path)

    @staticmethod
    def take(path: Path) -> tuple[Address, int]:
        """Read and remove a dead worker's note: (caller, number of the call it started last), number 0 if it started none."""
        try:
            caller, number, _ = _LAYOUT.unpack(path.read_bytes())
        except (OSError, struct.error):  # someone emptied the folder: then every call counts as started
            return Address(bytes(8)), 2**64 - 1
        path.unlink(missing_ok=True)
        return Address.from_bytes(caller), number

    def write(self, caller: Address, number: int, name: str) -> None:
        """Note that the call is about to start."""
        self._page[:] = _LAYOUT.pack(caller.to_bytes(), number, name.encode()[:48])

    @property
    def name(self) -> str:
        """The name of the call that was started last, "" if none was."""
        return _LAYOUT.unpack(self._page)[2].rstrip(b"\0").decode(errors="ignore")
