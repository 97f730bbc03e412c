"""The values that every layer shares: frozen, comparable, and back from plain values as they were."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import msgpack
import pytest

from gpulayer.resources import AGENT_PEER, Address, Device, Host, Link, Resources, new_id

GPU = Device("cuda", 1, "H200", "GPU-1234", 141 << 30)
CPU = Device("cpu", 0, "EPYC")
HOST = Host(
    id=b"\x00hostid\xff",
    name="gpu1",
    address="10.0.0.7:7770",
    cpus=16.0,
    memory_bytes=1 << 40,
    devices=(GPU, CPU),
    versions={"python": "3.11.7", "torch": "2.4.0"},
    libraries={"jax": "0.4"},
    pid=4711,
    zone="eu",
)


def test_new_id_is_eight_bytes_that_do_not_repeat() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {8}


def test_address_comes_back_from_its_bytes() -> None:
    address = Address(new_id(), new_id())
    assert len(address.to_bytes()) == 16
    assert Address.from_bytes(address.to_bytes()) == address
    assert Address.from_bytes(memoryview(address.to_bytes())) == address  # type: ignore[arg-type]
    assert hash(Address.from_bytes(bytearray(address.to_bytes()))) == hash(address)


def test_address_is_the_agent_when_no_peer_is_given() -> None:
    address = Address(b"hosthost")
    assert address.peer == AGENT_PEER
    assert address != Address(b"hosthost", b"peerpeer")
    assert str(Address(b"\x01" * 8, b"\x02" * 8)) == "0101010101010101/0202020202020202"


@pytest.mark.parametrize(("kind", "counts"), [("cuda", True), ("rocm", True), ("metal", True), ("cpu", False)])
def test_device_counts_as_gpu_by_its_kind(kind: str, counts: bool) -> None:
    device = Device(kind, 0, "x")
    assert device.is_gpu is counts
    assert (device in replace(HOST, devices=(device,)).gpus) is counts


def test_host_gpus_keep_their_order() -> None:
    second = replace(GPU, index=0)
    assert replace(HOST, devices=(CPU, GPU, second)).gpus == (GPU, second)


@pytest.mark.parametrize(
    ("need", "text"),
    [(Resources(), "1 CPU"), (Resources(0.5, 2), "0.5 CPU and 2 GPU"), (Resources(0, 0.25), "0 CPU and 0.25 GPU")],
)
def test_resources_read_as_text(need: Resources, text: str) -> None:
    assert str(need) == text


def test_host_comes_back_from_plain_values_over_the_wire() -> None:
    again = Host.from_plain(msgpack.unpackb(msgpack.packb(HOST.to_plain())))
    assert again == HOST
    assert isinstance(again.devices, tuple)


def test_host_of_a_newer_version_is_understood() -> None:
    plain = HOST.to_plain()
    plain["flavour"] = "new"
    plain["devices"] = [{**device, "compute_capability": [9, 0]} for device in plain["devices"]]
    assert Host.from_plain(plain) == HOST


def test_host_of_an_older_version_gets_defaults() -> None:
    plain = {"id": b"x" * 8, "name": "old", "address": "", "cpus": 2.0, "memory_bytes": 1}
    assert Host.from_plain(plain) == Host(b"x" * 8, "old", "", 2.0, 1)


@pytest.mark.parametrize("value", [Address(b"x" * 8), GPU, Resources(), HOST, Link("a", "b", 0.001)], ids=repr)
def test_value_is_frozen(value: object) -> None:
    name = next(iter(type(value).__slots__))  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, 1)
