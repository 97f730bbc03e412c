"""What `gpulayer top` draws: one frame from one snapshot, and nothing but that.

    console.print(render(snapshot, console.width))

rich is imported inside functions: the start of every other verb would pay for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

Plain = dict[str, Any]

COMPACT_FROM_HOSTS = 7  # so many hosts and more get one line each
MAX_ROWS = 20  # workers per host, and runs; the busy ones come first
NARROW_COLUMNS = 110  # on less, what is least asked for is left out
_RIGHT = {"PID", "CALLS", "CPUS", "MEM", "STEP", "EPOCH", "LOSS", "SAMPLES/S", "TEMP", "POWER", "FREE", "FOR", "RANKS"}
_LONG = {"NAME", "LEASED BY", "WORKER", "DOES", "DRIVER", "RUN", "NOTE"}  # columns that give way when there is no room
_STYLES = {"up": "green", "lost": "bold red", "busy": "green", "starting": "yellow", "running": "green", "failed": "bold red"}


def render(snapshot: Plain, width: int | None = None, *, height: int | None = None) -> RenderableType:
    """One frame: a headline, the runs, and the hosts, one line each when they are many.

    `width` and `height` are the columns and lines to fit into; hosts that do not fit are counted, lost ones come first.
    """
    hosts: list[Plain] = list(snapshot.get("hosts") or ())
    now = float(snapshot.get("time") or 0)
    narrow = width is not None and width < NARROW_COLUMNS
    runs = _runs(hosts)
    parts: list[RenderableType] = [_headline(hosts, runs, now, narrow=narrow, live=height is not None)]
    if runs:
        parts += ["", *_limited([_run_row(item, now) for item in runs], "runs", {"ID", "DRIVER"} if narrow else ())]
    if len(hosts) >= COMPACT_FROM_HOSTS:
        above = 1 + (min(len(runs), MAX_ROWS) + 2 + (len(runs) > MAX_ROWS) if runs else 0)
        parts += ["", *_compact(hosts, len(hosts) if height is None else height - above - 2, narrow)]
    else:
        for host in hosts:
            parts += ["", *_detailed(host, narrow)]
    return stack(parts, width)


def _headline(hosts: Sequence[Plain], runs: Sequence[Plain], now: float, *, narrow: bool, live: bool) -> Text:
    up = [host for host in hosts if host.get("status") == "up"]
    gpus, workers = _each(up, "gpus"), _each(up, "workers")
    busy = sum(worker.get("status") == "busy" for worker in workers)
    facts = [
        time.strftime("%H:%M:%S", time.localtime(now)),
        *(["q quits"] if live else []),
        f"{len(up)}/{len(hosts)} hosts up",
        _count(len(gpus), "GPU") + (f" at {_percent(_mean(gpus, 'utilization'))}" if gpus else ""),
        f"{busy}/{len(workers)} workers busy",
        _count(sum(item.get("state") == "running" for item in runs), "run"),
        *([] if narrow else [f"{_total(up, 'cpus_free'):g}/{_total(up, 'cpus'):g} CPUs free"]),
    ]
    return plain_text("   ".join(facts if narrow else ["gpulayer top", *facts]), "bold")


def _compact(hosts: Sequence[Plain], room: int, narrow: bool) -> list[RenderableType]:
    shown, more = list(hosts), []
    if len(hosts) > max(room, 1):
        shown = sorted(hosts, key=lambda host: host.get("status") == "up")[: max(room - 1, 1)]
        more = [
            plain_text(
                f"and {len(hosts) - len(shown)} more hosts; a taller window, or `gpulayer top HOST ...`, shows them", "dim"
            )
        ]
    return [_grid([_compact_row(host) for host in shown], {"ADDRESS", "FREE", "MEMORY"} if narrow else ()), *more]


def _compact_row(host: Plain) -> dict[str, Text]:
    row = {
        "HOST": plain_text(host.get("name")),
        "ADDRESS": plain_text(host.get("address")),
        "STATUS": _status(host.get("status")),
    }
    if host.get("status") != "up":
        empty = plain_text("")
        return {**row, **dict.fromkeys(("CPU", "FREE", "MEMORY", "GPU", "GPU MEMORY", "WORKERS"), empty), "NOTE": _error(host)}
    gpus, workers = _each([host], "gpus"), _each([host], "workers")
    busy = sum(worker.get("status") == "busy" for worker in workers)
    running = [str(item.get("name")) for item in host.get("runs") or () if item.get("state") == "running"]
    return {
        **row,
        "CPU": _bar(_share(host.get("cpu_percent"), 100)),
        "FREE": plain_text(f"{_number(host.get('cpus_free'))}/{_number(host.get('cpus'))}"),
        "MEMORY": plain_text(_used(host.get("memory_used_bytes"), host.get("memory_bytes"))),
        "GPU": plain_text(f"{len(gpus)} x {_percent(_mean(gpus, 'utilization'))}" if gpus else "-"),
        "GPU MEMORY": plain_text(_used(_total(gpus, "memory_used_bytes"), _total(gpus, "memory_bytes")) if gpus else "-"),
        "WORKERS": plain_text(f"{busy}/{len(workers)}"),
        "NOTE": plain_text(", ".join(running)),
    }


def _detailed(host: Plain, narrow: bool) -> list[RenderableType]:
    title = plain_text("").append_text(plain_text(host.get("name"), "bold"))
    title.append_text(plain_text(f"  {host.get('address') or '(local)'}  ")).append_text(_status(host.get("status")))
    if host.get("status") != "up":
        title.no_wrap, title.overflow = False, "fold"  # why it is lost is worth more than one line
        return [title.append("  ").append_text(_error(host))]
    facts = [f"{name} {host['versions'][name]}" for name in ("python", "torch") if name in (host.get("versions") or {})]
    title.append_text(plain_text(f" for {_duration(host.get('uptime_s'))}   {'  '.join(facts)}", "dim"))
    load = plain_text("CPU ").append_text(_bar(_share(host.get("cpu_percent"), 100)))
    load.append_text(plain_text(f"  {_number(host.get('cpus_free'))} of {_number(host.get('cpus'))} free   MEM "))
    load.append_text(_bar(_share(host.get("memory_used_bytes"), host.get("memory_bytes"))))
    load.append_text(plain_text("  " + _used(host.get("memory_used_bytes"), host.get("memory_bytes"))))
    parts: list[RenderableType] = [title, load]
    gpus = _each([host], "gpus")
    if gpus:
        parts.append(_grid([_gpu_row(gpu, narrow) for gpu in gpus], {"POWER"} if narrow else ()))
    workers = sorted(host.get("workers") or (), key=lambda worker: (worker.get("status") == "idle", -(worker.get("busy_s") or 0)))
    if workers:
        parts += _limited([_worker_row(worker) for worker in workers], "workers", {"DRIVER", "KIND"} if narrow else ())
    return parts


def _gpu_row(gpu: Plain, narrow: bool) -> dict[str, Text]:
    temperature, power = _number(gpu.get("temperature_c"), ".0f"), _number(gpu.get("power_w"), ".0f")
    memory = plain_text(_used(gpu.get("memory_used_bytes"), gpu.get("memory_bytes")))
    if not narrow:
        memory = _bar(_share(gpu.get("memory_used_bytes"), gpu.get("memory_bytes"))).append("  ").append_text(memory)
    return {
        "GPU": plain_text(gpu.get("index")),
        "NAME": plain_text(gpu.get("name")),
        "LOAD": _bar(gpu.get("utilization")),
        "MEMORY": memory,
        "TEMP": plain_text(temperature if temperature == "-" else f"{temperature} C"),
        "POWER": plain_text(power if power == "-" else f"{power} W"),
        "LEASED BY": plain_text(", ".join(str(label) for label in gpu.get("leased_by") or ()) or "-"),
    }


def _worker_row(worker: Plain) -> dict[str, Text]:
    share, devices = worker.get("gpus") or 0, ",".join(str(index) for index in worker.get("devices") or ())
    return {
        "PID": plain_text(worker.get("pid")),
        "WORKER": plain_text(worker.get("label")),
        "KIND": plain_text(worker.get("kind")),
        "STATUS": _status(worker.get("status")),
        "DOES": plain_text(worker.get("what") or "-"),
        "FOR": plain_text(_duration(worker.get("busy_s")) if worker.get("status") == "busy" else "-"),
        "CALLS": plain_text(_number(worker.get("calls"))),
        "CPUS": plain_text(_number(worker.get("cpus"))),
        "GPUS": plain_text((f"{devices} ({_percent(share)})" if 0 < share < 1 else devices) or "-"),
        "MEM": plain_text(_size(worker.get("memory_bytes"))),
        "DRIVER": plain_text(worker.get("driver") or "-"),
    }


def _runs(hosts: Sequence[Plain]) -> list[Plain]:
    """Every run once, whichever hosts it spans; the running ones first."""
    runs: dict[Any, Plain] = {}
    for item in _each(hosts, "runs"):
        runs.setdefault(item.get("id"), item)
    return sorted(runs.values(), key=lambda item: item.get("state") != "running")


def _run_row(item: Plain, now: float) -> dict[str, Text]:
    step, most, started = _number(item.get("step")), item.get("max_steps"), item.get("started_s")
    loss = item.get("loss")
    return {
        "ID": plain_text(item.get("id")),
        "RUN": plain_text(item.get("name")),
        "STATE": _status(item.get("state")),
        "EPOCH": plain_text(_number(item.get("epoch"))),
        "STEP": plain_text(f"{step}/{most}" if most else step),
        "LOSS": plain_text(_number(loss, ".4g"), "bold red" if isinstance(loss, float) and not math.isfinite(loss) else ""),
        "SAMPLES/S": plain_text(_number(item.get("samples_s"), ",.0f")),
        "RANKS": plain_text(_number(item.get("ranks"))),
        "FOR": plain_text(_duration(now - started) if started else "-"),
        "DRIVER": plain_text(item.get("driver") or "-"),
    }


# ---- pieces of a frame


def plain_text(value: Any, style: str = "") -> Text:
    """`value` to the letter, on one line: neither markup nor escape codes in a user's label reach the terminal."""
    from rich.text import Text

    text = "-" if value is None else str(value)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text(shown, style, no_wrap=True, overflow="ellipsis")


def _status(value: Any) -> Text:
    return plain_text(value, _STYLES.get(str(value), ""))


def _error(host: Plain) -> Text:
    return plain_text(" ".join(str(host.get("error") or "no reason given").split()), "red")


def _bar(share: float | None, width: int = 10) -> Text:
    known = share is not None and math.isfinite(share)
    full = round(min(max(share or 0, 0), 1) * width) if known else 0
    text = plain_text("[").append_text(plain_text("|" * full, "cyan"))
    return text.append_text(plain_text(f"{' ' * (width - full)}] {_percent(share):>4}"))


def _grid(rows: Sequence[dict[str, Text]], hidden: Collection[str] = ()) -> Table:
    """Rows of the same keys, which are the columns' names, without lines around them; no row takes two lines."""
    from rich.table import Table

    columns = [name for name in rows[0] if name not in hidden]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name not in _LONG)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _limited(rows: Sequence[dict[str, Text]], what: str, hidden: Collection[str]) -> list[RenderableType]:
    more = [plain_text(f"and {len(rows) - MAX_ROWS} more {what}", "dim")] if len(rows) > MAX_ROWS else []
    return [_grid(rows[:MAX_ROWS], hidden), *more]


def stack(parts: Sequence[RenderableType], width: int | None = None) -> RenderableType:
    """Parts below one another, as wide as `width` columns."""
    from rich.console import Group
    from rich.constrain import Constrain

    return Constrain(Group(*parts), width)


# ---- numbers


def _each(hosts: Sequence[Plain], what: str) -> list[Plain]:
    """All workers, runs or gpus of these hosts."""
    if what == "gpus":
        return [device for device in _each(hosts, "devices") if device.get("kind") != "cpu"]
    return [item for host in hosts for item in host.get(what) or ()]


def _total(items: Sequence[Plain], key: str) -> float:
    return sum(item.get(key) or 0 for item in items)


def _mean(items: Sequence[Plain], key: str) -> float | None:
    known = [item[key] for item in items if item.get(key) is not None]
    return sum(known) / len(known) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _number(value: float | None, form: str = "g") -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) and form == "g" else format(value, form)


def _percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _size(size_bytes: float | None, unit: str | None = None) -> str:
    """1610612736 -> "1.5 GiB"; with `unit`, in that unit and without its name."""
    if size_bytes is None:
        return "-"
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(int(size_bytes).bit_length() - 1, 0) // 10, len(units) - 1) if unit is None else units.index(unit)
    value = size_bytes / 2 ** (10 * power)
    text = f"{value:.0f}" if power == 0 or value >= 100 else f"{value:.1f}"
    return text if unit else f"{text} {units[power]}"


def _used(used_bytes: float | None, total_bytes: float | None) -> str:
    """Both in the unit of the total: "12.0/139 GiB"."""
    if not total_bytes:
        return _size(used_bytes)
    total = _size(total_bytes)
    return f"{_size(used_bytes, total.split()[1])}/{total}"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, int(seconds))
    for limit, size, unit, below, divisor in ((60, 1, "s", "", 1), (3600, 60, "m", "s", 1), (172800, 3600, "h", "m", 60)):
        if whole < limit:
            return f"{whole // size}{unit}" + (f"{whole % size // divisor:02d}{below}" if below else "")
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
