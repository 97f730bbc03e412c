"""This user's own CURVE key pair, and what a key looks like.

Keys are written in Z85: 40 characters, none of which is a space, a quote or a backslash.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from gpulayer.errors import KeyFileError, UsageError
from gpulayer.wire import private_files as files

IDENTITY = "identity.key"
KEY_CHARACTERS = 40

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_VALUE = {character: value for value, character in enumerate(_Z85)}


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85. It cannot be pickled or copied, and its repr hides the secret."""

    public: str
    secret: str = field(repr=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KeyPair does not travel: the secret key stays in the process that read it")


def is_key(text: str) -> bool:
    """Whether `text` is 32 bytes in Z85."""
    if len(text) != KEY_CHARACTERS or not all(character in _Z85_VALUE for character in text):
        return False
    return all(_group_value(text[start : start + 5]) < 2**32 for start in range(0, KEY_CHARACTERS, 5))


def check_key(text: str) -> str:
    """`text`, if it is a public key. Raises `UsageError` otherwise."""
    if is_key(text):
        return text
    raise UsageError(
        f"{text[:8]!r}... ({len(text)} characters) is not a public key: that is {KEY_CHARACTERS} characters of Z85, as "
        "`gpulayer keys show` prints them on the host whose key it is; in a shell, put it in single quotes"
    )


def new_pair() -> KeyPair:
    """A fresh pair, kept nowhere. Its public key never starts with `-`, which a command line would take for an option."""
    import zmq  # here, because the command line lists and edits keys without loading libzmq

    while True:
        public, secret = zmq.curve_keypair()
        if not public.startswith(b"-"):
            return KeyPair(public.decode(), secret.decode())


def make_identity(home: Path, force: bool = False) -> KeyPair:
    """Make and keep a new pair. Raises `KeyFileError` if there is one already, unless `force` says to replace it."""
    pair = new_pair()
    if force:
        files.replace(home, IDENTITY, _identity_text(pair))
    elif not files.create(home, IDENTITY, _identity_text(pair)):
        path = home / IDENTITY
        raise KeyFileError(
            f"{path} exists already; `gpulayer keys make --force` replaces it, and then every host that knows the old key "
            "must be told the new one",
            path=str(path),
        )
    return pair


def load_identity(home: Path) -> KeyPair:
    """Our own pair. Raises `KeyFileError` if there is none, or if its file is not private to us or damaged."""
    path = home / IDENTITY
    pair = _parse_identity(files.read(home, IDENTITY))
    if pair is not None:
        return pair
    if os.path.lexists(path):
        raise KeyFileError(f"{path} is damaged; `gpulayer keys make --force` replaces it by a new key", path=str(path))
    raise KeyFileError(f"you have no key yet ({path}); type: gpulayer keys make", path=str(path))


def load_or_make_identity(home: Path) -> KeyPair:
    """Our own pair, made at the first call. Two processes that call this at once get the same pair."""
    if not os.path.lexists(home / IDENTITY):
        files.create(home, IDENTITY, _identity_text(new_pair()))
    return load_identity(home)


def _identity_text(pair: KeyPair) -> str:
    warning = "# Who holds the secret key can run code as you on every host that knows the public one."
    return f"{warning}\npublic {pair.public}\nsecret {pair.secret}\n"


def _parse_identity(text: str | None) -> KeyPair | None:
    """None for a text that is not a key pair; raises nothing, so that no traceback shows the text."""
    lines = [line.split() for line in (text or "").splitlines() if not line.startswith("#")]
    values = {fields[0]: fields[1] for fields in lines if len(fields) == 2 and is_key(fields[1])}
    if values.keys() != {"public", "secret"}:
        return None
    pair = KeyPair(values["public"], values["secret"])
    return pair if _public_of(pair) == pair.public else None


def _public_of(pair: KeyPair) -> str:
    import zmq

    return zmq.curve_public(pair.secret.encode()).decode()


def _group_value(group: str) -> int:
    value = 0
    for character in group:
        value = value * 85 + _Z85_VALUE[character]
    return value
