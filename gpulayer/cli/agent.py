"""`gpulayer up`, `down` and `status`: the agent of this machine."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from gpulayer.config import Settings
from gpulayer.errors import ConnectError, GPUlayerError, UsageError
from gpulayer.resources import DEFAULT_PORT

if TYPE_CHECKING:
    from gpulayer.runtime.records import Record

_START_S = 30.0
_STOP_S = 15.0


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the three verbs."""
    up = verbs.add_parser("up", help="run this machine's agent", description="Run this machine's agent, in the foreground.")
    up.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: this machine only)")
    up.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"the one TCP port (default {DEFAULT_PORT}; 0: any free one)")
    up.add_argument("--name", default="", help="what this host is called (default: its hostname)")
    up.add_argument("--zone", default="", help="a name for the set of hosts that are close to this one")
    up.add_argument("--cpus", type=float, help="how many CPUs to offer (default: all)")
    up.add_argument("--detach", action="store_true", help="run in the background; `gpulayer down` ends it")
    up.set_defaults(run=run_up)
    down = verbs.add_parser("down", help="end this machine's agent and all that it runs")
    down.add_argument("--port", type=int, help="which one, if several run")
    down.set_defaults(run=run_down)
    status = verbs.add_parser("status", help="list agents in reach, with what they have")
    status.add_argument("hosts", nargs="*", metavar="HOST")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=run_status)


def run_up(args: argparse.Namespace) -> int:
    """Start an agent."""
    settings = Settings.from_environment()
    taken = next((record for record in _running(settings) if args.port and record.port == args.port), None)
    if taken is not None:
        raise ConnectError(
            f"an agent runs already on port {args.port} (pid {taken.pid}); end it with: gpulayer down --port {args.port}"
        )
    command = [sys.executable, "-m", "gpulayer.agent", "--bind", args.bind, "--port", str(args.port)]
    command += ["--name", args.name, "--zone", args.zone, "--preload", "torch"]
    if args.cpus is not None:
        if not 0 < args.cpus < float("inf"):
            raise UsageError(f"--cpus {args.cpus:g} is not a number of CPUs to offer; leave it out to offer all")
        command += ["--cpus", str(args.cpus)]
    if args.detach:
        return _detach(settings, command)
    from gpulayer.runtime.connect import agent_environment

    env = agent_environment(settings, log_level="info")
    os.execve(sys.executable, command, env)  # noqa: S606 - this process becomes the agent
    return 0


def _detach(settings: Settings, command: list[str]) -> int:
    from gpulayer.runtime.connect import agent_environment

    folder = settings.private_dir(settings.runtime_dir)
    log_path = folder / "agent.log"
    env = agent_environment(settings, log_level="info")
    with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab") as log:
        before_bytes = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
        )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], _START_S)[0]:
        process.kill()
        raise ConnectError(f"the agent did not start within {_START_S:g} s  (log: {log_path})")
    line = process.stdout.readline()  # the agent prints one line when it is ready, and closes the pipe when it ends
    if not line:
        said = log_path.read_bytes()[before_bytes:].decode(errors="replace").rpartition("gpulayer: ")[2].strip()
        raise ConnectError(
            f"the agent did not start (exit code {process.wait()}): {said or 'it said nothing'}\n(log: {log_path})"
        )
    ready = json.loads(line)
    print(f"agent running: pid {ready['pid']}, port {ready['port']}, log {log_path}; end it with: gpulayer down")
    return 0


def run_down(args: argparse.Namespace) -> int:
    """End the agent of this machine."""
    from gpulayer.runtime.snapshot import shut_down

    found = [record for record in _running(Settings.from_environment()) if args.port in (None, record.port)]
    if not found:
        print("no agent runs on this machine" + (f" on port {args.port}" if args.port else ""))
        return 0
    if len(found) > 1:
        ports = ", ".join(str(record.port) for record in found)
        raise GPUlayerError(f"several agents run on this machine, on ports {ports}; say which one: gpulayer down --port PORT")
    pid = shut_down(found[0])
    _wait_gone(found[0])
    print(f"agent ended: pid {pid}, port {found[0].port}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """List agents."""
    from gpulayer.runtime.snapshot import collect

    snapshot = collect(args.hosts)
    if args.json:
        print(json.dumps(snapshot, indent=2))
        return 0
    for host in snapshot["hosts"]:
        if host["status"] != "up":
            print(f"{host['name']}  {host['status']}: {host['error']}")
            continue
        gpus = [device["name"] for device in host["devices"] if device["kind"] != "cpu"]
        print(
            f"{host['name']}  {host['address'] or 'this machine only'}  {host['cpus_free']:g}/{host['cpus']:g} CPU free  "
            f"{len(gpus)} GPU{'  ' + ', '.join(gpus) if gpus else ''}  {len(host['workers'])} worker(s)  "
            f"python {host['versions']['python']}  torch {host['versions'].get('torch', 'not installed')}"
        )
    return 0 if all(host["status"] == "up" for host in snapshot["hosts"]) else 1


def _running(settings: Settings) -> list[Record]:
    from gpulayer.runtime.records import read_all

    return [record for record in read_all(settings.runtime_dir) if not record.embedded]


def _wait_gone(record: Record) -> None:
    from gpulayer.runtime.records import is_running

    deadline = time.monotonic() + _STOP_S
    while is_running(record.pid, record.born_s):
        if time.monotonic() > deadline:
            raise GPUlayerError(
                f"the agent (pid {record.pid}) is still ending after {_STOP_S:g} s; to end it hard: kill -9 {record.pid}"
            )
        time.sleep(0.02)
