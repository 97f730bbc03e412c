"""Workers of a real zygote, as the pool sees them start, print and end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from gpulayer.agent.pool import Pool, Worker
from gpulayer.config import Settings
from gpulayer.errors import WorkerStartError
from gpulayer.resources import new_id
from gpulayer.wire.context import close_context
from tests.agents import Inside, inside
from tests.conftest import is_gone, wait_until


@pytest.fixture
def host(own_folders):
    with inside() as host:
        yield host


def start(host: Inside, label: str = "x", env: dict[str, str] | None = None) -> Worker:
    worker = host.do(lambda: host.agent.pool.fork(label, env or {}, 1, []))
    host.wait(host.agent.pool.wait_ready(worker))
    return worker


def wait_gone(host: Inside, worker: Worker) -> None:
    async def gone() -> None:
        await asyncio.wait_for(asyncio.shield(worker.gone), 10)

    host.wait(gone())


def test_worker_starts_in_an_empty_folder_with_its_environment(host):
    worker = start(host, env={"SOMETHING": "here"})
    process = psutil.Process(worker.pid)
    assert process.cwd() == str(worker.folder)
    assert list(worker.folder.iterdir()) == []
    assert worker.folder.stat().st_mode & 0o777 == 0o700
    assert os.getsid(worker.pid) == worker.pid
    assert process.environ()["GPULAYER_WORKER"] == worker.id.hex(), "where the kernel shows it, too"


def test_workers_share_one_parent_that_runs_one_thread(host):
    workers = [start(host) for _ in range(3)]
    (zygote,) = {psutil.Process(worker.pid).ppid() for worker in workers}
    assert psutil.Process(zygote).num_threads() == 1
    assert psutil.Process(zygote).ppid() == os.getpid()


@pytest.mark.parametrize(("how", "cause"), [(signal.SIGSEGV, "killed by SIGSEGV"), (signal.SIGTERM, "killed by SIGTERM")])
def test_end_of_a_worker_is_seen_at_once_with_its_cause(host, how, cause):
    worker = start(host)
    os.kill(worker.pid, how)
    wait_until(lambda: worker.cause != "", 1, "the notice of its end")
    assert worker.cause == cause
    wait_gone(host, worker)
    assert worker.id not in host.agent.pool.workers
    assert not worker.folder.exists()


def test_kill_gives_the_reason_as_cause_and_is_idempotent(host):
    worker = start(host)
    for reason in ("first reason", "second reason"):
        host.do(lambda reason=reason: host.agent.pool.kill(worker, reason))
    wait_gone(host, worker)
    assert worker.cause == "first reason"
    host.do(lambda: host.agent.pool.kill(worker, "too late"))
    assert worker.kill_reason == "first reason"


def test_stopped_worker_can_be_killed(host):
    worker = start(host)
    os.kill(worker.pid, signal.SIGSTOP)
    host.do(lambda: host.agent.pool.kill(worker, "enough"))
    wait_gone(host, worker)


def run_pool(own_folders: Path, work: Callable[[Pool, list[tuple[str, str]], list[Worker]], Awaitable[None]]) -> None:
    """Run `work` with a pool whose socket nobody listens on, so that no worker ever gets ready."""
    lines: list[tuple[str, str]] = []
    ended: list[Worker] = []

    async def main() -> None:
        folder = Settings.from_environment().private_dir(own_folders / "run")
        pool = Pool(
            asyncio.get_running_loop(),
            folder / "work",
            str(folder / "nobody.sock"),
            lambda worker, stream, new: lines.extend((stream, line) for line in new),
            ended.append,
        )
        try:
            await work(pool, lines, ended)
        finally:
            await pool.close()

    asyncio.run(main())
    close_context()


def silence(own_folders: Path) -> None:
    """Something that takes the workers' connections and never answers."""
    listener = socket.socket(socket.AF_UNIX)
    _kept.append(listener)
    listener.bind(str(own_folders / "run" / "nobody.sock"))
    listener.listen()


_kept: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _closed_sockets():
    yield
    for listener in _kept:
        listener.close()
    _kept.clear()


def test_worker_that_cannot_reach_its_agent_fails_with_its_stderr(own_folders):
    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        worker = pool.fork("lonely", {}, 1, [])
        with pytest.raises(WorkerStartError, match="a worker for lonely ended while starting: exit code 1") as caught:
            await pool.wait_ready(worker)
        assert "cannot reach its agent" in caught.value.stderr[0]
        assert ended == [worker]
        assert pool.workers == {}
        await asyncio.wait_for(worker.gone, 5)
        assert lines == [("stderr", line) for line in caught.value.stderr]

    run_pool(own_folders, work)


def test_worker_is_ready_once_its_pid_is_known_even_if_it_said_hello_before(own_folders):
    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        silence(own_folders)
        worker = pool.fork("fast", {}, 1, [])
        assert pool.welcome(worker.id, worker.token) is worker
        assert not worker.ready.done()
        await pool.wait_ready(worker)
        assert psutil.Process(worker.pid).ppid() == pool._process.pid

    run_pool(own_folders, work)


def test_worker_that_never_gets_ready_is_ended(own_folders, monkeypatch):
    from gpulayer.agent import pool as pools

    monkeypatch.setattr(pools, "START_TIMEOUT_S", 0.2)

    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        silence(own_folders)
        worker = pool.fork("slow", {}, 1, [])
        with pytest.raises(WorkerStartError, match=r"did not start within 0\.2 s"):
            await pool.wait_ready(worker)
        await asyncio.wait_for(worker.gone, 5)
        assert is_gone(worker.pid)
        assert ended == [worker]

    run_pool(own_folders, work)


def test_end_of_the_zygote_ends_its_workers_and_the_next_fork_starts_another(own_folders):
    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        silence(own_folders)
        worker = pool.fork("x", {}, 1, [])
        await asyncio.to_thread(wait_until, lambda: worker.pid, 10, "its pid")
        os.kill(psutil.Process(worker.pid).ppid(), signal.SIGKILL)
        with pytest.raises(WorkerStartError, match="its zygote ended"):
            await pool.wait_ready(worker)
        await asyncio.wait_for(worker.gone, 5)
        await asyncio.to_thread(wait_until, lambda: is_gone(worker.pid), 2, "the end of the worker")
        pool.kill(worker, "nothing happens")
        assert pool.workers == {}
        assert ended == [worker]
        other = pool.fork("y", {}, 1, [])
        await asyncio.to_thread(wait_until, lambda: other.pid, 10, "the pid of the next")

    run_pool(own_folders, work)


def test_fork_without_a_folder_for_the_worker_is_an_error(own_folders):
    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        (own_folders / "run" / "work").write_text("in the way")
        with pytest.raises(WorkerStartError, match="a worker for x cannot start: Not a directory"):
            pool.fork("x", {}, 1, [])
        assert pool.workers == {}
        (own_folders / "run" / "work").unlink()

    run_pool(own_folders, work)


def test_close_ends_zygote_and_workers_and_removes_their_folders(own_folders):
    pids: list[int] = []

    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        silence(own_folders)
        worker = pool.fork("x", {}, 1, [])
        await asyncio.to_thread(wait_until, lambda: worker.pid, 10, "its pid")
        pids.extend((worker.pid, psutil.Process(worker.pid).ppid()))
        waiting = asyncio.ensure_future(pool.wait_ready(worker))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(WorkerStartError, match="its agent is shutting down"):
            await waiting
        with pytest.raises(WorkerStartError):
            pool.fork("late", {}, 1, [])

    run_pool(own_folders, work)
    assert all(map(is_gone, pids))
    assert not (own_folders / "run" / "work").exists()


def test_welcome_takes_only_the_worker_itself(host):
    worker = start(host)

    def check() -> None:
        pool = host.agent.pool
        assert pool.welcome(worker.id, worker.token) is worker
        for peer, token in ((worker.id, "x"), (worker.id, ""), (worker.id, "\ud800"), (new_id(), worker.token)):
            assert pool.welcome(peer, token) is None

    host.do(check)


def test_output_is_read_to_the_end_and_its_tail_kept(own_folders):
    """A worker that dies while starting has said why: every line arrives before `gone`."""

    async def work(pool: Pool, lines: list[tuple[str, str]], ended: list[Worker]) -> None:
        pool.preload(["a_module_that_nobody_has"])
        workers = [pool.fork(str(number), {}, 1, []) for number in range(3)]
        await asyncio.wait_for(asyncio.gather(*(worker.gone for worker in workers)), 20)
        assert len(lines) == 3
        assert all("cannot reach its agent" in pool.stderr(worker)[-1] for worker in workers)

    run_pool(own_folders, work)
