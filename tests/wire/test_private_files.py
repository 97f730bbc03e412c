from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gpulayer.errors import KeyFileError
from gpulayer.wire import private_files as files

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "config" / "home"


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_create_and_replace_write_private_files_in_private_folders_when_umask_is_open(folder, open_umask):
    assert files.create(folder, "a", "text")
    files.replace(folder, "b", "text")
    assert mode(folder / "a") == mode(folder / "b") == 0o600
    assert mode(folder) == mode(folder.parent) == 0o700


def test_create_writes_a_readable_file_when_umask_takes_everything(folder):
    before = os.umask(0o777)
    try:
        folder.parent.mkdir()
        folder.parent.chmod(0o700)
        assert files.create(folder, "a", "text")
    finally:
        os.umask(before)
    assert mode(folder / "a") == 0o600
    assert files.read(folder, "a") == "text"


def test_create_changes_nothing_when_the_file_exists(folder):
    assert files.create(folder, "a", "first")
    assert not files.create(folder, "a", "second")
    assert files.read(folder, "a") == "first"
    assert os.listdir(folder) == ["a"]


def test_create_does_not_follow_a_planted_symlink(folder, tmp_path):
    folder.mkdir(parents=True)
    target = tmp_path / "target"
    (folder / "a").symlink_to(target)
    assert not files.create(folder, "a", "secret")
    assert not target.exists()


def test_replace_leaves_no_second_file_and_puts_a_planted_symlink_away(folder, tmp_path):
    folder.mkdir(parents=True, mode=0o700)
    target = tmp_path / "target"
    target.write_text("mine")
    (folder / "a").symlink_to(target)
    files.replace(folder, "a", "new")
    assert target.read_text() == "mine"
    assert os.listdir(folder) == ["a"]
    assert files.read(folder, "a") == "new"


def test_read_gives_none_when_file_or_folder_is_missing(folder):
    assert files.read(folder, "a") is None
    folder.mkdir(parents=True, mode=0o755)
    assert files.read(folder, "a") is None


def test_read_keeps_letters_beyond_ascii(folder):
    files.replace(folder, "a", "Jos\u00e9")
    assert files.read(folder, "a") == "Jos\u00e9"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o602])
def test_read_refuses_and_names_the_remedy_when_others_may_use_the_file(folder, bits):
    files.create(folder, "a", "text")
    (folder / "a").chmod(bits)
    with pytest.raises(KeyFileError, match=f"mode {bits:o}.*chmod 600 {folder / 'a'}") as caught:
        files.read(folder, "a")
    assert caught.value.path == str(folder / "a")


@pytest.mark.parametrize("bits", [0o750, 0o707, 0o770])
def test_read_refuses_when_others_may_enter_the_folder(folder, bits):
    files.create(folder, "a", "text")
    folder.chmod(bits)
    with pytest.raises(KeyFileError, match=f"chmod 700 {folder}"):
        files.read(folder, "a")


def test_writing_closes_a_folder_of_ours_that_is_open(folder):
    folder.mkdir(parents=True, mode=0o755)
    files.replace(folder, "a", "text")
    assert mode(folder) == 0o700


def test_read_refuses_a_symlinked_file(folder, tmp_path):
    files.create(tmp_path / "elsewhere", "a", "text")
    files.create(folder, "b", "text")
    (folder / "a").symlink_to(tmp_path / "elsewhere" / "a")
    with pytest.raises(KeyFileError, match="symlink"):
        files.read(folder, "a")


def test_reading_and_writing_refuse_a_symlinked_folder(folder, tmp_path):
    files.create(tmp_path / "elsewhere", "a", "text")
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="symlink"):
        files.read(folder, "a")
    with pytest.raises(KeyFileError, match="symlink"):
        files.replace(folder, "a", "new")


def test_read_refuses_a_fifo_without_waiting_for_a_writer(folder):
    files.create(folder, "b", "text")
    os.mkfifo(folder / "a", 0o600)
    with pytest.raises(KeyFileError, match="not a regular file"):
        files.read(folder, "a")


def test_read_refuses_a_huge_file(folder):
    files.create(folder, "a", "x" * (files.MAX_FILE_BYTES + 1))
    with pytest.raises(KeyFileError, match="at most"):
        files.read(folder, "a")


@as_root
def test_read_refuses_a_file_of_another_user(folder):
    files.create(folder, "a", "text")
    os.chown(folder / "a", 65534, 65534)
    with pytest.raises(KeyFileError, match="belongs to uid 65534"):
        files.read(folder, "a")


@as_root
def test_reading_and_writing_refuse_a_folder_of_another_user(folder):
    files.create(folder, "a", "text")
    os.chown(folder, 65534, 65534)
    with pytest.raises(KeyFileError, match="belongs to uid 65534"):
        files.read(folder, "a")
    with pytest.raises(KeyFileError, match="belongs to uid 65534"):
        files.replace(folder, "a", "text")


def test_writing_names_the_reason_when_the_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="Not a directory"):
        files.replace(tmp_path / "file" / "home", "a", "text")


def test_locked_lets_one_in_at_a_time(folder):
    entered, order = threading.Event(), []

    def second() -> None:
        entered.set()
        with files.locked(folder):
            order.append("second")

    thread = threading.Thread(target=second)
    with files.locked(folder):
        thread.start()
        assert entered.wait(10)
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_locked_refuses_a_planted_symlink(folder, tmp_path):
    folder.mkdir(parents=True, mode=0o700)
    (folder / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(KeyFileError, match="symlink"), files.locked(folder):
        pass
    assert not (tmp_path / "target").exists()


def test_stamp_changes_with_text_mode_and_existence(folder):
    seen = [files.stamp(folder, "a")]
    files.create(folder, "a", "1")
    seen.append(files.stamp(folder, "a"))
    files.replace(folder, "a", "2")
    seen.append(files.stamp(folder, "a"))
    (folder / "a").chmod(0o644)
    seen.append(files.stamp(folder, "a"))
    assert len(set(seen)) == 4
    assert files.stamp(folder, "a") == seen[-1]


def test_lock_that_its_holder_removes_is_taken_anew(folder):
    """Or who waited for the old file, and who comes later and makes a new one, would both hold the lock."""
    events: list[str] = []
    waits = threading.Event()

    def second() -> None:
        waits.set()
        with files.locked(folder):
            events.append("second has it")
            assert (folder / ".lock").exists()

    with files.locked(folder):
        thread = threading.Thread(target=second)
        thread.start()
        waits.wait()
        (folder / ".lock").unlink()
        events.append("first removes it")
    thread.join()
    assert events == ["first removes it", "second has it"]
    assert (folder / ".lock").exists()
