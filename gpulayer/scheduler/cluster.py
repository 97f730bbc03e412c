"""A snapshot of the cluster: hosts, what is free on each, and the links between them. The input of every placement."""

from __future__ import annotations

from dataclasses import dataclass

from gpulayer.resources import Device, Host, Link


@dataclass(frozen=True, slots=True)
class HostView:
    """One host as last heard of."""

    host: Host
    cpus_free: float
    gpus_free: float
    waiting: int = 0  # lease requests in its queue


@dataclass(frozen=True, slots=True)
class Cluster:
    """All hosts that a session is connected to, in the order they were given."""

    views: tuple[HostView, ...]
    links: tuple[Link, ...] = ()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts, in the order they were given to `connect`."""
        return tuple(view.host for view in self.views)

    @property
    def devices(self) -> tuple[tuple[Host, Device], ...]:
        """(host, device) for every device."""
        return tuple((view.host, device) for view in self.views for device in view.host.devices)
