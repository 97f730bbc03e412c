"""Who may come in, and as what: compares keys, roles and versions. Pure but for the allow-list it reads."""

from __future__ import annotations

from typing import Any

from gpulayer.resources import Host
from gpulayer.wire.hello import make_hello, python_minor
from gpulayer.wire.keys import AllowList
from gpulayer.wire.message import PROTOCOL

_ROLES = {"driver": {"driver"}, "agent": {"driver", "agent"}, "viewer": {"driver", "agent", "viewer"}}
"""Kind of peer -> roles whose keys may be it."""


class Doorkeeper:
    """Decides about one HELLO at a time."""

    def __init__(self, host: Host, allowed: AllowList) -> None:
        self._host = host
        self._allowed = allowed

    def hello(self, kind: str) -> dict[str, Any]:
        """This agent's own HELLO to another agent."""
        return make_hello(kind)

    def knows(self, kind: str, key: str) -> bool:
        """Whether the holder of `key` may be a peer of that kind, now."""
        return self._allowed.role(key) in _ROLES[kind]

    def refusal(self, key: str, hello: dict[str, Any]) -> dict[str, Any] | None:
        """None if the peer is welcome; else a table of what does not fit: rows of (what, the peer's, ours).

        `key` is "" for a peer that came over ipc: the folder's mode has already proved that it is this user.
        """
        kind = str(hello.get("kind"))
        if kind not in _ROLES:
            return {"rows": [("kind", kind, " or ".join(sorted(_ROLES)))]}
        if key and not self.knows(kind, key):
            role = self._allowed.role(key) or "unknown"
            return {"rows": [("role of the key", role, " or ".join(sorted(_ROLES[kind])))]}
        for what, kinds in (("pid", (int,)), ("born_s", (int, float))):
            if not isinstance(hello.get(what), kinds):
                return {"rows": [(what, repr(hello.get(what)), "a number")]}
        rows: list[tuple[str, Any, Any]] = [("protocol", hello.get("protocol"), PROTOCOL)]
        if kind != "viewer":  # a viewer shows plain values: any Python can
            rows.append(("python", python_minor(str(hello.get("python"))), python_minor(self._host.versions["python"])))
        misfits = [row for row in rows if row[1] != row[2]]
        if misfits:
            rows.append(("gpulayer", hello.get("gpulayer"), self._host.versions["gpulayer"]))
            return {"rows": rows}
        return None
