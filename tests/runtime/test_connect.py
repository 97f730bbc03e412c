from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

import gpulayer
from gpulayer.errors import AuthError, ConnectError, GetTimeoutError, UsageError
from gpulayer.runtime import records
from gpulayer.wire import keys
from tests.conftest import wait_until

FAKE_GPUS = """
    import sys
    from gpulayer.agent import __main__ as main, hardware
    from gpulayer.resources import Device
    hardware.find_gpus = lambda: tuple(
        Device("cuda", index, f"Fake {index}", uuid=f"GPU-{index}", memory_bytes=2**30) for index in range(2)
    )
    sys.exit(main.main())
"""


@pytest.fixture(autouse=True)
def disconnected(own_folders):
    yield
    gpulayer.disconnect()


@gpulayer.remote
def where():
    return os.getppid()


@gpulayer.remote
def devices():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def names():
    return [host.name for host in gpulayer.cluster().hosts]


def assert_no_sockets():
    """None to another process stays open; libzmq closes its own a moment after it was told."""
    wait_until(
        lambda: not [c for c in psutil.Process().net_connections("tcp") if c.status in ("ESTABLISHED", "SYN_SENT")],
        2,
        "the end of all connections",
    )


def test_connect_without_arguments_starts_an_agent_that_ends_with_the_session(own_folders):
    connection = gpulayer.connect()
    assert [record.embedded for record in records.read_all(own_folders / "run")] == [True]
    assert connection.hosts == gpulayer.cluster().hosts
    assert connection.hosts[0].name in repr(connection)
    assert gpulayer.get(where.remote()) != os.getpid()
    pid = connection.hosts[0].pid
    gpulayer.disconnect()
    assert not psutil.pid_exists(pid)


def test_connect_is_a_context_manager():
    with gpulayer.connect():
        assert gpulayer.get(where.remote())
    from gpulayer.runtime import session as sessions

    assert sessions.current_or_none() is None


def test_connect_without_arguments_prefers_the_agent_that_runs(start_agent):
    _, ready = start_agent("--port", "0", "--name", "mine")
    gpulayer.connect()
    assert names() == ["mine"]
    assert gpulayer.cluster().hosts[0].pid == ready["pid"]
    assert gpulayer.get(where.remote())


def test_first_remote_call_connects_by_itself():
    assert gpulayer.get(where.remote())
    assert len(names()) == 1


def test_connect_local_starts_so_many_agents(own_folders):
    gpulayer.connect(local=2)
    assert names() == ["local-1", "local-2"]
    assert len({gpulayer.get(where.options(host=name).remote()) for name in names()}) == 2


def test_connect_to_a_list_of_addresses(start_agent):
    ports = [start_agent("--port", "0", "--name", name)[1]["port"] for name in ("a", "b")]
    gpulayer.connect([f"127.0.0.1:{port}" for port in ports])
    assert names() == ["a", "b"]
    parents = [gpulayer.get(where.options(host=name).remote()) for name in ("a", "b", f"127.0.0.1:{ports[1]}")]
    assert parents[0] != parents[1] == parents[2]
    gpulayer.disconnect()
    gpulayer.connect([f"127.0.0.1:{ports[0]}"])  # it still runs
    assert names() == ["a"]


def test_connect_to_a_named_list_and_to_what_the_environment_says(start_agent, own_folders, monkeypatch):
    ports = [start_agent("--port", "0", "--name", name)[1]["port"] for name in ("a", "b")]
    (own_folders / "home").mkdir(exist_ok=True)
    (own_folders / "home" / "hosts").write_text(f"# mine\nlab: 127.0.0.1:{ports[0]}, 127.0.0.1:{ports[1]}\n")
    gpulayer.connect("lab")
    assert names() == ["a", "b"]
    gpulayer.disconnect()
    for value, expected in (("lab", ["a", "b"]), (f"127.0.0.1:{ports[1]}", ["b"])):
        monkeypatch.setenv("GPULAYER_HOSTS", value)
        gpulayer.connect()
        assert names() == expected
        gpulayer.disconnect()


def test_calls_take_the_gpus_that_they_ask_for(start_agent):
    _, ready = start_agent("--port", "0", "--name", "gpus", "--cpus", "4", source=FAKE_GPUS)
    gpulayer.connect([f"127.0.0.1:{ready['port']}"])
    host = gpulayer.cluster().hosts[0]
    assert [gpu.name for gpu in host.gpus] == ["Fake 0", "Fake 1"]
    assert gpulayer.get(devices.remote()) == ""
    assert gpulayer.get(devices.options(num_gpus=1).remote()) in ("GPU-0", "GPU-1")
    assert sorted(gpulayer.get(devices.options(num_gpus=2).remote()).split(",")) == ["GPU-0", "GPU-1"]


def test_actors_share_a_device_by_fractions_and_wait_when_none_is_free(start_agent):
    @gpulayer.remote(num_gpus=0.5)
    class Half:
        def devices(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    _, ready = start_agent("--port", "0", "--name", "gpus", "--cpus", "4", source=FAKE_GPUS)
    gpulayer.connect([f"127.0.0.1:{ready['port']}"])
    halves = [Half.remote() for _ in range(4)]
    assert sorted(gpulayer.get([half.devices.remote() for half in halves])) == ["GPU-0", "GPU-0", "GPU-1", "GPU-1"]
    late = devices.options(num_gpus=1).remote()
    with pytest.raises(GetTimeoutError):
        gpulayer.get(late, timeout=0.3)
    freed = gpulayer.get(halves[0].devices.remote())
    for half in halves:
        if gpulayer.get(half.devices.remote()) == freed:
            gpulayer.kill(half)
    assert gpulayer.get(late, timeout=10) == freed


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((["a"],), {"local": 2}, "not both"),
        ((), {"local": 0}, "local=0"),
        ((), {"local": True}, "local=True"),
        (([],), {}, "list of host names"),
        (([3],), {}, "list of host names"),
        ((["a", "a"],), {}, "listed twice"),
        (("nolist",), {}, r"connect\(\[\"nolist\"\]\)"),
        ((["bad name"],), {}, "is not a host"),
        ((["host:99999"],), {}, "is not a host"),
        ((["ssh://me@gpu1"],), {}, "ssh"),
    ],
)
def test_connect_that_cannot_work_is_refused_at_once(arguments, options, says):
    with pytest.raises(UsageError, match=says):
        gpulayer.connect(*arguments, **options)


def test_connect_twice_is_refused_and_disconnect_twice_is_not():
    gpulayer.connect()
    with pytest.raises(UsageError, match=r"connected already; call gpulayer\.disconnect\(\)"):
        gpulayer.connect()
    gpulayer.disconnect()
    gpulayer.disconnect()


def test_disconnect_inside_a_worker_is_refused():
    with pytest.raises(UsageError, match="inside a worker"):
        gpulayer.get(gpulayer.remote(gpulayer.disconnect).remote())


def test_same_agent_twice_is_refused(start_agent):
    _, ready = start_agent("--port", "0", "--name", "a")
    with pytest.raises(UsageError, match="same agent, listed twice"):
        gpulayer.connect([f"127.0.0.1:{ready['port']}", f"localhost:{ready['port']}"])
    assert_no_sockets()


def test_port_where_nothing_listens_says_what_to_type():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectError, match=rf"nothing listens at tcp://127\.0\.0\.1:{port}.*gpulayer up"):
        gpulayer.connect([f"127.0.0.1:{port}"])
    assert_no_sockets()


def test_unknown_host_name_is_named():
    with pytest.raises(ConnectError, match=r"no-such-host\.invalid.*no such host"):
        gpulayer.connect(["no-such-host.invalid"])


def test_host_that_does_not_answer_is_given_up_in_time():
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # Linux drops what comes when so few wait already, as a firewall would
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        started = time.monotonic()
        with pytest.raises(ConnectError, match=r"does not answer .*waited 0\.5 s.*firewall"):
            gpulayer.connect([f"127.0.0.1:{full.getsockname()[1]}"], timeout=0.5)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b""], ids=["talks", "is silent"])
def test_other_program_on_the_port_is_told_apart(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            other, _ = server.accept()
            with other:
                other.sendall(said)
                other.recv(1000)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConnectError, match="another program listens"):
            gpulayer.connect([f"127.0.0.1:{server.getsockname()[1]}"])
        thread.join(5)


def test_agent_that_does_not_know_our_key_says_what_to_type(start_agent, own_folders, tmp_path):
    _, ready = start_agent("--port", "0", "--name", "strict", GPULAYER_HOME=str(tmp_path / "theirs"))
    address = f"127.0.0.1:{ready['port']}"
    with pytest.raises(AuthError, match="keys"):  # we do not know its key either
        gpulayer.connect([address], timeout=5)
    keys.trust_host(own_folders / "home", address, keys.load_identity(tmp_path / "theirs").public)
    with pytest.raises(AuthError, match="gpulayer keys add"):
        gpulayer.connect([address], timeout=5)
    assert_no_sockets()


def test_failed_connect_leaves_no_process_and_can_be_tried_again(start_agent, own_folders):
    _, ready = start_agent("--port", "0", "--name", "good")
    good = f"127.0.0.1:{ready['port']}"
    with pytest.raises(ConnectError):
        gpulayer.connect([good, "127.0.0.1:1"])
    assert_no_sockets()
    gpulayer.connect([good])
    assert names() == ["good"]


def test_agent_that_cannot_start_is_an_error(own_folders, monkeypatch):
    monkeypatch.setenv("GPULAYER_RUNTIME_DIR", str(own_folders / ("x" * 120)))
    with pytest.raises(ConnectError, match="did not start on this machine"):
        gpulayer.connect()


# --- Ctrl-C


def output_until(process, mark):
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if mark in line:
            return lines
    raise AssertionError(f"{mark!r} never came: {lines} {process.stderr.read()}")


def test_ctrl_c_in_get_cancels_and_leaves_the_session_usable(start_script):
    process = start_script("""
        import gpulayer, os, time
        gpulayer.connect()
        @gpulayer.remote
        def slow():
            print("started")
            time.sleep(60)
        ref = slow.remote()
        try:
            gpulayer.get(ref)
        except KeyboardInterrupt:
            print("interrupted")
        try:
            gpulayer.get(ref, timeout=5)
        except gpulayer.errors.TaskCancelledError:
            print("cancelled")
        print(gpulayer.get(gpulayer.remote(lambda: 41 + 1).remote(), timeout=10))
    """)
    output_until(process, "started")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=15)
    assert (process.returncode, out.split()) == (0, ["interrupted", "cancelled", "42"]), err


def test_ctrl_c_that_nobody_catches_ends_everything(start_script, own_folders):
    process = start_script("""
        import gpulayer, time
        gpulayer.connect(local=2)
        @gpulayer.remote
        def slow():
            print("started")
            time.sleep(60)
        gpulayer.get([slow.remote(), slow.remote()])
    """)
    output_until(process, "started")
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 5
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert err.strip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(child.is_running() for child in below), 5, "the end of agents and workers")


@pytest.mark.parametrize("delay_s", [0.05, 0.3])
def test_ctrl_c_in_connect_leaves_nothing(start_script, own_folders, delay_s):
    process = start_script("""
        import gpulayer
        gpulayer.connect
        print("now")
        try:
            while True:
                gpulayer.connect(local=2)
                gpulayer.disconnect()
        except KeyboardInterrupt:
            print("interrupted")
    """)
    output_until(process, "now")
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=15)
    assert out.split() == ["interrupted"], err
    wait_until(lambda: records.read_all(own_folders / "run") == [], 5, "no agents")


def test_ctrl_c_while_pickling_leaves_the_session_usable(start_script):
    process = start_script("""
        import gpulayer, time
        gpulayer.connect()
        @gpulayer.remote
        def f(x):
            return "ran"
        class Slow:
            def __reduce__(self):
                print("pickling")
                time.sleep(60)
        try:
            f.remote(Slow())
        except KeyboardInterrupt:
            print("interrupted")
        print(gpulayer.get(f.remote(bytes(20_000_000)), timeout=10))
    """)
    output_until(process, "pickling")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=15)
    assert (process.returncode, out.split()) == (0, ["interrupted", "ran"]), err


def test_program_that_is_killed_leaves_nothing(start_script, own_folders):
    process = start_script("""
        import gpulayer, time
        gpulayer.connect()
        @gpulayer.remote
        def slow():
            print("started")
            time.sleep(60)
        gpulayer.get(slow.remote())
    """)
    output_until(process, "started")
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    wait_until(lambda: not any(child.is_running() for child in below), 10, "the end of agent and workers")


def test_first_calls_of_several_threads_connect_once(run_script):
    done = run_script("""
import threading, gpulayer
barrier, results = threading.Barrier(4), []
def call():
    barrier.wait()
    results.append(gpulayer.get(gpulayer.remote(lambda: 42).remote()))
threads = [threading.Thread(target=call) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(results)
""")
    assert done.stdout.strip() == "[42, 42, 42, 42]", done.stderr
