"""Settings: the only reader of GPULAYER_* and of the user's hosts file.

Variable              meaning                                              default
GPULAYER_HOME         folder with keys, hosts file                         ~/.config/gpulayer
GPULAYER_RUNTIME_DIR  folder with sockets and agent records (local disk)   $XDG_RUNTIME_DIR/gpulayer or /tmp/gpulayer-UID
GPULAYER_HOSTS        what `connect()` uses when called without arguments  (none)
GPULAYER_LOG          the agent's log level                                info; warning for one that a program starts

The hosts file is `GPULAYER_HOME/hosts`: one named list a line, `lab: gpu1, 10.0.0.7:7770`; `#` starts a comment.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpulayer.errors import UsageError
from gpulayer.resources import DEFAULT_PORT

_NAMED_LIST = re.compile(r"^\s*([A-Za-z0-9_.-]+)\s*:\s*(.*)$")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are for this user on this machine."""

    home: Path
    runtime_dir: Path
    hosts: str | None
    log_level: str | None

    @classmethod
    def from_environment(cls) -> Settings:
        """Read GPULAYER_* once; every other module takes a `Settings`."""
        env = os.environ
        home = Path(env.get("GPULAYER_HOME") or Path.home() / ".config" / "gpulayer")
        log_level = env.get("GPULAYER_LOG") or None
        if log_level is not None and log_level.lower() not in _LOG_LEVELS:
            raise UsageError(f"GPULAYER_LOG={log_level!r} is not a log level; choose one of {', '.join(_LOG_LEVELS)}")
        return cls(
            home=home.expanduser(),
            runtime_dir=Path(env.get("GPULAYER_RUNTIME_DIR") or _default_runtime_dir()).expanduser(),
            hosts=env.get("GPULAYER_HOSTS") or None,
            log_level=log_level and log_level.lower(),
        )

    def private_dir(self, path: Path) -> Path:
        """Make `path` a folder of this user alone, or refuse: a folder that someone else prepared is a trap."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            pass  # something else has that name: its owner and kind are told below
        except OSError as error:
            raise UsageError(f"cannot make the folder {path}: {error.strerror}; set GPULAYER_RUNTIME_DIR to another") from None
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(
                f"{path} is not a folder of yours (owner uid {status.st_uid}); remove it or set GPULAYER_RUNTIME_DIR"
            )
        if status.st_mode & 0o077:
            path.chmod(0o700)
        return path

    def named_hosts(self, name: str) -> list[str]:
        """The list called `name` in the hosts file."""
        lists = read_hosts_file(self.home / "hosts")
        if name not in lists:
            known = ", ".join(sorted(lists)) or "(the file has none)"
            raise UsageError(
                f"{name!r} is no host list in {self.home / 'hosts'}; known lists: {known}. "
                f'To connect to one host of that name, pass a list: connect(["{name}"])'
            )
        return lists[name]


def _default_runtime_dir() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return os.path.join(base, "gpulayer")
    return os.path.join(tempfile.gettempdir(), f"gpulayer-{os.getuid()}")


def read_hosts_file(path: Path) -> dict[str, list[str]]:
    """All named lists of a hosts file; a file that does not exist has none."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the hosts file cannot be read: {path}: {error}") from None
    lists: dict[str, list[str]] = {}
    for number, line in enumerate(content.splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _NAMED_LIST.match(text)
        if not match:
            raise UsageError(f"{path}:{number}: {line.strip()!r} is not of the form `name: host, host:port, ...`")
        lists[match[1]] = [host for host in re.split(r"[,\s]+", match[2]) if host]
    return lists


def parse_address(text: str) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port` as (host, port). Raises `UsageError` for anything else."""
    if text.startswith("ssh://"):
        raise UsageError(f"{text!r}: starting agents over ssh is not supported yet; run `gpulayer up` there and pass host:port")
    if _is_v6(text):
        return text, DEFAULT_PORT
    found = _ADDRESS.fullmatch(text)
    if found:
        name, v6, port = found["name"], found["v6"], int(found["port"] or DEFAULT_PORT)
        if (_is_v6(v6) if v6 else _HOST.fullmatch(name)) and 0 < port < 65536:
            return v6 or name, port
    raise UsageError(f"{text!r} is not a host; write `name`, `name:port` or `[ipv6]:port` (default port {DEFAULT_PORT})")


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
