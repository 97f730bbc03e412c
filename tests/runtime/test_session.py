from __future__ import annotations

import os
import pickle
import signal
import time

import numpy as np
import pytest

import gpulayer
from gpulayer.errors import GPUlayerError, HostLostError, NotConnectedError, to_facts
from gpulayer.resources import Address
from gpulayer.runtime import session as sessions
from gpulayer.runtime.actors import actor_address
from tests.conftest import wait_until


@gpulayer.remote(num_cpus=0)
def sleep(seconds):
    time.sleep(seconds)
    return seconds


@gpulayer.remote
class Holder:
    def sleep(self, seconds):
        time.sleep(seconds)

    def add(self, x):
        return x + 1


def test_everything_that_waits_fails_when_the_session_ends(session):
    holder = Holder.remote()
    refs = [sleep.options(num_cpus=1).remote(30) for _ in range(8)]
    refs += [holder.sleep.remote(30), holder.add.remote(1), holder.add.remote(refs[0])]
    gpulayer.wait(refs, timeout=0.5)
    gpulayer.disconnect()
    for ref in refs:
        with pytest.raises(NotConnectedError, match=r"gpulayer\.connect\(\)"):
            gpulayer.get(ref, timeout=1)


def test_short_tasks_that_wait_fail_when_the_session_ends(session):
    quick = gpulayer.remote(lambda s=0: time.sleep(s))
    gpulayer.get([quick.remote() for _ in range(20)])
    refs = [quick.remote(0.2) for _ in range(200)]
    gpulayer.disconnect()
    for ref in refs:
        try:
            gpulayer.get(ref, timeout=1)
        except NotConnectedError:
            continue


def test_handle_of_an_ended_session_says_so(session):
    holder = Holder.remote()
    gpulayer.disconnect()
    with pytest.raises(NotConnectedError):
        holder.add.remote(1)


def test_result_that_is_here_stays_after_the_session_ends(session):
    ref = sleep.remote(0)
    gpulayer.wait([ref])
    gpulayer.disconnect()
    assert gpulayer.get(ref) == 0


def test_function_runs_in_the_next_session_too(session):
    assert gpulayer.get(sleep.remote(0)) == 0
    gpulayer.disconnect()
    gpulayer.connect()
    assert gpulayer.get(sleep.remote(0)) == 0


def test_agent_that_dies_fails_what_waits_with_host_lost(session):
    ref, holder = sleep.remote(60), Holder.remote()
    pending = holder.sleep.remote(60)
    gpulayer.wait([ref], timeout=0.5)
    agent = gpulayer.cluster().hosts[0].pid
    started = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    for one in (ref, pending):
        with pytest.raises(HostLostError, match="is lost"):
            gpulayer.get(one, timeout=5)
    assert time.monotonic() - started < 2
    with pytest.raises(HostLostError):
        sleep.remote(0)


def test_tasks_go_on_elsewhere_when_one_of_two_hosts_dies(two_hosts, tmp_path):
    def hold():
        (tmp_path / "started").touch()
        time.sleep(60)

    first, second = gpulayer.cluster().hosts
    where = gpulayer.remote(num_cpus=1)(os.getppid)
    lost = gpulayer.remote(host=second.name)(hold).remote()
    wait_until((tmp_path / "started").exists, 10)
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(HostLostError, match=second.name):
        gpulayer.get(lost, timeout=5)
    assert [host.name for host in gpulayer.cluster().hosts] == [first.name]
    assert len(set(gpulayer.get([where.remote() for _ in range(10)], timeout=10))) == 1


def test_cluster_shows_hosts_links_and_what_is_free(two_hosts):
    wait_until(lambda: len(gpulayer.cluster().links) == 2, 5, "latencies of both hosts")
    cluster = gpulayer.cluster()
    assert [host.name for host in cluster.hosts] == ["local-1", "local-2"]
    assert {link.target for link in cluster.links} == {"local-1", "local-2"}
    assert all(0 < link.latency_s < 1 for link in cluster.links)
    holder = Holder.options(num_cpus=1, host="local-2").remote()
    gpulayer.get(holder.add.remote(1))
    wait_until(lambda: gpulayer.cluster().views[1].cpus_free == cluster.hosts[1].cpus - 1, 5, "the CPU taken")


def test_handle_and_reference_work_on_another_host(two_hosts):
    holder = Holder.options(host="local-1").remote()
    use = gpulayer.remote(host="local-2")(lambda handle, refs: (gpulayer.get(handle.add.remote(1)), gpulayer.get(refs[0]).sum()))
    made = gpulayer.remote(host="local-1")(lambda: np.ones(2_000_000)).remote()
    assert gpulayer.get(use.remote(holder, [made]), timeout=20) == (2, 2_000_000)


def test_reference_comes_home_when_its_owner_unpickles_it(session):
    ref = gpulayer.put([1, 2])
    back = pickle.loads(pickle.dumps(ref))
    assert back._entry is ref._entry


def test_reference_to_a_dropped_value_says_so(session):
    session_ = sessions.current()
    ref = session_.adopt(session_.address, 999, "gone")
    with pytest.raises(GPUlayerError, match="is gone"):
        gpulayer.get(ref, timeout=5)


def test_forked_child_has_no_session_and_makes_none_by_itself(session):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sleep.remote(0)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__} {sessions.current_or_none()}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"NotConnectedError None"
    os.close(reader)
    os.close(writer)
    assert gpulayer.get(sleep.remote(0)) == 0


@pytest.mark.parametrize("teller", ["another agent", "a process of its host"])
def test_death_of_a_worker_is_believed_of_its_own_agent_only(two_hosts, teller):
    holder = Holder.options(host="local-1").remote()
    pending = holder.sleep.remote(1)
    session_ = sessions.current()
    address = actor_address(holder)
    other = next(host_id for host_id in session_.hosts if host_id != address.host)
    source = Address(other) if teller == "another agent" else Address(address.host, b"somebody")

    async def tell() -> None:
        session_._on_died(source, {"worker": address.to_bytes(), **to_facts(GPUlayerError("so they say"))})

    session_.io.run(tell())
    assert gpulayer.get(pending, timeout=20) is None
