"""The note of the last start outlives its writer."""

from pathlib import Path

from gpulayer.resources import Address
from gpulayer.runtime.start_mark import StartMark

CALLER = Address(b"hosthost", b"peerpeer")


def test_note_is_read_after_its_writer_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "worker.mark"
    StartMark.create(path)
    mark = StartMark(path)
    mark.write(CALLER, 7, "first")
    assert StartMark(path).name == "first"
    mark.write(CALLER, 2**40, "s" * 100)
    assert StartMark(path).name == "s" * 48
    del mark
    assert StartMark.take(path) == (CALLER, 2**40)
    assert not path.exists()


def test_fresh_note_says_that_nothing_started(tmp_path: Path) -> None:
    path = tmp_path / "worker.mark"
    assert StartMark.create(path).name == ""
    assert StartMark.take(path)[1] == 0
    assert StartMark.take(path)[1] == 2**64 - 1  # a note that is gone: everything may have started
