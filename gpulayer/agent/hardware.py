"""What this host has, and how busy it is: CPUs, memory, GPUs, what is installed.

    host = describe(host_id, "gpu1", "10.0.0.7:7770")     # once, when the agent starts
    sensors = Sensors(host.devices)
    sensors.sample()                                      # as often as one likes

No ML library is ever imported here: versions come from package metadata.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from gpulayer.agent.gpus import ask, find_gpus, load_nvml, rocm_uuid, tool_output, visible_devices_env
from gpulayer.resources import Device, Host

__all__ = ["Cgroup", "DeviceUse", "Sensors", "available_cpus", "describe", "find_gpus", "visible_devices_env"]

# what is looked up -> the distributions it may come from, the first installed one counts
_PACKAGES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "nccl": tuple(f"nvidia-nccl-cu{major}" for major in (13, 12, 11)),
}
_LIBRARIES = {
    "jax": ("jax",),
    "cupy": (
        "cupy",
        *(f"cupy-cuda{major}x" for major in (14, 13, 12, 11)),
        *(f"cupy-rocm-{v}" for v in ("7-0", "6-0", "5-0", "4-3")),
    ),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-macos"),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime"),
    "transformers": ("transformers",),
    "lightning": ("lightning",),
    "pytorch_lightning": ("pytorch-lightning",),
}


def describe(
    host_id: bytes,
    name: str = "",
    address: str = "",
    *,
    cpus: float | None = None,
    devices: tuple[Device, ...] | None = None,
) -> Host:
    """This host as its agent shows it to others.

    `name` is the hostname when empty; `cpus` and `devices` replace what is found (for several agents on one machine).
    """
    memory_bytes = _memory_total_bytes(Cgroup())
    if devices is None:
        devices = (*find_gpus(), Device("cpu", 0, _cpu_name(), memory_bytes=memory_bytes))
    return Host(
        id=host_id,
        name=name or socket.gethostname(),
        address=address,
        cpus=available_cpus() if cpus is None else cpus,
        memory_bytes=memory_bytes,
        devices=devices,
        versions=_versions(),
        libraries=_installed(_LIBRARIES),
        pid=os.getpid(),
    )


# ---- CPUs and memory


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control groups that this process is in (v1, v2 or both); a container's limits are theirs, not the machine's."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def _folders(self, controller: str) -> Iterator[Path]:
        for line in _read(self.membership).splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            if not controllers:
                base = self.root
            elif controller in controllers.split(","):
                base = self.root / controller if (self.root / controller).exists() else self.root / controllers
            else:
                continue
            folder = base / path.lstrip("/")
            while folder != base:  # every level may set a limit; in a container, only the last may be mounted
                yield folder
                folder = folder.parent
            yield base

    def cpu_quota(self) -> float | None:
        """CPUs' worth of time that the tightest group allows; None where no group limits it."""
        quotas: list[float] = []
        for folder in self._folders("cpu"):
            words = _read(folder / "cpu.max").split() or [
                *_read(folder / "cpu.cfs_quota_us").split(),
                *_read(folder / "cpu.cfs_period_us").split(),
            ]
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))
        return min(quotas, default=None)

    def memory(self) -> tuple[int, int] | None:
        """(limit, used) bytes of the tightest group that has a limit; page cache that can be dropped is not counted as used."""
        groups: list[tuple[int, Path, str, str]] = []
        for folder in self._folders("memory"):
            for limit, used, cache in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                text = _read(folder / limit).strip()
                if text.isdigit():
                    groups.append((int(text), folder, used, cache))
        if not groups:
            return None
        limit_bytes, folder, used, cache = min(groups)
        used_bytes = int(_read(folder / used).strip() or 0)
        match = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        return limit_bytes, max(0, used_bytes - (int(match[1]) if match else 0))


def available_cpus(cgroup: Cgroup | None = None) -> float:
    """CPUs that this process may use: its affinity, or the cgroup quota when that is lower, and never less than 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (cgroup or Cgroup()).cpu_quota()
    # a call asks for one CPU unless told otherwise: on a host with half a CPU it shall be slow, not impossible
    return max(1.0, min(float(affinity), quota or float(affinity)))


def _memory_total_bytes(cgroup: Cgroup) -> int:
    group = cgroup.memory()
    total = psutil.virtual_memory().total
    return min(total, group[0]) if group else total


def _memory_use(cgroup: Cgroup) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    group = cgroup.memory()
    if group and group[0] < memory.total:
        return group[1], group[0]
    return memory.total - memory.available, memory.total


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        return (tool_output("sysctl", "-n", "machdep.cpu.brand_string") or "").strip() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.machine() or "CPU"


# ---- how busy it is


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """How busy one GPU is; None is what the hardware does not tell. `utilization` is 0 to 1, `processes` the host's pids."""

    kind: str
    index: int
    uuid: str
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    processes: tuple[int, ...] = ()


class Sensors:
    """Reads this host's load; keeps NVML open between samples. Not for several threads at once."""

    def __init__(
        self, devices: Sequence[Device] | None = None, *, cgroup: Cgroup | None = None, sysfs: Path = Path("/sys")
    ) -> None:
        self._gpus = [device for device in (find_gpus() if devices is None else devices) if device.is_gpu]
        self._cgroup = cgroup or Cgroup()
        self._nvml = load_nvml() if any(device.kind == "cuda" for device in self._gpus) else None
        self._handles: dict[str, Any] = {}
        self._cards = _amd_cards(sysfs) if any(device.kind == "rocm" for device in self._gpus) else {}
        ask(psutil.cpu_percent)  # what later calls measure from

    def sample(self) -> dict[str, Any]:
        """Now: `cpu_percent` (since the last sample), `load` (1, 5, 15 minutes), `memory_used_bytes`, `memory_total_bytes`
        and `devices`, one dict like `DeviceUse` per GPU. None is what cannot be read; never raises for that.
        """
        load = ask(os.getloadavg)
        used, total = ask(_memory_use, self._cgroup) or (None, None)
        return {
            "cpu_percent": ask(psutil.cpu_percent),
            "load": list(load) if load else None,
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "devices": [asdict(self._use(device)) for device in self._gpus],
        }

    def close(self) -> None:
        """Let NVML go; samples go on without it."""
        if self._nvml is not None:
            ask(self._nvml.nvmlShutdown)
        self._nvml = None

    def _use(self, device: Device) -> DeviceUse:
        if device.kind == "cuda" and self._nvml is not None:
            return self._cuda_use(self._nvml, device)
        if device.kind == "rocm":
            return self._rocm_use(device)
        return DeviceUse(device.kind, device.index, device.uuid, memory_total_bytes=device.memory_bytes or None)

    def _cuda_use(self, nvml: Any, device: Device) -> DeviceUse:
        key = device.uuid or str(device.index)
        if self._handles.get(key) is None:
            by_uuid = (nvml.nvmlDeviceGetHandleByUUID, device.uuid)
            self._handles[key] = ask(*(by_uuid if device.uuid else (nvml.nvmlDeviceGetHandleByIndex, device.index)))
        handle = self._handles[key]
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        return DeviceUse(
            device.kind,
            device.index,
            device.uuid,
            utilization=rates.gpu / 100 if rates else None,
            memory_used_bytes=int(memory.used) if memory else None,
            memory_total_bytes=int(memory.total) if memory else device.memory_bytes or None,
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            processes=tuple(int(process.pid) for process in processes),
        )

    def _rocm_use(self, device: Device) -> DeviceUse:
        """From sysfs: amd-smi would take a process and half a second for each sample."""
        card = self._cards.get(device.uuid)
        if card is None and len(self._cards) == 1 and sum(gpu.kind == "rocm" for gpu in self._gpus) == 1:
            card = next(iter(self._cards.values()))
        busy = _sysfs_number(card, "gpu_busy_percent", 100)
        used = _sysfs_number(card, "mem_info_vram_used")
        total = _sysfs_number(card, "mem_info_vram_total")
        power = _sysfs_number(card, "hwmon/hwmon*/power1_average", 1e6)
        return DeviceUse(
            device.kind,
            device.index,
            device.uuid,
            utilization=busy,
            memory_used_bytes=None if used is None else int(used),
            memory_total_bytes=int(total) if total else device.memory_bytes or None,
            temperature_c=_sysfs_number(card, "hwmon/hwmon*/temp1_input", 1e3),
            power_w=_sysfs_number(card, "hwmon/hwmon*/power1_input", 1e6) if power is None else power,
        )


def _amd_cards(sysfs: Path) -> dict[str, Path]:
    """UUID (or the path where there is none) -> the sysfs folder of each AMD GPU."""
    folders = [card / "device" for card in sorted(sysfs.glob("class/drm/card*")) if re.fullmatch(r"card\d+", card.name)]
    amd = [folder for folder in folders if _read(folder / "vendor").strip() == "0x1002"]
    return {rocm_uuid(_read(folder / "unique_id")) or str(folder): folder for folder in amd}


def _sysfs_number(folder: Path | None, pattern: str, divisor: float = 1) -> float | None:
    for path in sorted(folder.glob(pattern)) if folder else ():
        text = _read(path).strip()
        if text.lstrip("-").isdigit():
            return int(text) / divisor
    return None


# ---- what is installed


def _versions() -> dict[str, str]:
    system = platform.uname()
    ours = getattr(sys.modules.get("gpulayer"), "__version__", None) or _installed({"gpulayer": ("gpulayer",)}).get("gpulayer")
    rocm = _read(Path("/opt/rocm/.info/version")).strip().partition("-")[0]
    return {
        "python": platform.python_version(),
        "gpulayer": ours or "unknown",
        **_installed(_PACKAGES),
        **_driver_versions(),
        **({"rocm": rocm} if rocm else {}),
        "platform": f"{system.system} {system.release} {system.machine}",
    }


def _driver_versions() -> dict[str, str]:
    nvml = load_nvml()
    if nvml is None:
        return {}
    driver, cuda = ask(nvml.nvmlSystemGetDriverVersion), ask(nvml.nvmlSystemGetCudaDriverVersion)
    ask(nvml.nvmlShutdown)
    found = {"nvidia_driver": driver, "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None}
    return {key: str(value) for key, value in found.items() if value}


def _installed(candidates: dict[str, tuple[str, ...]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, names in candidates.items():
        versions = (ask(metadata.version, name) for name in names)
        version = next((version for version in versions if version), None)
        if version:
            found[key] = str(version)
    return found


def _read(path: Path) -> str:
    """A file's text; "" where it is missing or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
