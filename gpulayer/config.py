"""Settings: the only reader of GPULAYER_* and of the user's hosts file.

Variable              meaning                                              default
GPULAYER_HOME         folder with keys, hosts file                         ~/.config/gpulayer
GPULAYER_RUNTIME_DIR  folder with sockets and agent records (local disk)   $XDG_RUNTIME_DIR/gpulayer or /tmp/gpulayer-UID
GPULAYER_HOSTS        what `connect()` uses when called without arguments  (none)
GPULAYER_LOG          the agent's log level                                info

The hosts file is `GPULAYER_HOME/hosts`: one named list a line, `lab: gpu1, 10.0.0.7:7770`; `#` starts a comment.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpulayer.errors import UsageError
from gpulayer.resources import DEFAULT_PORT

_NAMED_LIST = re.compile(r"^\s*([A-Za-z0-9_.-]+)\s*:\s*(.*)$")
_HOST = re.compile(r"^[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?$")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are for this user on this machine."""

    home: Path
    runtime_dir: Path
    hosts: str | None
    log_level: str

    @classmethod
    def from_environment(cls) -> Settings:
        """Read GPULAYER_* once; every other module takes a `Settings`."""
        env = os.environ
        home = Path(env.get("GPULAYER_HOME") or Path.home() / ".config" / "gpulayer")
        return cls(
            home=home.expanduser(),
            runtime_dir=Path(env.get("GPULAYER_RUNTIME_DIR") or _default_runtime_dir()),
            hosts=env.get("GPULAYER_HOSTS") or None,
            log_level=env.get("GPULAYER_LOG", "info").upper(),
        )

    def private_dir(self, path: Path) -> Path:
        """Make `path` a folder of this user alone, or refuse: a folder that someone else prepared is a trap."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    if not path.exists():
        return {}
    lists: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
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
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else port
    elif text.count(":") == 1:
        host, port = text.split(":")
    v6 = host.count(":") >= 2 and re.fullmatch(r"[0-9A-Fa-f:.%]+", host)
    if not (v6 or _HOST.match(host)) or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{text!r} is not a host; write `name`, `name:port` or `[ipv6]:port` (default port {DEFAULT_PORT})")
    return host, int(port)
