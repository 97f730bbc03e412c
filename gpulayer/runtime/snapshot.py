"""What `gpulayer top` and `status` look at: one snapshot of every agent in reach, without being a driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from gpulayer.config import Settings
from gpulayer.errors import ConnectError, GPUlayerError
from gpulayer.resources import Address, new_id
from gpulayer.runtime import records
from gpulayer.runtime.connect import dials_for
from gpulayer.runtime.io_thread import IOThread
from gpulayer.wire.hello import make_hello
from gpulayer.wire.rpc import Dial, Endpoint

TIMEOUT_S = 5.0


def collect(hosts: Sequence[str] = ()) -> dict[str, Any]:
    """State of the given hosts, else of all agents of this user on this machine and those in GPULAYER_HOSTS.

    A host that cannot be reached is in the result, with status "lost" and the reason. Raises `ConnectError` if there is
    nothing to look at.
    """
    settings = Settings.from_environment()
    dials = _dials(settings, list(hosts))
    if not dials:
        raise ConnectError("no agent runs on this machine; type: gpulayer up  (or name hosts that you want to see)")
    io = IOThread("gpulayer-look")
    try:
        found = io.run(_ask_all(dials), TIMEOUT_S * 2 + 1)
    finally:
        io.stop()
    return {"time": time.time(), "hosts": found}


def _dials(settings: Settings, hosts: list[str]) -> list[Dial]:
    if hosts:
        return dials_for(settings, hosts)
    local = [Dial(record.host, f"ipc://{record.socket_path}") for record in records.read_all(settings.runtime_dir)]
    return local + (dials_for(settings, None) if settings.hosts else [])


async def _ask_all(dials: list[Dial]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(_ask_one(dial) for dial in dials)))


async def _ask_one(dial: Dial) -> dict[str, Any]:
    endpoint = Endpoint(asyncio.get_running_loop(), new_id(), lambda source, message: None)
    try:
        host = await endpoint.connect(dial, make_hello("viewer"), TIMEOUT_S)
        state = await asyncio.wait_for(endpoint.ask(Address(host.id), "state"), TIMEOUT_S)
        if dial.endpoint.startswith("tcp://"):  # an agent bound to 0.0.0.0 cannot know at which address it is reached
            state["address"] = dial.endpoint.removeprefix("tcp://")
        return state
    except (GPUlayerError, asyncio.TimeoutError) as error:
        reason = str(error) or f"no answer within {TIMEOUT_S:g} s"
        return {"name": dial.name, "address": dial.endpoint, "status": "lost", "error": reason}
    finally:
        await endpoint.close(0)


async def _shut_down(dial: Dial) -> int:
    endpoint = Endpoint(asyncio.get_running_loop(), new_id(), lambda source, message: None)
    try:
        host = await endpoint.connect(dial, make_hello("driver"), TIMEOUT_S)
        return int((await endpoint.ask(Address(host.id), "shutdown"))["pid"])
    finally:
        await endpoint.close()


def shut_down(record: records.Record) -> int:
    """Tell an agent on this machine to end; returns its pid. Raises `ConnectError` if it does not answer."""
    io = IOThread("gpulayer-down")
    try:
        return io.run(_shut_down(Dial(record.host, f"ipc://{record.socket_path}")), TIMEOUT_S * 2)
    finally:
        io.stop()
