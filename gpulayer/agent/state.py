"""What an agent shows of itself: plain values, for `gpulayer top`, `status` and anything else that looks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from gpulayer.agent.agent import Agent
    from gpulayer.agent.leases import Lease


def snapshot(agent: Agent) -> dict[str, Any]:
    """Host, sensors, devices with who leases them, workers with what they do, training runs."""
    host, ledger = agent.host, agent.leases.ledger
    sensors = agent.sensors.sample()
    leases = list(agent.leases.active.values())
    return {
        "name": host.name,
        "address": host.address,
        "id": host.id.hex(),
        "zone": host.zone,
        "status": "up",
        "error": None,
        "cpus": host.cpus,
        "cpus_free": ledger.cpus_free,
        "memory_bytes": host.memory_bytes,
        "memory_used_bytes": sensors["memory_used_bytes"],
        "cpu_percent": sensors["cpu_percent"],
        "versions": host.versions,
        "libraries": host.libraries,
        "uptime_s": time.time() - agent.started_s,
        "waiting": len(agent.leases.queue),
        "devices": _devices(agent, sensors, leases),
        "workers": [_worker(agent, lease) for lease in leases],
        "runs": [run for runs in agent.runs.values() for run in runs.values()],
    }


def _devices(agent: Agent, sensors: dict[str, Any], leases: list[Lease]) -> list[dict[str, Any]]:
    uses = {(use.get("uuid"), use.get("index")): use for use in sensors["devices"]}
    rows: list[dict[str, Any]] = []
    for device in agent.host.devices:
        use = uses.get((device.uuid, device.index), {})
        rows.append(
            {
                "kind": device.kind,
                "index": device.index,
                "name": device.name,
                "uuid": device.uuid,
                "memory_bytes": device.memory_bytes,
                "utilization": use.get("utilization"),
                "memory_used_bytes": use.get("memory_used_bytes"),
                "temperature_c": use.get("temperature_c"),
                "power_w": use.get("power_w"),
                "leased_by": [lease.label for lease in leases if device in lease.devices],
            }
        )
    return rows


def _worker(agent: Agent, lease: Lease) -> dict[str, Any]:
    worker = lease.worker
    status = worker.status if worker else {}
    owner = agent.peers.known.get(lease.owner)
    busy_since = status.get("busy_since_s")
    pid = worker.pid if worker else 0
    starting = worker is None or not worker.ready.done()
    return {
        "pid": pid,
        "label": lease.label,
        "name": lease.name,
        "kind": lease.kind,
        "status": "starting" if starting else "busy" if busy_since else "idle",
        "what": status.get("what", ""),
        "busy_s": max(0.0, time.time() - busy_since) if busy_since else 0.0,
        "calls": status.get("calls", 0),
        "cpus": lease.need.cpus,
        "gpus": lease.need.gpus,
        "devices": [device.index for device in lease.devices],
        "memory_bytes": _memory_bytes(pid),
        "driver": owner.name if owner else "",
    }


def _memory_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss if pid else 0
    except psutil.Error:
        return 0
