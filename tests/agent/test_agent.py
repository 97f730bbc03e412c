"""One agent from its start to its end, and the questions that it answers."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

import gpulayer
from gpulayer.agent import hardware
from gpulayer.agent.__main__ import parse
from gpulayer.agent.agent import _ANSWERS, AgentOptions
from gpulayer.agent.hardware import available_cpus
from gpulayer.errors import ActorDiedError, UsageError
from gpulayer.resources import Address, Device
from gpulayer.runtime import records
from gpulayer.wire.message import Kind, Message
from tests.agents import Client, Inside, inside, outside, workers_of
from tests.conftest import ROOT, is_gone, wait_until


@pytest.fixture
def host(own_folders) -> Iterator[Inside]:
    with inside(name="tower", cpus=2) as host:
        yield host


@pytest.fixture
def driver(host) -> Iterator[Client]:
    with Client(f"ipc://{host.socket}") as client:
        assert client.hello().kind is Kind.WELCOME
        yield client


def lease(client: Client, label: str = "x", **more: object) -> dict:
    answer = client.ask("lease", **{"cpus": 0, "gpus": 0, "kind": "actor", "label": label, **more})
    assert answer is not None
    assert answer.kind is Kind.REPLY, answer.body
    return answer.body


def wait_nothing_left(host: Inside) -> None:
    def nothing() -> bool:
        return not host.agent.peers.known and not host.agent.pool.workers

    wait_until(lambda: host.do(nothing), 5, "the end of peer and worker")


def workers(host: Inside) -> int:
    return host.do(lambda: len(host.agent.pool.workers))


# --- start and stop


def test_command_line_has_an_option_for_everything():
    words = "--bind ::1 --port 0 --name n --record r --zone z --cpus 1.5 --share 1/2 --preload a,b --embedded"
    assert parse(words.split(" ")) == AgentOptions("::1", 0, "n", "r", "z", 1.5, (1, 2), ("a", "b"), True)
    assert parse([]) == AgentOptions()


def test_agent_leaves_a_record_and_takes_it_away(own_folders):
    with inside(name="tower", record="mine") as host:
        (record,) = records.read_all(own_folders / "run")
        assert (record.name, record.host, record.port, record.pid) == ("mine", "tower", None, os.getpid())
        assert record.socket_path == host.socket
    assert list((own_folders / "run").iterdir()) == []


def test_two_agents_of_one_name_cannot_run(own_folders):
    with outside("--port", "0", "--record", "one"):
        done = subprocess.run(
            [sys.executable, "-m", "gpulayer.agent", "--record", "one"],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("gpulayer: another process listens on ")
        assert len(records.read_all(records.Path(os.environ["GPULAYER_RUNTIME_DIR"]))) == 1


def test_agent_starts_again_where_a_killed_one_left_its_remains(own_folders):
    with outside("--port", "0", "--record", "one") as first:
        first.process.kill()
        first.process.wait()
    assert (own_folders / "run" / "one.sock").exists()
    with outside("--port", "0", "--record", "one") as second:
        (record,) = records.read_all(own_folders / "run")
        assert record.pid == second.pid
        with gpulayer.connect():
            assert gpulayer.get(gpulayer.remote(os.getppid).remote(), timeout=20) in second.below()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_agent_cleanly(own_folders, number):
    with outside("--port", "0") as agent:
        below = agent.below()
        os.kill(agent.pid, number)
        assert agent.process.wait(10) == 0
        assert all(map(is_gone, below))
        assert list((own_folders / "run").iterdir()) == []
        assert agent.process.stderr.read() == ""


def test_embedded_agent_ends_with_its_stdin(own_folders):
    command = [sys.executable, "-m", "gpulayer.agent", "--embedded"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as process:
        ready = json.loads(process.stdout.readline())
        assert (ready["pid"], ready["port"]) == (process.pid, None)
        process.stdin.write(b"what is said is ignored\n")
        process.stdin.flush()
        process.stdin.close()
        assert process.wait(10) == 0
        assert process.stderr.read() == b""


def test_embedded_agent_that_cannot_start_says_why(own_folders, run_script):
    too_long = str(own_folders / ("x" * 100))
    source = "import gpulayer\ntry: gpulayer.connect()\nexcept gpulayer.errors.ConnectError as error: print(error)"
    done = run_script(source, GPULAYER_RUNTIME_DIR=too_long)
    assert "did not start on this machine (exit code 1)" in done.stdout
    assert "Traceback" not in done.stderr
    assert "the system allows 107" in done.stderr


def test_runtime_folder_that_is_no_folder_of_ours_is_refused_before_anything_starts(own_folders):
    (own_folders / "run").write_text("in the way")
    with pytest.raises(UsageError, match="is not a folder of yours"):
        gpulayer.connect()


def test_closing_agent_tells_everybody(own_folders):
    with inside() as host, Client(f"ipc://{host.socket}") as client:
        assert client.hello().kind is Kind.WELCOME
        pid = lease(client)["pid"]
        host.wait(host.agent.stop())
        (message,) = client.receive()
        assert (message.kind, message.body["m"]) == (Kind.TELL, "closing")
        assert is_gone(pid)


# --- questions


def test_state_names_host_and_worker(host, driver):
    lease(driver, "bee")
    body = driver.ask("state").body
    assert body["name"] == "tower"
    assert [worker["label"] for worker in body["workers"]] == ["bee"]


def test_unknown_question_lists_the_known_ones(driver):
    answer = driver.ask("sing")
    assert answer.body["error"] == "UsageError"
    assert all(name in answer.body["message"] for name in _ANSWERS)


def test_release_ends_the_worker(host, driver):
    worker = lease(driver)
    assert driver.ask("release", number=2, worker=worker["worker"]).kind is Kind.REPLY
    wait_until(lambda: workers(host) == 0, 5, "the end of the worker")
    assert is_gone(worker["pid"])


def test_kill_says_whether_there_was_anything_to_kill(host, driver):
    worker = lease(driver)["worker"]
    assert driver.ask("kill", number=2, worker=worker).body == {"found": True}
    wait_until(lambda: workers(host) == 0, 5, "the end of the worker")
    assert driver.ask("kill", number=3, worker=worker).body == {"found": False}


def test_named_actor_is_found_with_what_its_maker_said_of_it(host, driver):
    assert driver.ask("named", name="bee").body == {"found": False}
    worker = lease(driver, "Bee", name="bee", meta=b"opaque")["worker"]
    found = driver.ask("named", number=2, name="bee").body
    assert found == {"found": True, "worker": worker, "meta": b"opaque", "label": "Bee"}
    lease(driver, "Nameless", number=3)
    assert driver.ask("named", number=4, name="").body == {"found": False}, "an actor without a name has none"


def test_goodbye_ends_what_the_driver_has_and_answers_when_it_is_over(host, driver):
    pids = [lease(driver, number=number)["pid"] for number in (1, 2)]
    assert driver.ask("goodbye", number=3).kind is Kind.REPLY
    assert all(map(is_gone, pids))
    wait_until(lambda: not host.agent.peers.known, 3, "the end of the peer")


def test_what_is_asked_for_after_goodbye_ends_too(host, driver):
    driver.send(Message(Kind.ASK, 1, {"m": "goodbye"}))
    driver.send(Message(Kind.ASK, 2, {"m": "lease", "cpus": 1, "gpus": 0, "kind": "task", "label": "late"}))
    wait_nothing_left(host)
    assert host.do(lambda: host.agent.leases.ledger.cpus_free) == 2


def test_lease_and_goodbye_in_one_frame_leave_nothing(host, driver):
    driver.send(
        Message(Kind.ASK, 1, {"m": "lease", "cpus": 1, "gpus": 0, "kind": "task", "label": "short"}),
        Message(Kind.ASK, 2, {"m": "goodbye"}),
    )
    wait_nothing_left(host)
    assert host.do(lambda: host.agent.leases.ledger.cpus_free) == 2


def test_coming_and_going_of_viewers_is_no_news(host, caplog):
    caplog.set_level(logging.DEBUG, "gpulayer.agent")
    for kind in ("driver", "viewer"):
        with Client(f"ipc://{host.socket}") as client:
            assert client.hello(kind, pid=2**22 - 1).kind is Kind.WELCOME
            wait_until(lambda: not host.do(lambda: host.agent.peers.known), 5, "the end of the peer")
    levels = {record.getMessage().split()[-2]: record.levelname for record in caplog.records if "welcome" in record.getMessage()}
    assert levels == {"driver": "INFO", "viewer": "DEBUG"}
    gone = {record.getMessage().split()[0]: record.levelname for record in caplog.records if "is gone" in record.getMessage()}
    assert gone == {"driver": "INFO", "viewer": "DEBUG"}


def test_call_to_an_agent_fails(driver):
    driver.send(Message(Kind.CALL, 7, {"op": "method"}))
    ((answer,)) = driver.receive()
    assert (answer.kind, answer.id, answer.body["error"]) == (Kind.FAIL, 7, "UsageError")


def test_shutdown_answers_first(own_folders):
    with outside("--port", "0") as agent, Client(f"ipc://{agent.ready['socket']}") as client:
        assert client.hello().kind is Kind.WELCOME
        assert client.ask("shutdown").body == {"pid": agent.pid}
        assert agent.process.wait(10) == 0


def test_owner_is_told_of_the_death_of_its_worker_with_its_last_words(session):
    @gpulayer.remote
    class Talker:
        def end(self):
            print("these are my last words", file=sys.stderr, flush=True)
            os._exit(3)

    talker = Talker.remote()
    with pytest.raises(ActorDiedError) as caught:
        gpulayer.get(talker.end.remote(), timeout=10)
    assert caught.value.cause == "exit code 3"
    assert "these are my last words" in caught.value.stderr


def test_workers_of_a_worker_end_with_it(session):
    @gpulayer.remote
    class Inner:
        def pid(self):
            return os.getpid()

    @gpulayer.remote
    class Outer:
        def start(self):
            self.inner = Inner.remote()
            return gpulayer.get(self.inner.pid.remote())

    outer = Outer.remote()
    pid = gpulayer.get(outer.start.remote())
    assert not is_gone(pid)
    gpulayer.kill(outer)
    wait_until(lambda: is_gone(pid), 5, "the end of the inner actor")


def test_obituaries_are_kept_in_bounded_number(host, driver, monkeypatch):
    from gpulayer.agent import agent

    monkeypatch.setattr(agent, "KEPT_OBITUARIES", 2)
    ids = []
    for number in range(1, 8, 2):
        ids.append(lease(driver, f"w{number}", number=number)["worker"])
        driver.ask("kill", number=number + 1, worker=ids[-1], reason=f"reason {number}")
        wait_until(lambda: workers(host) == 0, 5, "its end")
    causes = [host.do(lambda peer=peer: host.agent._obituary(Address(host.agent.id, peer))).cause for peer in ids]
    assert causes == ["there is no such process on this host"] * 2 + ["reason 5", "reason 7"]


def test_what_a_worker_prints_reaches_its_owner_with_its_name(session, capfd):
    @gpulayer.remote
    def speak():
        print("to stdout")
        print("to stderr", file=sys.stderr)
        return os.getpid()

    pid = gpulayer.get(speak.remote())
    gpulayer.disconnect()
    out, err = capfd.readouterr()
    assert f"(speak pid={pid}, " in out
    assert ") to stdout\n" in out
    assert ") to stderr\n" in err


def test_preloaded_module_is_in_the_worker_from_the_start(own_folders):
    with outside("--port", "0", "--preload", "colorsys"), gpulayer.connect():
        assert gpulayer.get(gpulayer.remote(lambda: "colorsys" in sys.modules).remote())


def test_shares_divide_the_devices_between_agents(own_folders, monkeypatch):
    gpus = tuple(Device("cuda", index, "a GPU", f"GPU-{index}") for index in range(3))
    monkeypatch.setattr(hardware, "find_gpus", lambda: gpus)
    found = []
    for number in (1, 2, 3, 4):
        with inside(share=(number, 4), record=f"r{number}") as host:
            found.append([device.index for device in host.agent.host.gpus])
            assert host.agent.host.devices[-1].kind == "cpu"
            assert host.agent.host.cpus == max(1.0, available_cpus() // 4)
    assert found == [[0], [1], [2], []]


def test_agent_survives_the_end_of_its_zygote_and_starts_another(own_folders):
    with outside("--port", "0") as agent, gpulayer.connect():

        def begin() -> tuple[int, int]:
            grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return os.getppid(), grandchild.pid

        zygote, grandchild = gpulayer.get(gpulayer.remote(begin).remote())
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: workers_of(agent.pid) == [] and is_gone(zygote), 5, "the end of the workers")
        wait_until(lambda: is_gone(grandchild), 5, "the end of what a worker had started")
        assert gpulayer.get(gpulayer.remote(os.getppid).options(num_cpus=0.5).remote(), timeout=20) not in (zygote, 1)
        assert psutil.pid_exists(agent.pid)


def test_output_waits_for_a_driver_that_does_not_take_it(host, driver, monkeypatch):
    monkeypatch.setattr("gpulayer.agent.agent.MAX_OUTPUT_CHARACTERS", 10_000)
    worker = driver.ask("lease", cpus=1, gpus=0, kind="actor", label="printer").body
    inside_view = host.agent.pool.workers[worker["worker"]]
    host.do(lambda: host.agent._on_lines(inside_view, "stdout", ["x" * 20_000]))
    assert host.do(lambda: inside_view.paused)
    driver.send(Message(Kind.TELL, 0, {"m": "ping"}))
    wait_until(lambda: not host.do(lambda: inside_view.paused), 5, "the output going on")


def test_agent_whose_starter_has_gone_ends_without_a_traceback(own_folders):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gpulayer.agent", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30, env=env)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
