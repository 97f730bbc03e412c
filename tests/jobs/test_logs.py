"""Bytes of a pipe become lines, however they are cut, and a process cannot make its agent keep much."""

from __future__ import annotations

import random

import pytest

from gpulayer.jobs.logs import LINE_CHARACTERS, TAIL_LINES, OutputLog


def lines_of(*pieces: bytes) -> list[str]:
    log = OutputLog()
    return [line for piece in pieces for line in log.feed(piece)] + log.close()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"hello", ["hello"]),
        (b"hello\n", ["hello"]),
        (b"a\nb\n\nc", ["a", "b", "", "c"]),
        (b"\n", [""]),
        (b"windows\r\nlast\r", ["windows", "last"]),
        (b"10%\r20%\r30%\n", ["10%\r20%\r30%"]),
        ("smørrebrød \N{SNOWMAN}\n".encode(), ["smørrebrød \N{SNOWMAN}"]),
        (b"bad \xff\xfe bytes\n", ["bad \ufffd\ufffd bytes"]),
        (b"cut \xe2\x98", ["cut \ufffd"]),
        (b"form\x0cfeed\x1cand\xc2\x85more\n", ["form\x0cfeed\x1cand\x85more"]),  # only a line feed ends a line
    ],
)
def test_bytes_become_the_same_lines_however_they_are_cut(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines
    assert lines_of(*(data[index : index + 1] for index in range(len(data)))) == lines
    rng = random.Random(1)
    for _ in range(20):
        cut = rng.randint(0, len(data))
        assert lines_of(data[:cut], data[cut:]) == lines


def test_line_is_given_when_it_is_whole() -> None:
    log = OutputLog()
    assert log.feed(b"hel") == []
    assert log.feed(b"lo\nwor") == ["hello"]
    assert log.feed(b"ld\n") == ["world"]
    assert log.close() == []


def test_tail_is_the_last_lines_and_the_unfinished_one() -> None:
    log = OutputLog()
    assert log.tail == []
    log.feed(b"".join(b"%d\n" % number for number in range(100)) + b"unfinished")
    assert log.tail == [*(str(number) for number in range(100 - TAIL_LINES, 100)), "unfinished"]
    log.close()
    assert log.tail[-1] == "unfinished"
    assert len(log.tail) == TAIL_LINES


def test_tail_is_a_copy() -> None:
    log = OutputLog()
    log.feed(b"one\n")
    log.tail.clear()
    assert log.tail == ["one"]


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("size", [LINE_CHARACTERS - 1, LINE_CHARACTERS, LINE_CHARACTERS + 1, 5 * LINE_CHARACTERS + 7])
def test_long_line_is_broken_and_nothing_is_lost(size: int, end: bytes) -> None:
    data = bytes(random.Random(size).choices(b"abcdef", k=size)) + end
    for step in (len(data), 50_000, 256 * 1024):
        lines = lines_of(*(data[start : start + step] for start in range(0, len(data), step)))
        assert "".join(lines).encode() == data.removesuffix(b"\n")
        assert all(len(line) == LINE_CHARACTERS for line in lines[:-1])
        assert 0 < len(lines[-1]) <= LINE_CHARACTERS


def test_process_that_never_ends_a_line_is_not_kept_whole() -> None:
    log = OutputLog()
    for _ in range(200):
        log.feed(b"x" * 64 * 1024)
    assert sum(len(line) for line in log.tail) <= (TAIL_LINES + 1) * LINE_CHARACTERS
