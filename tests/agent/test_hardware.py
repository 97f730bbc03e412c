from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from gpulayer.agent import hardware
from gpulayer.agent.hardware import Cgroup, Sensors, available_cpus, describe
from gpulayer.resources import Device, Host

GIB = 2**30


def write(root, **files):
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def cgroup(tmp_path, membership):
    (tmp_path / "self").write_text(membership)
    return Cgroup(tmp_path / "cgroup", tmp_path / "self")


# ---- CPUs and memory


def test_cgroup_v2_quota_is_that_of_the_tightest_level(tmp_path):
    write(tmp_path / "cgroup/user", cpu__max="150000 100000\n")
    write(tmp_path / "cgroup/user/app", cpu__max="max 100000\n")
    assert cgroup(tmp_path, "0::/user/app\n").cpu_quota() == 1.5


def test_cgroup_v2_root_counts_when_the_group_is_not_mounted(tmp_path):
    write(tmp_path / "cgroup", cpu__max="400000 100000\n")
    assert cgroup(tmp_path, "0::/../docker/abc\n").cpu_quota() == 4.0


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_cgroup_v1_quota_is_read_from_its_controller(tmp_path, folder):
    write(tmp_path / "cgroup" / folder / "box", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    assert cgroup(tmp_path, "4:cpu,cpuacct:/box\n1:name=systemd:/\n").cpu_quota() == 2.5


def test_cgroup_quota_is_none_when_nothing_limits(tmp_path):
    write(tmp_path / "cgroup/cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cgroup(tmp_path, "1:cpu:/\n0::/\n").cpu_quota() is None
    assert cgroup(tmp_path, "garbage").cpu_quota() is None
    assert Cgroup(tmp_path / "none", tmp_path / "none").memory() is None


def test_cgroup_memory_does_not_count_droppable_cache_as_used(tmp_path):
    write(
        tmp_path / "cgroup/app",
        memory__max=f"{4 * GIB}\n",
        memory__current=f"{3 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {2 * GIB}\n",
    )
    assert cgroup(tmp_path, "0::/app\n").memory() == (4 * GIB, GIB)


def test_cgroup_v1_memory_takes_the_lowest_limit(tmp_path):
    write(tmp_path / "cgroup/memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="7\n")
    write(
        tmp_path / "cgroup/memory/job",
        memory__limit_in_bytes=f"{GIB}\n",
        memory__usage_in_bytes="1000\n",
        memory__stat="total_inactive_file 400\n",
    )
    assert cgroup(tmp_path, "4:memory:/job\n").memory() == (GIB, 600)


def test_available_cpus_is_the_quota_when_that_is_lower(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write(tmp_path / "cgroup", cpu__max="350000 100000\n")
    assert available_cpus(cgroup(tmp_path, "0::/\n")) == 3.5
    write(tmp_path / "cgroup", cpu__max="6400000 100000\n")
    assert available_cpus(cgroup(tmp_path, "0::/\n")) == 8.0


def test_available_cpus_is_at_least_one_so_that_a_call_can_be_placed(tmp_path):
    write(tmp_path / "cgroup", cpu__max="50000 100000\n")
    assert available_cpus(cgroup(tmp_path, "0::/\n")) == 1.0


# ---- describe


def test_describe_tells_what_this_machine_has():
    host = describe(b"12345678")
    assert host.name
    assert 1 <= host.cpus <= (os.cpu_count() or 1)
    assert 0 < host.memory_bytes <= psutil.virtual_memory().total
    assert [device.memory_bytes for device in host.devices if device.kind == "cpu"] == [host.memory_bytes]
    assert host.versions["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert {"gpulayer", "platform"} <= host.versions.keys()
    assert host.pid == os.getpid()
    assert Host.from_plain(host.to_plain()) == host


def test_describe_takes_name_address_cpus_and_devices_as_given():
    device = Device("cuda", 3, "x", "GPU-x")
    host = describe(b"12345678", "gpu1", "10.0.0.7:7770", cpus=0.5, devices=(device,))
    assert (host.name, host.address, host.cpus, host.devices) == ("gpu1", "10.0.0.7:7770", 0.5, (device,))


def test_describe_reads_versions_from_metadata_of_whatever_distribution_is_installed(tmp_path, monkeypatch):
    for name, version in {
        "cupy_cuda12x": "13.4.1",
        "jax": "0.6.2",
        "onnxruntime_gpu": "1.22.0",
        "nvidia_nccl_cu12": "2.27.3",
    }.items():
        write(tmp_path / f"{name}-{version}.dist-info", METADATA=f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "jax.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    host = describe(b"12345678", devices=())
    assert host.libraries.items() >= {"cupy": "13.4.1", "jax": "0.6.2", "onnxruntime": "1.22.0"}.items()
    assert host.versions["nccl"] == "2.27.3"


def test_describe_imports_no_ml_library():
    code = """
import sys
from gpulayer.agent.hardware import Sensors, describe
Sensors(describe(b"12345678").devices).sample()
print(sorted({"torch", "numpy", "jax", "cupy", "tensorflow", "lightning", "transformers", "onnxruntime"} & set(sys.modules)))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


# ---- sensors


class FakeNvml(ModuleType):
    """A GPU that tells everything, and a MIG slice that tells its memory only."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.opened, self.lookups, self.lost = 0, 0, False

    def nvmlInit(self):
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self):
        return "570.124.06"

    def nvmlSystemGetCudaDriverVersion(self):
        return 12080

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.lookups += 1
        return uuid

    def _whole(self, handle, value):
        if self.lost or handle != "GPU-0":
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._whole(handle, SimpleNamespace(gpu=87, memory=40))

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self._whole(handle, 61)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._whole(handle, 412_500)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self._whole(handle, [SimpleNamespace(pid=41), SimpleNamespace(pid=42)])

    def nvmlDeviceGetMemoryInfo(self, handle):
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=16 * GIB, used=2 * GIB)


CUDA = (Device("cpu", 0, "cpu"), Device("cuda", 0, "H200", "GPU-0", 140 * GIB), Device("cuda", 2, "H200 MIG", "MIG-1"))
TOLD_NOTHING = {"utilization": None, "memory_used_bytes": None, "temperature_c": None, "power_w": None, "processes": ()}


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_sample_reads_each_cuda_device(nvml):
    whole, part = Sensors(CUDA).sample()["devices"]
    assert whole == {
        "kind": "cuda",
        "index": 0,
        "uuid": "GPU-0",
        "utilization": 0.87,
        "memory_used_bytes": 2 * GIB,
        "memory_total_bytes": 16 * GIB,
        "temperature_c": 61,
        "power_w": 412.5,
        "processes": (41, 42),
    }
    assert part == {
        **TOLD_NOTHING,
        "kind": "cuda",
        "index": 2,
        "uuid": "MIG-1",
        "memory_used_bytes": 2 * GIB,
        "memory_total_bytes": 16 * GIB,
    }


def test_sensors_open_nvml_once_and_close_it(nvml):
    sensors = Sensors(CUDA)
    sensors.sample()
    sensors.sample()
    assert (nvml.opened, nvml.lookups) == (1, 2)
    sensors.close()
    assert nvml.opened == 0
    assert [use["utilization"] for use in sensors.sample()["devices"]] == [None, None]


def test_sample_goes_on_without_values_when_a_gpu_is_lost(nvml):
    sensors = Sensors(CUDA)
    nvml.lost = True
    lost = sensors.sample()["devices"][0]
    assert lost == {**TOLD_NOTHING, "kind": "cuda", "index": 0, "uuid": "GPU-0", "memory_total_bytes": 140 * GIB}


def test_describe_tells_the_driver_versions(nvml):
    versions = describe(b"12345678", devices=()).versions
    assert (versions["nvidia_driver"], versions["cuda"]) == ("570.124.06", "12.8")
    assert nvml.opened == 0


def add_card(sysfs, number, **files):
    device = sysfs / f"class/drm/card{number}/device"
    write(device, vendor="0x1002\n", **files)
    return device


def test_sample_reads_rocm_devices_from_sysfs(tmp_path):
    add_card(tmp_path, 0, unique_id="40c96a3f5e1d2b70\n", gpu_busy_percent="3\n")
    device = add_card(
        tmp_path,
        1,
        unique_id="95d93a1c7b0e4d1\n",
        gpu_busy_percent="55\n",
        mem_info_vram_used="1024\n",
        mem_info_vram_total="4096\n",
    )
    write(device / "hwmon/hwmon3", temp1_input="48000\n", power1_average="239000000\n")
    write(tmp_path / "class/drm/card1-DP-1")
    known, unknown = Sensors(
        (Device("rocm", 0, "MI300X", "GPU-095d93a1c7b0e4d1"), Device("rocm", 1, "MI300X", "", 7)), sysfs=tmp_path
    ).sample()["devices"]
    assert (known["utilization"], known["memory_used_bytes"], known["memory_total_bytes"]) == (0.55, 1024, 4096)
    assert (known["temperature_c"], known["power_w"]) == (48.0, 239.0)
    assert unknown == {**TOLD_NOTHING, "kind": "rocm", "index": 1, "uuid": "", "memory_total_bytes": 7}


def test_sample_takes_the_only_amd_card_for_the_only_rocm_device(tmp_path):
    device = add_card(tmp_path, 0, gpu_busy_percent="9\n")
    write(device / "hwmon/hwmon0", power1_input="120000000\n")
    (use,) = Sensors((Device("rocm", 0, "RX"),), sysfs=tmp_path).sample()["devices"]
    assert (use["utilization"], use["power_w"]) == (0.09, 120.0)


def test_sample_tells_load_and_memory_of_a_host_without_gpus():
    sample = Sensors(()).sample()
    assert 0 <= sample["cpu_percent"] <= 100
    assert len(sample["load"]) == 3
    assert 0 < sample["memory_used_bytes"] < sample["memory_total_bytes"]
    assert sample["devices"] == []
    assert json.loads(json.dumps(sample)) == sample


def test_sample_counts_memory_against_the_container_limit(tmp_path):
    write(tmp_path / "cgroup", memory__max="1000\n", memory__current="900\n", memory__stat="inactive_file 300\n")
    sample = Sensors((), cgroup=cgroup(tmp_path, "0::/\n")).sample()
    assert (sample["memory_used_bytes"], sample["memory_total_bytes"]) == (600, 1000)


def test_sample_is_none_where_the_system_tells_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_percent", refuse)
    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(os, "getloadavg", refuse)
    assert Sensors(()).sample() == {
        "cpu_percent": None,
        "load": None,
        "memory_used_bytes": None,
        "memory_total_bytes": None,
        "devices": [],
    }


def test_sample_is_cheap():
    sensors = Sensors(())
    durations = []
    for _ in range(20):
        start = time.perf_counter()
        sensors.sample()
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.005


def test_describe_names_the_platform():
    assert re.fullmatch(r"\S+ \S+ \S+", describe(b"12345678", devices=()).versions["platform"])
