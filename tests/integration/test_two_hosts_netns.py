"""Two hosts with keys of their own and a wire between them: the whole way over TCP, and what happens when it is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.conftest import is_gone, wait_until
from tests.integration.netlab import NetHost, two_hosts, why_not

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(180)]
PORT = 7770
PREAMBLE = f"""
import os, socket, sys, threading, time
import gpulayer
HOSTS = ["10.77.0.1:{PORT}", "10.77.0.2:{PORT}"]

@gpulayer.remote
def where():
    return os.environ["GPULAYER_RUNTIME_DIR"].split("/")[-2]
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NetHost, NetHost]]:
    """Two hosts that know each other's keys, each with a running agent."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path_factory.mktemp("n")) as hosts:
        publics = []
        for host in hosts:
            host.gpulayer("keys", "make")
            publics.append(host.gpulayer("keys", "show").strip())
        for host, public, other in zip(hosts, reversed(publics), reversed(hosts), strict=True):
            host.gpulayer("keys", "add", public, "--role", "driver", "--comment", "the other host")
            host.gpulayer("keys", "trust", f"{other.address}:{PORT}", public)
        for number, host in enumerate(hosts, 1):
            up(host, number)
        yield hosts


def up(host: NetHost, number: int) -> None:
    host.gpulayer("up", "--detach", "--bind", host.address, "--name", f"host{number}", "--cpus", "2")


def mend(one: NetHost, two: NetHost) -> None:
    """Join the hosts again; it takes a moment until each finds the other."""
    two.mend()
    probe = f"import socket; socket.create_connection(({two.address!r}, {PORT}), 1)"
    wait_until(lambda: one.run([sys.executable, "-c", probe]).returncode == 0, 30, "a way between the hosts")


def drive(host: NetHost, source: str, timeout: float = 60) -> str:
    """Run a driver's script in a host; what it prints."""
    script = host.folder / "driver.py"
    script.write_text(PREAMBLE + source)
    done = host.run([sys.executable, str(script)], timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tasks_run_on_both_hosts(lab):
    printed = drive(
        lab[0],
        """
with gpulayer.connect(HOSTS) as connection:
    print([host.name for host in connection.hosts], [host.address for host in connection.hosts])
    print(gpulayer.get([where.options(host=name).remote() for name in ("host1", "host2")]))
    print(len(gpulayer.get(gpulayer.remote(lambda data: data * 2).options(host="host2").remote(bytes(20_000_000)))))
""",
    )
    assert printed.splitlines() == [
        "['host1', 'host2'] ['10.77.0.1:7770', '10.77.0.2:7770']",
        "['host1', 'host2']",
        "40000000",
    ]


def test_each_host_listens_on_one_port(lab):
    for host in lab:
        packed = "".join(f"{int(part):02X}" for part in reversed(host.address.split(".")))
        assert host.listening() == [f"{packed}:{PORT:04X}"]


def test_actor_is_called_across_hosts_from_a_task(lab):
    """The task on host 1 reaches the actor on host 2 through the two agents, with small and bulk arguments, now and later."""
    printed = drive(
        lab[0],
        """
@gpulayer.remote
class Sum:
    def __init__(self):
        self.total = 0
    def add(self, data):
        self.total += len(data)
        return where._function(), self.total
    def echo(self, data):
        return data

@gpulayer.remote
def use(actor, pause_s):
    first = gpulayer.get(actor.add.remote(bytes(5_000_000)))
    time.sleep(pause_s)
    data = os.urandom(3_000_000)
    return where._function(), first, gpulayer.get(actor.add.remote(b"1")), gpulayer.get(actor.echo.remote(data)) == data

with gpulayer.connect(HOSTS):
    actor = Sum.options(host="host2").remote()
    print(gpulayer.get(use.options(host="host1").remote(actor, 10)))
    print(gpulayer.get(actor.add.remote(b"")))
""",
    )
    assert printed.splitlines() == ["('host1', ('host2', 5000000), ('host2', 5000001), True)", "('host2', 5000001)"]


def test_death_of_a_remote_actor_reaches_a_caller_on_another_host(lab):
    printed = drive(
        lab[0],
        """
@gpulayer.remote
class Victim:
    def pid(self):
        return os.getpid()
    def end(self):
        time.sleep(0.3)
        os._exit(7)

@gpulayer.remote
def call(actor, method):
    try:
        return gpulayer.get(getattr(actor, method).remote(), timeout=10)
    except gpulayer.errors.ActorDiedError as error:
        return type(error).__name__, error.cause, error.host

with gpulayer.connect(HOSTS):
    actor = Victim.options(host="host2").remote()
    gpulayer.get(actor.pid.remote())
    for method in ("end", "pid"):
        print(gpulayer.get(call.options(host="host1").remote(actor, method)))
""",
    )
    assert printed.splitlines() == ["('ActorDiedError', 'exit code 7', 'host2')"] * 2


def test_status_shows_both_hosts(lab):
    hosts = json.loads(lab[1].gpulayer("status", "--json", *(f"{host.address}:{PORT}" for host in lab)))["hosts"]
    assert [(host["name"], host["status"], host["address"]) for host in hosts] == [
        ("host1", "up", "10.77.0.1:7770"),
        ("host2", "up", "10.77.0.2:7770"),
    ]


def test_host_with_another_key_than_trusted_is_an_auth_error(lab):
    one, two = lab
    true_key = two.gpulayer("keys", "show").strip()
    one.gpulayer("keys", "trust", f"{two.address}:{PORT}", one.gpulayer("keys", "show").strip())
    source = """
try:
    gpulayer.connect(HOSTS[1:])
except gpulayer.errors.AuthError as error:
    print(error.host, "keys trust" in str(error), "keys add" in str(error))
"""
    try:
        assert drive(one, source) == "10.77.0.2:7770 True False\n"
    finally:
        one.gpulayer("keys", "trust", f"{two.address}:{PORT}", true_key)


def test_driver_that_is_not_enrolled_is_an_auth_error(lab):
    one, two = lab
    key = one.gpulayer("keys", "show").strip()
    two.gpulayer("keys", "revoke", key)
    source = """
try:
    gpulayer.connect(HOSTS[1:])
except gpulayer.errors.AuthError as error:
    print(error.host, "keys trust" in str(error), "keys add" in str(error))
"""
    try:
        assert drive(one, source) == "10.77.0.2:7770 False True\n"
    finally:
        two.gpulayer("keys", "add", key, "--role", "driver")


def two_node_fit() -> str:
    """A training run on both hosts; prints that it has learnt, and where."""
    return """
import torch
from torch import nn

def main():
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    net = nn.Linear(4, 1)
    before = nn.functional.mse_loss(net(x), y).item()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    with gpulayer.connect(HOSTS):
        trainer = gpulayer.Trainer(
            num_nodes=2, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        trainer.fit(net, data, loss="mse", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    after = nn.functional.mse_loss(net(x), y).item()
    print("learnt" if after < before / 2 else f"{before} -> {after}")

if __name__ == "__main__":
    main()
"""


def test_two_node_fit_over_netns(lab):
    assert drive(lab[0], two_node_fit(), timeout=120).splitlines()[-1] == "learnt"


def test_killed_agent_of_the_other_host_fails_a_relayed_call(lab):
    """A task on host 1 waits for an actor on host 2, whose agent is killed: the two agents' link tells it."""
    one, two = lab
    script = one.folder / "waits.py"
    script.write_text(
        PREAMBLE
        + """
@gpulayer.remote
class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)

@gpulayer.remote
def wait_for(actor):
    gpulayer.get(actor.sleep.remote(0))
    print("waiting", flush=True)
    try:
        gpulayer.get(actor.sleep.remote(600))
    except gpulayer.errors.HostLostError as error:
        return type(error).__name__, error.host

with gpulayer.connect(HOSTS):
    actor = Sleeper.options(host="host2").remote()
    print(gpulayer.get(wait_for.options(host="host1").remote(actor), timeout=30), flush=True)
"""
    )
    with one.start([sys.executable, str(script)]) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().endswith("waiting\n")
        os.kill(json.loads((two.folder / "run" / f"agent-{PORT}.json").read_text())["pid"], signal.SIGKILL)
        start = time.monotonic()
        assert driver.stdout.read() == "('HostLostError', '10.77.0.2:7770')\n"
        assert time.monotonic() - start < 3
    up(two, 2)


def test_cut_host_fails_its_calls_within_16_seconds(lab):
    one, two = lab
    script = one.folder / "cut.py"
    script.write_text(
        PREAMBLE
        + """
with gpulayer.connect(HOSTS):
    sleep = gpulayer.remote(time.sleep)
    gpulayer.get([sleep.options(host=name).remote(0) for name in ("host1", "host2")])
    pending = sleep.options(host="host2").remote(600)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    try:
        gpulayer.get(pending, timeout=30)
    except gpulayer.errors.HostLostError as error:
        print(error.host, time.monotonic() - start < 16, flush=True)
    print(gpulayer.get(where.remote(), timeout=10), flush=True)
"""
    )
    with one.start([sys.executable, str(script)], stdin=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        two.cut()
        try:
            out, err = driver.communicate("cut\n", timeout=60)
        finally:
            mend(one, two)
    assert out.splitlines() == ["host2 True", "host1"], err


def test_named_actor_is_found_and_killed_from_a_task_on_the_other_host(lab):
    """Whichever of the two agents has dialled the other: questions come back over the same link."""
    printed = drive(
        lab[0],
        """
@gpulayer.remote
class Victim:
    def pid(self):
        return os.getpid()

@gpulayer.remote
def end(actor):
    gpulayer.get(actor.pid.remote())
    gpulayer.kill(actor)
    try:
        gpulayer.get(actor.pid.remote(), timeout=10)
    except gpulayer.errors.ActorDiedError as error:
        return error.cause

with gpulayer.connect(HOSTS):
    for mine, other in (("host1", "host2"), ("host2", "host1")) * 2:
        actor = Victim.options(host=other).remote()
        print(gpulayer.get(end.options(host=mine).remote(actor), timeout=20))
""",
    )
    assert printed.splitlines() == ["killed by gpulayer.kill()"] * 4


def test_driver_host_that_is_cut_off_loses_its_workers_within_15_seconds(lab):
    """Its processes live, and so does its connection for all that the far kernel knows."""
    one, two = lab
    script = one.folder / "far.py"
    script.write_text(
        PREAMBLE
        + """
@gpulayer.remote
class Held:
    def pid(self):
        return os.getpid()

gpulayer.connect(HOSTS[1:])
held = Held.remote()
print(gpulayer.get(held.pid.remote()), flush=True)
sys.stdin.readline()
"""
    )
    with one.start([sys.executable, str(script)], stdin=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, driver.communicate()[1]
        assert not is_gone(int(line))
        two.cut()
        try:
            wait_until(lambda: is_gone(int(line)), 15, "the end of the worker")
        finally:
            mend(one, two)
            driver.kill()
