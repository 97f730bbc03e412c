"""A run in the caller's process, seen from a session that is connected meanwhile. Without one the runtime is not imported."""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpulayer.resources import new_id

if TYPE_CHECKING:
    from gpulayer.runtime.session import Session

log = logging.getLogger("gpulayer.train")


def publisher() -> Callable[[dict[str, Any]], None] | None:
    """What shows the progress of a run in this process to `gpulayer top`; None without a session."""
    session = _session()
    if session is None:
        return None
    from gpulayer.runtime.gang import publish_run  # only with a session: a run here needs no runtime

    run_id = new_id().hex()
    return lambda status: publish_run(session, {"id": run_id, **status})


def warn_of_idle_hosts() -> None:
    """Say that a run in this process leaves the other machines of the session alone, where there are any."""
    session = _session()
    if session is None or session.role != "driver":
        return
    channels = session.endpoint.channels
    away = [host.name for key, host in list(session.hosts.items()) if key in channels and not _is_here(channels[key].reached_at)]
    if away:
        log.warning(
            "training runs in this process; the connected hosts (%s) are used from devices=2 or num_nodes=2 on", ", ".join(away)
        )


def _session() -> Session | None:
    if "gpulayer.runtime.session" not in sys.modules:
        return None
    from gpulayer.runtime import session as sessions  # it is there already

    session = sessions.current_or_none()
    return session if session is not None and session.closed is None else None


def _is_here(name: str) -> bool:
    """Whether that address is this machine's loopback."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:  # a host name
        return False
