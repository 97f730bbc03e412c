from __future__ import annotations

import os
import stat
import sys
from types import ModuleType, SimpleNamespace

import pytest

from gpulayer.agent import gpus
from gpulayer.agent.gpus import find_gpus, parse_amd_smi, parse_rocm_smi, rocm_uuid, visible_devices_env
from gpulayer.resources import Device

GIB = 2**30
GPU0, GPU1 = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1b336fc2-83e8-4dd1-8c5c-0f2c2a3f21a1"
MIG0, MIG1 = "MIG-6cef5d4c-5a52-5e1e-9e0a-57a1fe64b4a3", "MIG-e1f0a1b2-0cb3-5a2f-b1f4-8c5b0f0f1d11"
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class FakeNvml(ModuleType):
    """As much of pynvml as is used: GPU 0 whole, GPU 1 cut into two MIG slices."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True, mig: bool = True, broken: tuple[int, ...] = ()) -> None:
        super().__init__("pynvml")
        self.driver, self.mig, self.broken, self.opened = driver, mig, broken, 0

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.broken:
            raise self.NVMLError("GPU is lost")
        return (GPU0, GPU1)[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200 MIG 1g.18gb" if handle.startswith("MIG-") else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=16 * GIB if handle.startswith("MIG-") else 140 * GIB, used=GIB)

    def nvmlDeviceGetMigMode(self, handle):
        if handle == GPU0 or not self.mig:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index not in (0, 2):
            raise self.NVMLError("Not Found")
        return MIG0 if index == 0 else MIG1


@pytest.fixture(autouse=True)
def host_without_gpus(monkeypatch, tmp_path):
    """No driver, no tools, no masks: whatever the test machine has, each test adds what it is about."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    monkeypatch.setattr(gpus.shutil, "which", lambda name, path=None: _tool(tmp_path, name))
    for mask in MASKS:
        monkeypatch.delenv(mask, raising=False)


def _tool(folder, name):
    path = folder / name
    return str(path) if path.exists() else None


def add_tool(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def add_nvml(monkeypatch, **options):
    nvml = FakeNvml(**options)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


# ---- CUDA


def test_find_gpus_is_empty_without_a_driver():
    assert find_gpus() == ()


def test_find_gpus_is_empty_without_pynvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpus() == ()


def test_find_gpus_lists_mig_slices_instead_of_their_gpu(monkeypatch):
    nvml = add_nvml(monkeypatch)
    assert find_gpus() == (
        Device("cuda", 0, "NVIDIA H200", GPU0, 140 * GIB),
        Device("cuda", 2, "NVIDIA H200 MIG 1g.18gb", MIG0, 16 * GIB),
        Device("cuda", 3, "NVIDIA H200 MIG 1g.18gb", MIG1, 16 * GIB),
    )
    assert nvml.opened == 0


def test_find_gpus_lists_whole_gpus_when_mig_is_off(monkeypatch):
    add_nvml(monkeypatch, mig=False)
    assert [(device.index, device.uuid) for device in find_gpus()] == [(0, GPU0), (1, GPU1)]


def test_find_gpus_keeps_the_numbers_of_others_when_one_is_lost(monkeypatch):
    add_nvml(monkeypatch, mig=False, broken=(0,))
    assert [(device.index, device.uuid) for device in find_gpus()] == [(1, GPU1)]


@pytest.mark.parametrize(
    ("mask", "uuids"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [GPU0]),
        ("1", [MIG0, MIG1]),
        ("1, 0", [MIG0, MIG1, GPU0]),
        ("0,0", [GPU0]),
        ("0,7,1", [GPU0]),
        (GPU0, [GPU0]),
        ("gpu-8932f937", [GPU0]),
        ("GPU-", []),
        (GPU1, [MIG0, MIG1]),
        (f"{MIG1},{GPU0}", [MIG1, GPU0]),
    ],
)
def test_find_gpus_honours_cuda_visible_devices(monkeypatch, mask, uuids):
    add_nvml(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert [device.uuid for device in find_gpus()] == uuids


# ---- ROCm

AMD_LIST = """[
    {"gpu": 0, "bdf": "0000:05:00.0", "uuid": "40ff74a1-0000-1000-80c9-6a3f5e1d2b70",
     "kfd_id": 24512, "node_id": 3, "partition_id": 0},
    {"gpu": 1, "bdf": "0000:26:00.0", "uuid": "59ff74a1-0000-1000-805d-93a1c7b0e4d1",
     "kfd_id": 11743, "node_id": 2, "partition_id": 0}
]"""
AMD_ROWS = """[
    {
        "gpu": 0,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "asic_serial": "0x40C96A3F5E1D2B70", "oam_id": 7},
        "bus": {"bdf": "0000:05:00.0", "max_pcie_width": 16},
        "vram": {"type": "HBM", "vendor": "HYNIX", "size": {"value": 196592, "unit": "MB"}, "bit_width": 8192}
    },
    {
        "gpu": 1,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "asic_serial": "0x095D93A1C7B0E4D1", "oam_id": 5},
        "bus": "N/A",
        "vram": {"type": "HBM", "vendor": "HYNIX", "size": {"value": 196592, "unit": "MB"}, "bit_width": 8192}
    }
]"""
ROCM_SMI = """{
    "card0": {"Unique ID": "0x40c96a3f5e1d2b70", "VRAM Total Memory (B)": "206141652992",
              "VRAM Total Used Memory (B)": "297611264", "Card Series": "AMD Instinct MI300X", "Card SKU": "M3000100"},
    "card1": {"Unique ID": "N/A", "VRAM Total Memory (B)": "25753026560", "Card series": "Radeon RX 7900 XTX"},
    "system": {"Driver version": "6.10.5"}
}"""
AMD0 = Device("rocm", 1, "AMD Instinct MI300X", "GPU-40c96a3f5e1d2b70", 196592 * 2**20)
AMD1 = Device("rocm", 0, "AMD Instinct MI300X", "GPU-095d93a1c7b0e4d1", 196592 * 2**20)


@pytest.mark.parametrize("static", [AMD_ROWS, f'{{"gpu_data": {AMD_ROWS}}}', f"WARNING: not in group render\n[sic]\n{AMD_ROWS}"])
def test_parse_amd_smi_numbers_devices_as_the_runtime_does(static):
    assert parse_amd_smi(AMD_LIST, static) == (AMD1, AMD0)


def test_parse_amd_smi_keeps_its_own_numbers_when_nodes_are_unknown():
    assert [device.uuid for device in parse_amd_smi("", AMD_ROWS)] == [AMD0.uuid, AMD1.uuid]


def test_parse_amd_smi_leaves_the_uuid_out_when_partitions_share_a_serial_number():
    rows = AMD_ROWS.replace("0x095D93A1C7B0E4D1", "0x40C96A3F5E1D2B70")
    assert [(device.index, device.uuid) for device in parse_amd_smi(AMD_LIST, rows)] == [(0, ""), (1, "")]


def test_parse_amd_smi_accepts_what_is_not_available():
    rows = '[{"gpu": "N/A", "asic": "N/A", "vram": {"size": "N/A"}}, {"vram": {"size": "16368 MB"}}, 7]'
    assert parse_amd_smi("[]", rows) == (Device("rocm", 0, "AMD GPU"), Device("rocm", 1, "AMD GPU", "", 16368 * 2**20))


@pytest.mark.parametrize("text", ["", "amd-smi: command failed", "[1, 2", "null", '{"error": "no GPU"}', "[]"])
def test_parsers_find_no_device_in_other_text(text):
    assert parse_amd_smi(text, text) == ()
    assert parse_rocm_smi(text) == ()


def test_parse_rocm_smi_reads_old_and_new_keys():
    assert parse_rocm_smi(ROCM_SMI) == (
        Device("rocm", 0, "AMD Instinct MI300X", "GPU-40c96a3f5e1d2b70", 206141652992),
        Device("rocm", 1, "Radeon RX 7900 XTX", "", 25753026560),
    )


@pytest.mark.parametrize(
    ("serial", "uuid"), [("0xAB", "GPU-00000000000000ab"), ("ab\n", "GPU-00000000000000ab"), ("N/A", ""), (None, ""), ("0x0", "")]
)
def test_rocm_uuid_is_16_hex_digits(serial, uuid):
    assert rocm_uuid(serial) == uuid


def add_amd_smi(folder):
    (folder / "list.json").write_text(AMD_LIST)
    (folder / "static.json").write_text(AMD_ROWS)
    add_tool(folder, "amd-smi", f'exec cat "{folder}/$1.json"')


def test_find_gpus_asks_amd_smi(tmp_path):
    add_amd_smi(tmp_path)
    assert find_gpus() == (AMD1, AMD0)


def test_find_gpus_asks_rocm_smi_when_amd_smi_fails(tmp_path):
    (tmp_path / "rocm.json").write_text(ROCM_SMI)
    add_tool(tmp_path, "amd-smi", "exit 1")
    add_tool(tmp_path, "rocm-smi", f'exec cat "{tmp_path}/rocm.json"')
    assert [device.name for device in find_gpus()] == ["AMD Instinct MI300X", "Radeon RX 7900 XTX"]


def test_find_gpus_gives_up_on_a_tool_that_hangs(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "TOOL_TIMEOUT_S", 0.05)
    add_tool(tmp_path, "amd-smi", "exec sleep 30")
    assert find_gpus() == ()


@pytest.mark.parametrize(
    ("masks", "found"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, [AMD0]),
        ({"ROCR_VISIBLE_DEVICES": AMD0.uuid, "HIP_VISIBLE_DEVICES": "0"}, [AMD0]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [AMD0, AMD1]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [AMD1]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, [AMD0]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_find_gpus_honours_rocm_masks(monkeypatch, tmp_path, masks, found):
    add_amd_smi(tmp_path)
    for name, value in masks.items():
        monkeypatch.setenv(name, value)
    assert list(find_gpus()) == found


# ---- Metal


def test_find_gpus_finds_one_metal_device_on_apple_silicon(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(gpus.platform, "machine", lambda: "arm64")
    add_tool(tmp_path, "sysctl", 'if [ "$2" = hw.memsize ]; then echo 34359738368; else echo "Apple M3 Max"; fi')
    assert find_gpus() == (Device("metal", 0, "Apple M3 Max", "", 32 * GIB),)


# ---- what a worker may see

CUDA = [Device("cuda", 0, "a", GPU0), Device("cuda", 2, "b", MIG0)]


def test_visible_devices_env_hides_every_gpu_when_none_is_leased():
    assert visible_devices_env([Device("cpu", 0, "cpu")]) == dict.fromkeys(MASKS, "")


def test_visible_devices_env_names_cuda_devices_by_uuid():
    env = visible_devices_env(CUDA)
    assert env == {"CUDA_VISIBLE_DEVICES": f"{GPU0},{MIG0}", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def test_visible_devices_env_names_cuda_devices_by_bus_order_when_a_uuid_is_unknown():
    env = visible_devices_env([Device("cuda", 1, "a")])
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


def test_visible_devices_env_counts_hip_devices_among_those_of_rocr():
    env = visible_devices_env([AMD0, Device("rocm", 3, "b")])
    assert env["ROCR_VISIBLE_DEVICES"] == f"{AMD0.uuid},3"
    assert env["HIP_VISIBLE_DEVICES"] == env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_visible_devices_env_shows_an_agent_what_was_leased(monkeypatch):
    add_nvml(monkeypatch)
    leased = find_gpus()[1:]
    for name, value in visible_devices_env(leased).items():
        monkeypatch.setenv(name, value)
    assert find_gpus() == leased
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"{MIG0},{MIG1}"
