"""What a process prints: bytes from a pipe become lines, and the last ones are kept for error messages.

log = OutputLog()
for line in log.feed(b"hello\\nwor"): ...     # "hello"
log.tail                                      # the last lines, an unfinished one included
"""

from __future__ import annotations

import codecs
from collections import deque

TAIL_LINES = 20
LINE_CHARACTERS = 64 * 1024


class OutputLog:
    """One stream of one process. Bytes that are not UTF-8 are shown as replacement characters, never lost in an error."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; returns the lines that are now whole (without line ends), and pieces of 64 Ki characters of longer ones."""
        text = self._rest + self._decode(data)
        *lines, rest = text.split("\n")
        *broken, self._rest = _pieces(rest)
        return self._keep([piece for line in lines for piece in _pieces(line.rstrip("\r"))] + broken)

    def close(self) -> list[str]:
        """The stream has ended: the last line, if it had no line end."""
        text = self._rest + self._decode(b"", True)
        self._rest = ""
        return self._keep([text.rstrip("\r")] if text else [])

    @property
    def tail(self) -> list[str]:
        """The last lines, an unfinished one included."""
        return [*self._tail, *([self._rest] if self._rest else [])]

    def _keep(self, lines: list[str]) -> list[str]:
        self._tail.extend(lines)
        return lines


def _pieces(line: str) -> list[str]:
    if len(line) <= LINE_CHARACTERS:
        return [line]
    return [line[start : start + LINE_CHARACTERS] for start in range(0, len(line), LINE_CHARACTERS)]
