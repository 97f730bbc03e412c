"""A snapshot shows hosts and devices in the order in which they were given, and cannot be changed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from gpulayer.resources import Device, Host, Link
from gpulayer.scheduler.cluster import Cluster, HostView

CPU, GPU_0, GPU_1 = Device("cpu", 0, "CPU"), Device("cuda", 0, "H200"), Device("cuda", 1, "H200")
FIRST = Host(b"2" * 8, "b", "", 4, 1, (GPU_0, GPU_1, CPU))
SECOND = Host(b"1" * 8, "a", "", 4, 1, (CPU,))
CLUSTER = Cluster((HostView(FIRST, 4, 2), HostView(SECOND, 0.5, 0, waiting=2)), (Link("b", "a", 0.001),))


def test_hosts_keep_their_order() -> None:
    assert CLUSTER.hosts == (FIRST, SECOND)


def test_devices_name_their_host() -> None:
    assert CLUSTER.devices == ((FIRST, GPU_0), (FIRST, GPU_1), (FIRST, CPU), (SECOND, CPU))


def test_empty_cluster_has_nothing() -> None:
    assert (Cluster(()).hosts, Cluster(()).devices, Cluster(()).links) == ((), (), ())


def test_snapshot_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        CLUSTER.views = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        CLUSTER.views[0].cpus_free = 9  # type: ignore[misc]
