"""Frozen values that every layer shares: who a process is, what a host has, what a call needs.

    host = Host(id=..., name="gpu1", address="10.0.0.7:7770", cpus=16, memory_bytes=..., devices=(Device(...),))
    need = Resources(cpus=1, gpus=0.5)

Quantities carry their unit in the name. A `Host` turns into plain values (`to_plain`) and back (`from_plain`).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

AGENT_PEER = bytes(8)
DEFAULT_PORT = 7770


def new_id() -> bytes:
    """8 random bytes: a host's or a process's incarnation."""
    return os.urandom(8)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a message goes: a host's agent incarnation and one process there (`AGENT_PEER` is the agent itself)."""

    host: bytes
    peer: bytes = AGENT_PEER

    def to_bytes(self) -> bytes:
        """16 bytes, host first."""
        return self.host + self.peer

    @classmethod
    def from_bytes(cls, data: bytes) -> Address:
        """The inverse of `to_bytes`."""
        return cls(bytes(data[:8]), bytes(data[8:16]))

    def __str__(self) -> str:
        return f"{self.host.hex()}/{self.peer.hex()}"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or the CPU as a device to train on."""

    kind: str  # "cuda", "rocm", "metal" or "cpu"
    index: int
    name: str
    uuid: str = ""
    memory_bytes: int = 0

    @property
    def is_gpu(self) -> bool:
        """Whether `num_gpus` may be served by it."""
        return self.kind in ("cuda", "rocm", "metal")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one worker needs. `gpus` may be a fraction below 1 (several workers share a device) or a whole number."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine as one user, as its agent describes it."""

    id: bytes
    name: str
    address: str  # "host:port" as the peer reached it, "" for an agent without a TCP port
    cpus: float
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    versions: dict[str, str] = field(default_factory=dict[str, str])  # python, gpulayer, torch, ...
    libraries: dict[str, str] = field(default_factory=dict[str, str])  # jax, cupy, tensorflow, ...: what is installed
    pid: int = 0
    zone: str = ""

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices that `num_gpus` counts."""
        return tuple(device for device in self.devices if device.is_gpu)

    def to_plain(self) -> dict[str, Any]:
        """Plain dicts, lists and bytes, for msgpack."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Host:
        """The inverse of `to_plain`; keys of a newer version are ignored."""
        kept = _known(cls, plain)
        kept["devices"] = tuple(Device(**_known(Device, device)) for device in kept.get("devices", ()))
        return cls(**kept)


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the path between two hosts. `source` and `target` are host names."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_s: float | None = None
    age_s: float = 0.0
    how: str = "heartbeat"


def _known(cls: type[Device | Host], plain: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in plain.items() if key in names}
