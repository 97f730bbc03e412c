"""Two hosts on one machine: a network namespace each, joined by a wire that can be cut.

    with two_hosts() as (one, two):
        one.run(["gpulayer", "keys", "make"]);  two.cut();  two.mend()

Each host has its own keys, sockets and hostname in its environment. What runs in a host is ended, by pid, with it.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, is_gone, wait_until


def ip(*words: str, check: bool = True) -> str:
    """Run `ip`; what it prints."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Why this machine can have no such hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"gpulayer-probe-{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
    except (OSError, RuntimeError) as error:
        return f"network namespaces do not work here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass
class NetHost:
    """One host."""

    namespace: str
    address: str
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        own = {"GPULAYER_HOME": str(self.folder / "home"), "GPULAYER_RUNTIME_DIR": str(self.folder / "run")}
        return {**os.environ, **own, "PYTHONPATH": str(ROOT)}

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program in this host."""
        inside = ["ip", "netns", "exec", self.namespace, *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(inside, **{**pipes, "env": self.env, "cwd": self.folder, **options})

    def run(self, command: list[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program in this host to its end."""
        with self.start(command) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def gpulayer(self, *words: str) -> str:
        """Type a `gpulayer` command in this host; what it prints."""
        done = self.run([sys.executable, "-m", "gpulayer.cli", *words])
        assert done.returncode == 0, f"gpulayer {' '.join(words)}: {done.stderr}"
        return done.stdout

    def listening(self) -> list[str]:
        """Local addresses of this host's listening TCP sockets."""
        lines = [line.split() for line in self.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()]
        return [fields[1] for fields in lines if len(fields) > 3 and fields[3] == "0A"]

    def cut(self) -> None:
        """Pull this host's plug: packets vanish, nobody is told."""
        ip("-n", self.namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Put it back in."""
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def pids(self) -> list[int]:
        """Everything that runs in this host."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace, check=False).split()]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[NetHost, NetHost]]:
    """10.77.0.1 and 10.77.0.2, joined back to back; gone at the end, whatever happened."""
    mark = secrets.token_hex(3)
    hosts = [NetHost(f"gpulayer-{mark}-{number}", f"10.77.0.{number}", folder / f"host{number}") for number in (1, 2)]
    try:
        for host in hosts:
            host.folder.mkdir()
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
        one, two = (host.namespace for host in hosts)
        ip("-n", one, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", two)
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield hosts[0], hosts[1]
    finally:
        pids = [pid for host in hosts for pid in host.pids()]
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, pids)), 10, "the end of what runs in the hosts")
        for host in hosts:
            ip("netns", "del", host.namespace, check=False)
