"""Settings: what the environment says, folders that are refused, the hosts file, and addresses."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpulayer.config import Settings, parse_address, read_hosts_file
from gpulayer.errors import UsageError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def settings() -> Settings:
    return Settings.from_environment()


def hosts_file(text: str | bytes) -> Path:
    path = settings().home / "hosts"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- the environment


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPULAYER_HOME", str(tmp_path / "h"))
    monkeypatch.setenv("GPULAYER_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("GPULAYER_HOSTS", "lab")
    monkeypatch.setenv("GPULAYER_LOG", "debug")
    assert settings() == Settings(tmp_path / "h", tmp_path / "r", "lab", "debug")


def test_settings_have_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GPULAYER_HOME", "GPULAYER_RUNTIME_DIR", "GPULAYER_HOSTS", "GPULAYER_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert settings() == Settings(tmp_path / ".config" / "gpulayer", tmp_path / "gpulayer", None, None)


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GPULAYER_HOME", "GPULAYER_RUNTIME_DIR", "GPULAYER_HOSTS", "GPULAYER_LOG"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    found = settings()
    assert (found.home, found.hosts, found.log_level) == (tmp_path / ".config" / "gpulayer", None, None)
    assert found.runtime_dir.name == f"gpulayer-{os.getuid()}"


def test_runtime_dir_is_not_where_nobody_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPULAYER_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert settings().runtime_dir.name == f"gpulayer-{os.getuid()}"


def test_tilde_is_the_home_folder_in_both_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPULAYER_HOME", "~/keys")
    monkeypatch.setenv("GPULAYER_RUNTIME_DIR", "~/run")
    assert (settings().home, settings().runtime_dir) == (tmp_path / "keys", tmp_path / "run")


def test_unknown_log_level_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULAYER_LOG", "chatty")
    with pytest.raises(UsageError, match=r"GPULAYER_LOG='chatty'.*debug, info, warning"):
        settings()


# --- folders


def test_private_dir_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = settings().private_dir(tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert settings().private_dir(path) == path


def test_private_dir_is_closed_to_others_when_it_was_open(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)
    settings().private_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_private_dir_is_refused_when_it_is_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real").chmod(0o755)
    for target in ("real", "missing"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(UsageError, match="not a folder of yours.*GPULAYER_RUNTIME_DIR"):
            settings().private_dir(link)
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o755


def test_private_dir_is_refused_when_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a folder of yours"):
        settings().private_dir(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot make the folder.*Not a directory.*GPULAYER_RUNTIME_DIR"):
        settings().private_dir(tmp_path / "file" / "below")


@as_root
def test_private_dir_is_refused_when_it_is_another_users(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match=r"owner uid 12345.*remove it or set GPULAYER_RUNTIME_DIR"):
        settings().private_dir(path)


@not_root
def test_private_dir_is_refused_when_it_cannot_be_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot make the folder.*Permission denied"):
        settings().private_dir(tmp_path / "new")
    tmp_path.chmod(0o700)


# --- the hosts file


def test_hosts_file_has_named_lists() -> None:
    path = hosts_file("# all of them\n\nlab: gpu1, 10.0.0.7:7770 gpu3\n  other :[::1]:80,x # one more\nnone:\nb.c-d_1: z\n")
    assert read_hosts_file(path) == {
        "lab": ["gpu1", "10.0.0.7:7770", "gpu3"],
        "other": ["[::1]:80", "x"],
        "none": [],
        "b.c-d_1": ["z"],
    }


def test_hosts_file_that_is_missing_or_empty_has_no_lists(tmp_path: Path) -> None:
    assert read_hosts_file(tmp_path / "missing") == {}
    assert read_hosts_file(hosts_file("")) == {}


def test_hosts_file_may_have_windows_line_ends() -> None:
    assert read_hosts_file(hosts_file("lab: gpu1\r\nb: gpu2\r\n")) == {"lab": ["gpu1"], "b": ["gpu2"]}


@pytest.mark.parametrize("line", ["gpu1", "gpu1, gpu2", "my lab: gpu1", ": gpu1", "l@b: gpu1", "lab = gpu1"])
def test_bad_line_of_hosts_file_is_refused_with_its_number(line: str) -> None:
    path = hosts_file(f"# first\nlab: gpu1\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_hosts_file(path)
    assert str(caught.value) == f"{path}:3: {line!r} is not of the form `name: host, host:port, ...`"


def test_hosts_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = hosts_file(b"lab: gpu1 # caf\xe9\n")
    with pytest.raises(UsageError, match=f"the hosts file cannot be read: {path}"):
        read_hosts_file(path)
    with pytest.raises(UsageError, match="the hosts file cannot be read"):
        read_hosts_file(tmp_path)


def test_named_hosts_are_found() -> None:
    hosts_file("lab: gpu1, gpu2\nother: gpu3\n")
    assert settings().named_hosts("lab") == ["gpu1", "gpu2"]


def test_unknown_list_is_refused_with_the_known_ones_and_what_to_type() -> None:
    with pytest.raises(UsageError, match=r"'lab' is no host list.*\(the file has none\)"):
        settings().named_hosts("lab")
    hosts_file("b: gpu1\na: gpu2\n")
    with pytest.raises(UsageError, match=r'known lists: a, b\. .*connect\(\["lab"\]\)'):
        settings().named_hosts("lab")


# --- addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu1", "gpu1", 7770),
        ("gpu1:80", "gpu1", 80),
        ("GPU-1.lab_2.example.org:65535", "GPU-1.lab_2.example.org", 65535),
        ("_x", "_x", 7770),
        ("10.0.0.7", "10.0.0.7", 7770),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("::1", "::1", 7770),
        ("[::1]", "::1", 7770),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("[2001:db8:1:2:3:4:5:6]:9", "2001:db8:1:2:3:4:5:6", 9),
        ("2001:db8::7:7770", "2001:db8::7:7770", 7770),
        ("[::ffff:10.0.0.7]:80", "::ffff:10.0.0.7", 80),
        (f"{'a' * 63}.b", f"{'a' * 63}.b", 7770),
    ],
)
def test_address_is_parsed(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        " gpu1",
        "gpu1 ",
        "gpu1\n",
        "gpu1:80\n",
        "gpu1:",
        ":80",
        "gpu1:0",
        "gpu1:65536",
        "gpu1:-1",
        "gpu1:+80",
        "gpu1:8_0",
        "gpu1: 80",
        "gpu1:http",
        "gpu1:\N{SUPERSCRIPT TWO}",
        "gpu1:\N{ARABIC-INDIC DIGIT SEVEN}",
        f"gpu1:{'9' * 5000}",
        "gpu1:80:90",
        "tcp://gpu1:80",
        "http://gpu1",
        "me@gpu1",
        "gpu 1",
        "gpu1/x",
        "gpu1;rm",
        "-gpu1",
        "gpu1-",
        ".gpu1",
        "a..b",
        f"{'a' * 64}.b",
        "gp\N{LATIN SMALL LETTER U WITH DIAERESIS}",
        "[::1",
        "::1]",
        "[::1]x",
        "[::1]80",
        "[::1]:",
        "[::1]:0",
        "[]:80",
        "[gpu1]:80",
        "[10.0.0.7]:80",
        "[[::1]]:80",
        "::::",
        "1:2:3",
        "12345::1",
        "::1%",
        "*",
        "*:80",
    ],
)
def test_bad_address_is_refused_with_the_forms_that_work(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert "`name:port` or `[ipv6]:port` (default port 7770)" in str(caught.value)


def test_ssh_address_is_refused_with_what_to_type() -> None:
    with pytest.raises(UsageError, match=r"over ssh is not supported yet.*gpulayer up"):
        parse_address("ssh://me@gpu1")
