from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from gpulayer.cli.frame import COMPACT_FROM_HOSTS, MAX_ROWS, render

GIB = 2**30


def gpu(index=0, **changes):
    return {
        "kind": "cuda",
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}",
        "memory_bytes": 139 * GIB,
        "utilization": 0.91,
        "memory_used_bytes": 70 * GIB,
        "temperature_c": 54,
        "power_w": 610.4,
        "leased_by": ["rank 0"],
        **changes,
    }


def worker(pid=1234, **changes):
    return {
        "pid": pid,
        "label": "Counter",
        "kind": "actor",
        "status": "busy",
        "what": "add",
        "busy_s": 321.0,
        "calls": 17,
        "cpus": 1.0,
        "gpus": 0.5,
        "devices": [1],
        "memory_bytes": 300 * 2**20,
        "driver": "me@laptop:991",
        **changes,
    }


def training(**changes):
    return {
        "id": "7f3a",
        "name": "resnet",
        "step": 1200,
        "max_steps": 5000,
        "epoch": 3,
        "loss": 0.123456,
        "samples_s": 12345.6,
        "ranks": 2,
        "state": "running",
        "driver": "me@laptop:991",
        "started_s": 1_000_000_000.0 - 700,
        **changes,
    }


def host(name="gpu1", **changes):
    return {
        "name": name,
        "address": "10.0.0.7:7770",
        "id": "ab",
        "status": "up",
        "error": None,
        "cpus": 16.0,
        "cpus_free": 3.5,
        "memory_bytes": 128 * GIB,
        "memory_used_bytes": 32 * GIB,
        "cpu_percent": 73.0,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "libraries": {},
        "uptime_s": 11234.0,
        "devices": [gpu()],
        "workers": [worker()],
        "runs": [],
        **changes,
    }


def lost(name="gpu2"):
    return {"name": name, "address": "10.0.0.8:7770", "id": "cd", "status": "lost", "error": "no word\nfor 15 s"}


def draw(*hosts, width=130, height=None, time=1_000_000_000.0):
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(render({"time": time, "hosts": list(hosts)}, width, height=height))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def row(lines, start):
    return next(line for line in lines if line.lstrip().startswith(start))


def words(line):
    return " ".join(line.split())


def test_headline_sums_over_hosts_that_are_up():
    lines = draw(host(), host("gpu3", workers=[], devices=[gpu(utilization=0.11)]), lost())
    assert "2/3 hosts up" in lines[0]
    assert "2 GPUs at 51%" in lines[0]
    assert "1/1 workers busy" in lines[0]
    assert "7/32 CPUs free" in lines[0]


def test_host_shows_its_load():
    lines = draw(host())
    assert row(lines, "gpu1") == "gpu1  10.0.0.7:7770  up for 3h07m   python 3.11.7  torch 2.13.0"
    assert row(lines, "CPU") == "CPU [|||||||   ]  73%  3.5 of 16 free   MEM [||        ]  25%  32.0/128 GiB"


def test_device_shows_load_memory_and_lease():
    line = row(draw(host()), "0 ")
    assert words(line) == "0 NVIDIA H200 [||||||||| ] 91% [||||| ] 50% 70.0/139 GiB 54 C 610 W rank 0"


def test_device_shows_a_dash_for_what_the_hardware_does_not_tell():
    silent = dict.fromkeys(("utilization", "memory_used_bytes", "temperature_c", "power_w"))
    line = row(draw(host(devices=[gpu(**silent, leased_by=[])])), "0 ")
    assert words(line) == "0 NVIDIA H200 [ ] - [ ] - -/139 GiB - - -"


def test_cpu_devices_are_not_listed_among_gpus():
    lines = draw(host(devices=[gpu(kind="cpu", name="Xeon")]))
    assert "0 GPUs" in lines[0]
    assert not any("Xeon" in line for line in lines)


def test_worker_shows_what_it_does():
    lines = draw(host(workers=[worker(), worker(1235, status="idle", what="", gpus=0, devices=[])]))
    assert words(row(lines, "1234")) == "1234 Counter actor busy add 5m21s 17 1 1 (50%) 300 MiB me@laptop:991"
    assert words(row(lines, "1235")) == "1235 Counter actor idle - - 17 1 - 300 MiB me@laptop:991"


def test_busy_workers_come_first_and_many_are_counted():
    idle = [worker(100 + i, status="idle") for i in range(MAX_ROWS + 4)]
    lines = draw(host(workers=[*idle, worker(999)]))
    pids = [line.split()[0] for line in lines if "Counter" in line]
    assert pids[0] == "999"
    assert len(pids) == MAX_ROWS
    assert "and 5 more workers" in lines


def test_run_shows_its_progress_once_for_all_its_hosts():
    lines = draw(host(runs=[training()]), host("gpu3", runs=[training()]))
    shown = [line for line in lines if "resnet" in line]
    assert [words(line) for line in shown] == ["7f3a resnet running 3 1200/5000 0.1235 12,346 2 11m40s me@laptop:991"]
    assert "1 run" in lines[0]


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (None, "-"), (1234567.0, "1.235e+06")])
def test_run_shows_a_loss_that_is_no_number(loss, shown):
    assert row(draw(host(runs=[training(loss=loss, max_steps=None)])), "7f3a").split()[4:6] == ["1200", shown]


def test_lost_host_shows_why():
    assert row(draw(lost()), "gpu2") == "gpu2  10.0.0.8:7770  lost  no word for 15 s"


def test_lost_host_error_is_shown_in_full_when_it_is_long():
    lines = draw({**lost(), "error": "word " * 60}, width=80)
    assert sum(line.count("word") for line in lines) == 60


def test_labels_are_shown_to_the_letter():
    label = "[red]x[/red] :smile: \x1b[31m\n\u200b"
    text = "\n".join(draw(host(name=label, workers=[worker(label=label)], devices=[gpu(leased_by=[label])]), width=250))
    assert text.count("[red]x[/red] :smile: \\x1b[31m\\n\\u200b") == 3
    assert "\x1b" not in text


def test_every_row_keeps_to_one_line_and_to_the_width():
    long = "x" * 300
    hosts = [host(name=long, workers=[worker(label=long, driver=long)], runs=[training(name=long)], devices=[gpu(name=long)])]
    for width in (40, 80, 110, 130):
        lines = draw(*hosts, width=width)
        assert len(lines) == len(draw(host(runs=[training()]), width=width))
        assert max(len(line) for line in lines) <= width


def test_narrow_frame_leaves_out_what_is_least_asked_for():
    lines = draw(host(runs=[training()]), width=80)
    assert not any("me@laptop" in line for line in lines)
    assert words(row(lines, "1234")) == "1234 Counter busy add 5m21s 17 1 1 (50%) 300 MiB"
    assert row(lines, "resnet").split()[-1] == "11m40s"


def test_many_hosts_get_one_line_each():
    hosts = [host(f"gpu{i:02}", runs=[training()]) for i in range(63)] + [lost()]
    lines = draw(*hosts)
    shown = [line for line in lines if line.startswith("gpu") and not line.startswith("gpulayer")]
    assert len(shown) == 64
    assert len(lines) == 64 + 6
    expected = "gpu00 10.0.0.7:7770 up [||||||| ] 73% 3.5/16 32.0/128 GiB 1 x 91% 70.0/139 GiB 1/1 resnet"
    assert words(shown[0]) == expected
    assert words(shown[-1]) == "gpu2 10.0.0.8:7770 lost no word for 15 s"


@pytest.mark.parametrize("height", [12, 24, 50])
@pytest.mark.parametrize("runs", [[], [training()]])
def test_hosts_that_do_not_fit_are_counted_and_lost_ones_come_first(height, runs):
    lines = draw(*(host(f"gpu{i:02}", runs=runs) for i in range(63)), lost(), height=height)
    shown = [line.split()[0] for line in lines if line.startswith("gpu") and not line.startswith("gpulayer")]
    assert len(lines) == height
    assert shown[0] == "gpu2"
    assert lines[-1].startswith(f"and {64 - len(shown)} more hosts")


def test_hosts_are_not_cut_when_they_just_fit():
    hosts = [host(f"gpu{i}") for i in range(COMPACT_FROM_HOSTS)]
    assert len(draw(*hosts, height=COMPACT_FROM_HOSTS + 3)) == COMPACT_FROM_HOSTS + 3
    assert not any("more hosts" in line for line in draw(*hosts, height=COMPACT_FROM_HOSTS + 3))


def test_frame_is_drawn_when_there_is_nothing_to_show():
    assert "0/0 hosts up" in draw()[0]
    assert row(draw({"name": "a", "status": "up"}), "a ").startswith("a  (local)  up for -")


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 * 2**20, "300 MiB"), (3 * GIB, "3.0 GiB"), (None, "-")],
)
def test_sizes_are_shown_in_a_unit_that_fits(size, shown):
    line = row(draw(host(workers=[worker(memory_bytes=size)])), "1234")
    assert f"  {shown}  me@laptop" in line


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (180_000, "2d02h"), (None, "-")],
)
def test_durations_are_shown_in_units_that_fit(seconds, shown):
    assert f"up for {shown} " in row(draw(host(uptime_s=seconds)), "gpu1")
