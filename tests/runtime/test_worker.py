from __future__ import annotations

import os
import sys
import threading
import time

import pytest

import gpulayer

pytestmark = pytest.mark.usefixtures("shared")


@gpulayer.remote(num_cpus=0.5)
def run(function, *args):
    return function(*args)


def call(function, *args):
    return gpulayer.get(run.remote(function, *args), timeout=20)


def test_user_code_runs_on_the_main_thread():
    assert call(lambda: threading.current_thread() is threading.main_thread())


def test_folder_is_empty_and_of_this_worker_alone():
    assert call(lambda: os.listdir()) == []
    assert call(os.getcwd) != os.getcwd()


def test_environment_names_no_gpu_that_was_not_leased():
    assert call(lambda: os.environ.get("CUDA_VISIBLE_DEVICES")) == ""


def test_torch_uses_as_many_threads_as_cpus_leased():
    def threads():
        import torch

        return torch.get_num_threads()

    assert call(threads) == 1


def test_forked_child_in_a_worker_works_and_leaves_the_session_usable():
    def fork():
        import multiprocessing

        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        processes = [context.Process(target=lambda i=i: queue.put(i * i)) for i in range(3)]
        for process in processes:
            process.start()
        found = sorted(queue.get() for _ in processes)
        for process in processes:
            process.join(5)
        return found, [process.exitcode for process in processes]

    assert call(fork) == ([0, 1, 4], [0, 0, 0])
    assert call(os.getpid) > 0


def test_data_loader_with_workers_runs_in_a_worker():
    def load():
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=1)
        return float(sum(batch[0].sum() for batch in loader))

    assert call(load) == 28.0


def test_what_a_task_starts_ends_with_its_worker():
    import subprocess

    from tests.conftest import is_gone, wait_until

    @gpulayer.remote
    class Starter:
        def start(self):
            return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

    starter = Starter.remote()
    pid = gpulayer.get(starter.start.remote())
    gpulayer.kill(starter)
    wait_until(lambda: is_gone(pid), 3, "the end of the grandchild")


def test_print_shows_in_the_driver_with_who_said_it(capfd):
    def speaker():
        print("hello there")
        print("to stderr", file=sys.stderr)
        os.write(1, b"raw\n")

    call(speaker)
    deadline = time.monotonic() + 5
    out = err = ""
    while ("raw" not in out or "to stderr" not in err) and time.monotonic() < deadline:
        more = capfd.readouterr()
        out, err = out + more.out, err + more.err
    assert f"(run pid={gpulayer.get(run.remote(os.getpid))}, " in out
    assert ") hello there\n" in out
    assert ") raw\n" in out
    assert ") to stderr\n" in err


def test_print_just_before_disconnect_is_not_lost(run_script):
    done = run_script(
        """
import sys, gpulayer
gpulayer.connect()
@gpulayer.remote
def speak():
    for i in range(200):
        print("line", i)
    sys.stdout.write("the last, without an end")
@gpulayer.remote
class Actor:
    def speak(self):
        print("an actor speaks", flush=True)
actor = Actor.remote()
gpulayer.get([speak.remote(), actor.speak.remote()])
gpulayer.disconnect()
"""
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(") ")[2] for line in done.stdout.splitlines()]
    assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(200)]
    assert "the last, without an end" in lines
    assert "an actor speaks" in lines
    assert done.stdout.count("(Actor pid=") == 1


def test_print_of_a_program_that_just_ends_is_not_lost(run_script):
    done = run_script(
        """
import gpulayer
@gpulayer.remote
def speak():
    print("before the end")
gpulayer.get(speak.remote())
"""
    )
    assert done.returncode == 0, done.stderr
    assert ") before the end" in done.stdout
    assert done.stderr == ""


def test_output_is_labelled_with_the_task_that_printed_it(run_script):
    done = run_script("""
import gpulayer
@gpulayer.remote
def first(): print("one")
@gpulayer.remote
def second(): print("two")
with gpulayer.connect():
    gpulayer.get(first.remote())
    gpulayer.get(second.remote())
""")
    said = sorted(line.split(" ")[0] + " " + line.split(" ")[-1] for line in done.stdout.splitlines())
    assert said == ["(first one", "(second two"], done.stderr
