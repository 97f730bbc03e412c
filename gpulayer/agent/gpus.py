"""The GPUs of this host, found without any ML library, and the environment that shows a process some of them only.

    devices = find_gpus()                        # CUDA through NVML, ROCm through amd-smi or rocm-smi, Metal
    env = visible_devices_env(devices[:1])       # CUDA_VISIBLE_DEVICES and its relatives

A device's `index` is unique among its kind on this host: a whole GPU has the number that `nvidia-smi` (CUDA) or the
runtime (ROCm) gives it; MIG slices are numbered after the whole GPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer.resources import Device

TOOL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One physical GPU and what of it can be leased: itself, or its MIG slices."""

    uuid: str
    devices: tuple[Device, ...]


def find_gpus() -> tuple[Device, ...]:
    """The GPUs that this process may use: CUDA, ROCm and Metal; the `*_VISIBLE_DEVICES` of its environment are honoured.

    May take seconds where ROCm's command line tool has to be asked; an agent calls it once.
    """
    env = os.environ
    cuda = _visible(_cuda_gpus(), env.get("CUDA_VISIBLE_DEVICES"))
    rocm = _visible([_Gpu(device.uuid, (device,)) for device in _rocm_devices()], env.get("ROCR_VISIBLE_DEVICES"))
    # HIP counts among what ROCR leaves, and reads CUDA's variable where its own is not set
    hip = env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES") if not cuda else None)
    rocm = _visible([_Gpu(device.uuid, (device,)) for device in rocm], hip)
    return (*cuda, *rocm, *_metal_devices())


def _visible(gpus: Sequence[_Gpu], text: str | None) -> list[Device]:
    """The devices that a `*_VISIBLE_DEVICES` value leaves, in its order; as in CUDA, an entry that is no device ends the list."""
    if text is None:
        return [device for gpu in gpus for device in gpu.devices]
    chosen: list[Device] = []
    for entry in text.split(","):
        found = _named(gpus, entry.strip())
        if not found:
            break
        chosen += [device for device in found if device not in chosen]
    return chosen


def _named(gpus: Sequence[_Gpu], entry: str) -> tuple[Device, ...]:
    if entry.isdigit():
        return gpus[int(entry)].devices if int(entry) < len(gpus) else ()
    if not entry.upper().startswith(("GPU-", "MIG-")):
        return ()
    named = [(gpu.uuid, gpu.devices) for gpu in gpus]
    named += [(device.uuid, (device,)) for gpu in gpus for device in gpu.devices if device.uuid != gpu.uuid]
    found = [devices for uuid, devices in named if uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else ()  # an abbreviation that fits several names none, as in CUDA


def load_nvml() -> Any | None:
    """The initialised pynvml module; None where there is no NVIDIA driver. Pair with `nvmlShutdown`."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def ask(function: Callable[..., Any], *args: Any) -> Any | None:
    """What a sensor says, or None."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 - however a sensor fails, all it means is that the value is not known
        return None


def _cuda_gpus() -> list[_Gpu]:
    nvml = load_nvml()
    if nvml is None:
        return []
    try:
        count: int = ask(nvml.nvmlDeviceGetCount) or 0
        gpus: list[_Gpu] = []
        slices = count
        for index in range(count):
            gpu = ask(_cuda_gpu, nvml, index, slices) or _Gpu("", ())  # one that fell off the bus keeps its number
            slices += sum(device.index >= count for device in gpu.devices)
            gpus.append(gpu)
        return gpus
    finally:
        ask(nvml.nvmlShutdown)


def _cuda_gpu(nvml: Any, index: int, first_slice: int) -> _Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    mode = ask(nvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return _Gpu(uuid, (_cuda_device(nvml, handle, index),))
    places = range(ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    handles = [ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in places]
    found = [slice_handle for slice_handle in handles if slice_handle is not None]
    return _Gpu(uuid, tuple(_cuda_device(nvml, slice_handle, first_slice + i) for i, slice_handle in enumerate(found)))


def _cuda_device(nvml: Any, handle: Any, index: int) -> Device:
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    name = str(ask(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU")
    return Device("cuda", index, name, str(nvml.nvmlDeviceGetUUID(handle)), int(memory.total) if memory else 0)


def _rocm_devices() -> tuple[Device, ...]:
    static = tool_output("amd-smi", "static", "--json")
    if static:
        return parse_amd_smi(tool_output("amd-smi", "list", "--json") or "", static)
    return parse_rocm_smi(tool_output("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json") or "")


def parse_amd_smi(list_text: str, static_text: str) -> tuple[Device, ...]:
    """The devices in what `amd-smi list --json` and `amd-smi static --json` print. Text that is not theirs has none.

    The runtime numbers GPUs by kernel node, amd-smi by bus address: where the list tells the nodes, `index` is the runtime's.
    """
    listed = {row.get("gpu"): row for row in _rows(list_text)}
    found: list[tuple[int, str, str, int]] = []
    for position, row in enumerate(_rows(static_text)):
        number = row.get("gpu")
        node = listed.get(number, {}).get("node_id")
        order = next((n for n in (node, number) if isinstance(n, int)), position)
        asic, vram = _inner(row, "asic"), _inner(row, "vram")
        found.append((order, str(asic.get("market_name") or "AMD GPU"), rocm_uuid(asic.get("asic_serial")), _size_bytes(vram)))
    return _rocm_in_order(found)


def parse_rocm_smi(text: str) -> tuple[Device, ...]:
    """The devices in what `rocm-smi --showproductname --showmeminfo vram --showuniqueid --json` prints."""
    document = _json(text)
    found: list[tuple[int, str, str, int]] = []
    for card, row in document.items() if isinstance(document, dict) else ():
        match = re.fullmatch(r"card(\d+)", str(card))
        if match and isinstance(row, dict):
            keys = {str(key).lower(): str(value) for key, value in row.items()}  # "Card series" became "Card Series"
            size = keys.get("vram total memory (b)", "")
            name = keys.get("card series", "AMD GPU")
            found.append((int(match[1]), name, rocm_uuid(keys.get("unique id")), int(size) if size.isdigit() else 0))
    return _rocm_in_order(found)


def _rocm_in_order(found: list[tuple[int, str, str, int]]) -> tuple[Device, ...]:
    uuids = [uuid for _, _, uuid, _ in found]
    return tuple(
        # the partitions of one chip may share its serial number, which then names none of them
        Device("rocm", index, name, uuid if uuids.count(uuid) == 1 else "", size)
        for index, (_, name, uuid, size) in enumerate(sorted(found, key=lambda item: item[0]))
    )


def rocm_uuid(serial: object) -> str:
    """ROCm's name of a GPU, from the serial number that its tools and sysfs show: `GPU-` and 16 hex digits, or ""."""
    match = re.fullmatch(r"(?:0x)?([0-9a-f]{1,16})", str(serial).strip().lower())
    return f"GPU-{int(match[1], 16):016x}" if match and int(match[1], 16) else ""


def _size_bytes(vram: dict[str, Any]) -> int:
    size = vram.get("size")  # {"value": 196592, "unit": "MB"}, or "196592 MB" from older versions
    text = f"{size.get('value')} {size.get('unit')}" if isinstance(size, dict) else str(size)
    match = re.fullmatch(r"(\d+) ?([KMG]?)B", text.strip().upper())
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]] if match else 0


def _metal_devices() -> tuple[Device, ...]:
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return ()
    size = (tool_output("sysctl", "-n", "hw.memsize") or "").strip()
    name = (tool_output("sysctl", "-n", "machdep.cpu.brand_string") or "").strip() or "Apple GPU"
    return (Device("metal", 0, name, memory_bytes=int(size) if size.isdigit() else 0),)


def visible_devices_env(devices: Sequence[Device]) -> dict[str, str]:
    """The environment in which a process sees these devices and no other GPU of this host. Names them by UUID where known."""
    cuda = [device for device in devices if device.kind == "cuda"]
    rocm = [device for device in devices if device.kind == "rocm"]
    # HIP counts among what ROCR leaves, so there the numbers start again at 0
    hip = ",".join(str(i) for i in range(len(rocm)))
    env = {
        # ports of CUDA programs to ROCm read CUDA's variable too, and some refuse one that differs from HIP's
        "CUDA_VISIBLE_DEVICES": _names(cuda) if cuda else hip,
        "HIP_VISIBLE_DEVICES": hip,
        "ROCR_VISIBLE_DEVICES": _names(rocm),
    }
    if any(not device.uuid for device in cuda):
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order that our indices are in; CUDA's own puts the fastest first
    return env


def _names(devices: Sequence[Device]) -> str:
    return ",".join(device.uuid or str(device.index) for device in devices)


# ---- tools


def tool_output(*command: str) -> str | None:
    """What a tool prints; None where it is missing, fails or hangs."""
    path = shutil.which(command[0]) or shutil.which(command[0], path="/opt/rocm/bin:/usr/sbin")
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, stdin=subprocess.DEVNULL, timeout=TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _json(text: str) -> Any:
    """The JSON document in a tool's output, which may print warnings before it; None where there is none."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith(("[", "{")):
            try:
                return json.loads("\n".join(lines[i:]))
            except json.JSONDecodeError:
                continue
    return None


def _rows(text: str) -> list[dict[str, Any]]:
    """One dict per GPU; older versions of amd-smi print the list itself, newer ones put it under `gpu_data`."""
    document = _json(text)
    rows = document.get("gpu_data") if isinstance(document, dict) else document
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _inner(row: dict[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}
