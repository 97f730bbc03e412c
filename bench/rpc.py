"""Calls to one actor on this machine, beside a raw Unix socket that carries the same bytes, measured in the same run.

    python bench/rpc.py [--rounds 5] [--json bench/results/rpc_cpu_DATE.json]

first result    a fresh program: its start, import, connect(), one task, until it prints the result (s)
sync            calls one at a time (calls/s)                  floor: 1 byte there and back over a Unix socket
pipelined       2000 calls at once, then all results (calls/s) floor: 2000 writes of 64 bytes, answered in order
echo            an array there and back (MB/s, both ways)      floor: the same bytes there and back, read into kept memory
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import gpulayer

FIRST = "import gpulayer; gpulayer.connect(); print(gpulayer.get(gpulayer.remote(lambda: 42).remote()), flush=True)"


@gpulayer.remote
class Echo:
    def ping(self):
        return None

    def echo(self, value):
        return value


class Floor:
    """A forked process that sends back what it gets: what the operating system itself costs."""

    def __init__(self):
        self.here, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.here.close()
            kept = bytearray(1 << 20)
            while got := there.recv_into(kept):
                there.sendall(memoryview(kept)[:got])
            os._exit(0)
        there.close()

    def round_trip(self, data, kept, write_bytes):
        sent = got = 0
        self.here.setblocking(False)
        while got < len(data):
            if sent < len(data):
                with contextlib.suppress(BlockingIOError):
                    sent += self.here.send(data[sent : sent + write_bytes])
            with contextlib.suppress(BlockingIOError):
                got += self.here.recv_into(kept[got:])
        self.here.setblocking(True)

    def sync(self, count):
        for _ in range(count):
            self.here.sendall(b"x")
            self.here.recv(1)

    def pipelined(self, count):
        self.round_trip(memoryview(bytes(64 * count)), memoryview(bytearray(64 * count)), 64)

    def echo(self, array):
        data = memoryview(array).cast("B")
        self.round_trip(data, memoryview(self.kept)[: len(data)], 1 << 20)

    kept = bytearray(100 << 20)

    def close(self):
        self.here.close()
        os.waitpid(self.pid, 0)


def seconds(work, *args):
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def first_result():
    with subprocess.Popen([sys.executable, "-c", FIRST], stdout=subprocess.PIPE, cwd=tempfile.gettempdir()) as program:
        start = time.perf_counter()
        assert program.stdout.readline() == b"42\n"
        return time.perf_counter() - start


def one_round(actor, floor):
    small, large = np.ones(1 << 20, "u1"), np.ones(100 << 20, "u1")
    ours = {
        "sync": 500 / seconds(lambda: [gpulayer.get(actor.ping.remote()) for _ in range(500)]),
        "pipelined": 2000 / seconds(lambda: gpulayer.get([actor.ping.remote() for _ in range(2000)])),
        "echo 1 MiB": 20 * 2 * small.nbytes / 1e6 / seconds(lambda: [gpulayer.get(actor.echo.remote(small)) for _ in range(20)]),
        "echo 100 MiB": 2 * large.nbytes / 1e6 / seconds(lambda: gpulayer.get(actor.echo.remote(large))),
    }
    raw = {
        "sync": 500 / seconds(floor.sync, 500),
        "pipelined": 2000 / seconds(floor.pipelined, 2000),
        "echo 1 MiB": 20 * 2 * small.nbytes / 1e6 / seconds(lambda: [floor.echo(small) for _ in range(20)]),
        "echo 100 MiB": 2 * large.nbytes / 1e6 / seconds(floor.echo, large),
    }
    return ours, raw


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(rounds):
    floor = Floor()  # before connect: a fork after it would copy threads' state
    starts = [first_result() for _ in range(rounds)]
    with gpulayer.connect():
        actor = Echo.remote()
        gpulayer.get(actor.ping.remote())
        one_round(actor, floor)  # warm-up
        pairs = [one_round(actor, floor) for _ in range(rounds)]
    floor.close()
    figures = {"first result": {"gpulayer": summary(starts), "unit": "s"}}
    for name in pairs[0][0]:
        figures[name] = {
            "gpulayer": summary([ours[name] for ours, _ in pairs]),
            "floor": summary([raw[name] for _, raw in pairs]),
            "ratio": summary([ours[name] / raw[name] for ours, raw in pairs]),
            "unit": "MB/s" if "echo" in name else "calls/s",
        }
    return figures


def show(figures):
    def cell(figure, digits):
        return f"{figure['median']:.{digits}f} ({figure['min']:.{digits}f}-{figure['max']:.{digits}f})" if figure else "-"

    print(f"{'':14}{'GPUlayer':>28}{'raw socket':>28}{'ratio':>22}  unit")
    for name, row in figures.items():
        digits = 2 if row["unit"] == "s" else 0
        cells = cell(row["gpulayer"], digits), cell(row.get("floor"), digits), cell(row.get("ratio"), 3)
        print(f"{name:14}{cells[0]:>28}{cells[1]:>28}{cells[2]:>22}  {row['unit']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    figures = measure(args.rounds)
    show(figures)
    if args.json:
        about = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "rounds": args.rounds, "cpus": os.cpu_count()}
        versions = {"python": platform.python_version(), "gpulayer": gpulayer.__version__, "machine": platform.machine()}
        with open(args.json, "w") as file:
            json.dump({**about, "versions": versions, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
