"""Who we are, whom we let in, and whom we connect to: three files in the user's GPULAYER_HOME.

    identity.key      `public KEY` and `secret KEY`: this user's own CURVE pair, for drivers and agents alike
    authorized_keys   `role KEY comment` a line: who may connect here, as driver, agent or viewer; or `revoked KEY`
    known_hosts       `host:port KEY` a line: the key that an agent at that address must prove to hold

A line that starts with `#` is a comment (in the middle of a line, `#` may be part of a key). The pair itself is made and
read in `identity`; its names are here too, for callers that need both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulayer.config import parse_address
from gpulayer.errors import GPUlayerError, KeyFileError, UsageError
from gpulayer.wire import private_files as files
from gpulayer.wire.identity import (
    IDENTITY,
    KeyPair,
    check_key,
    is_key,
    load_identity,
    load_or_make_identity,
    make_identity,
    new_pair,
)

__all__ = [
    "AUTHORIZED",
    "AllowList",
    "AuthorizedKey",
    "IDENTITY",
    "KNOWN_HOSTS",
    "KeyPair",
    "KnownHost",
    "REVOKED",
    "ROLES",
    "authorize",
    "check_key",
    "check_role",
    "is_key",
    "known_host",
    "list_hosts",
    "list_keys",
    "load_identity",
    "load_or_make_identity",
    "make_identity",
    "new_pair",
    "read_authorized",
    "revoke",
    "trust_host",
]

ROLES = ("driver", "agent", "viewer")
REVOKED = "revoked"

AUTHORIZED = "authorized_keys"
KNOWN_HOSTS = "known_hosts"

_log = logging.getLogger("gpulayer.security")


@dataclass(frozen=True, slots=True)
class AuthorizedKey:
    """One line of authorized_keys."""

    role: str
    public: str
    comment: str = ""


@dataclass(frozen=True, slots=True)
class KnownHost:
    """One line of known_hosts; `address` is `host:port`."""

    address: str
    public: str


def check_role(role: str) -> str:
    """`role`, if it is one. Raises `UsageError` otherwise."""
    if role not in ROLES:
        raise UsageError(f"{role!r} is not a role; choose one of {', '.join(ROLES)}")
    return role


def authorize(home: Path, public: str, role: str, comment: str = "") -> None:
    """Let the holder of `public` connect here as `role` from now on; replaces what the file said of that key."""
    check_role(role)
    if not comment.isprintable():
        raise UsageError(f"the comment {comment!r} has a line break or a control character in it")
    line = f"{role} {check_key(public)} {comment}".rstrip()
    _edit(home, AUTHORIZED, lambda fields: fields[1:2] == [public], line)


def revoke(home: Path, public: str) -> bool:
    """Trust `public` no more, neither as a client nor as a host, even if a driver vouches for it. Was it trusted?

    Takes effect on the next handshake; connections that are open are the agent's to close.
    """
    with suppress(KeyFileError):  # a damaged identity must not keep anybody from being revoked
        if public == load_identity(home).public:
            raise UsageError("that is your own key; `gpulayer keys make --force` replaces it")
    line = f"{REVOKED} {check_key(public)}"
    trusted = any(key.public == public for key in list_keys(home))
    _edit(home, AUTHORIZED, lambda fields: fields[1:2] == [public], line)
    if any(host.public == public for host in list_hosts(home)):
        trusted = _edit(home, KNOWN_HOSTS, lambda fields: fields[1:2] == [public])
    return trusted


def list_keys(home: Path) -> list[AuthorizedKey]:
    """Who may connect here, apart from ourselves. Raises `KeyFileError` on a line that it cannot read."""
    return [key for key in read_authorized(home) if key.role != REVOKED]


def read_authorized(home: Path) -> list[AuthorizedKey]:
    """All lines of authorized_keys, those with the role `REVOKED` too. Raises `KeyFileError` on one that it cannot read."""
    found: list[AuthorizedKey] = []
    for number, fields in _entries(home, AUTHORIZED):
        if len(fields) < 2 or fields[0] not in (*ROLES, REVOKED) or not is_key(fields[1]):
            raise _bad_line(home / AUTHORIZED, number, f"role public-key comment, with a role of {', '.join(ROLES)}")
        found.append(AuthorizedKey(*fields))
    return found


def trust_host(home: Path, address: str, public: str) -> None:
    """From now on, whoever answers at `address` (`host` or `host:port`) must hold the secret key of `public`."""
    name = _canonical(address)
    _edit(home, KNOWN_HOSTS, lambda fields: fields[:1] == [name], f"{name} {check_key(public)}")


def known_host(home: Path, address: str) -> str | None:
    """The public key to expect at `address` (`host` or `host:port`), None if we know none."""
    name = _canonical(address)
    return next((host.public for host in list_hosts(home) if host.address == name), None)


def list_hosts(home: Path) -> list[KnownHost]:
    """All known hosts. Raises `KeyFileError` on a line that it cannot read."""
    found: list[KnownHost] = []
    for number, fields in _entries(home, KNOWN_HOSTS):
        if len(fields) < 2 or not is_key(fields[1]):
            raise _bad_line(home / KNOWN_HOSTS, number, "host:port public-key")
        found.append(KnownHost(fields[0], fields[1]))
    return found


class AllowList:
    """Our own key and authorized_keys as they are on disk now, then the keys that a driver vouches for.

    Fails closed: what cannot be read lets nobody in, and the reason is logged once. All methods are for one thread.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._own: str | None = None
        self._listed: dict[str, str] | None = None
        self._vouched: dict[bytes, dict[str, str]] = {}  # by who vouches: the role of each key
        self._own_stamp: tuple[int, ...] | None = None
        self._listed_stamp: tuple[int, ...] | None = None

    def role(self, public_key: str) -> str | None:
        """The role of that key's holder, None if they may not connect. Costs two `stat` calls."""
        self._refresh()
        if public_key == self._own:
            return "driver"
        if self._listed is None:  # who was revoked is unknown then, so a driver's word does not count either
            return None
        role = self._listed.get(public_key)
        if role is None:
            role = next((roles[public_key] for roles in self._vouched.values() if public_key in roles), None)
        return None if role == REVOKED else role

    def allow(self, public: str, role: str, voucher: bytes) -> None:
        """Let a key in for as long as `voucher` (a driver's id) vouches for it, unless authorized_keys says something else."""
        self._vouched.setdefault(voucher, {})[check_key(public)] = check_role(role)

    def withdraw(self, voucher: bytes) -> None:
        """Take back all that `voucher` has allowed; what others vouch for stays."""
        self._vouched.pop(voucher, None)

    def _refresh(self) -> None:
        own_stamp, listed_stamp = files.stamp(self._home, IDENTITY), files.stamp(self._home, AUTHORIZED)
        if own_stamp != self._own_stamp:
            self._own_stamp = own_stamp
            self._own = self._read_own()
        if listed_stamp != self._listed_stamp:
            self._listed_stamp = listed_stamp
            self._listed = self._read_listed()

    def _read_own(self) -> str | None:
        if not os.path.lexists(self._home / IDENTITY):
            return None
        try:
            return load_identity(self._home).public
        except GPUlayerError as error:
            _log.error("your own key does not count until this is mended: %s", error)
            return None

    def _read_listed(self) -> dict[str, str] | None:
        try:
            lines = read_authorized(self._home)
        except GPUlayerError as error:
            _log.error("nobody but yourself may connect until this is mended: %s", error)
            return None
        return {key.public: key.role for key in sorted(lines, key=lambda key: key.role == REVOKED)}


def _entries(home: Path, name: str) -> list[tuple[int, list[str]]]:
    """(line number, its at most three fields) for each line that is neither empty nor a comment."""
    lines = (files.read(home, name) or "").split("\n")
    return [(number, fields) for number, line in enumerate(lines, 1) if (fields := _fields(line))]


def _fields(line: str) -> list[str]:
    return [] if line.lstrip().startswith("#") else line.split(None, 2)


def _edit(home: Path, name: str, drop: Callable[[list[str]], bool], line: str | None = None) -> bool:
    """Drop the lines whose fields match and append one, as one step. Was any dropped?"""
    with files.locked(home):
        lines = (files.read(home, name) or "").rstrip("\n").split("\n")
        kept = [old for old in lines if not drop(_fields(old))]
        wanted = [*kept, line] if line else kept
        files.replace(home, name, "\n".join(wanted).lstrip("\n") + "\n")
    return len(kept) < len(lines)


def _bad_line(path: Path, number: int, form: str) -> KeyFileError:
    return KeyFileError(f"{path}:{number} is not of the form `{form}`; mend or remove that line", path=str(path), line=number)


def _canonical(address: str) -> str:
    host, port = parse_address(address)
    return f"[{host.lower()}]:{port}" if ":" in host else f"{host.lower()}:{port}"
