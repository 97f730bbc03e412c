"""A fit in this process while a session is connected: `gpulayer top` shows it, and idle hosts are mentioned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gpulayer
from gpulayer.runtime import session as sessions
from gpulayer.train import onlookers
from tests.conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
BATCHES = [(torch.ones(2, 2), torch.ones(2, 1))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of a session with one host on this machine."""
    base = tmp_path_factory.mktemp("t")
    names = {"GPULAYER_HOME": str(base / "home"), "GPULAYER_RUNTIME_DIR": str(base / "run"), "GPULAYER_LOG": "warning"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        patch.delenv("GPULAYER_HOSTS", raising=False)
        gpulayer.connect(local=1)
        yield names
        gpulayer.disconnect()


def fit():
    return gpulayer.Trainer(max_epochs=2, **QUIET).fit(nn.Linear(2, 1), BATCHES, loss="mse", optimizer="sgd")


def idle_lines(caplog):
    return [record.getMessage() for record in caplog.records if "training runs in this process" in record.getMessage()]


def runs(folders):
    command = [sys.executable, "-m", "gpulayer.cli", "top", "--json"]
    env = {**os.environ, **folders, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    assert done.returncode == 0, done.stderr
    return [run for host in json.loads(done.stdout)["hosts"] for run in host["runs"]]


def test_top_shows_a_fit_in_this_process_and_hosts_here_are_not_mentioned(folders, caplog):
    assert fit().world_size == 1
    seen = []
    wait_until(lambda: (seen.append(runs(folders)) or seen[-1]) and seen[-1][0]["state"] == "finished", 30, "the run in top")
    assert len(seen[-1]) == 1
    assert (seen[-1][0]["name"], seen[-1][0]["ranks"], seen[-1][0]["max_steps"]) == ("fit", 1, 2)
    assert idle_lines(caplog) == []


@pytest.mark.parametrize(("endpoint", "is_away"), [("tcp://10.9.9.9:4500", True), ("tcp://127.0.0.1:4500", False)])
def test_hosts_elsewhere_that_a_fit_here_leaves_alone_are_mentioned_once(folders, caplog, monkeypatch, endpoint, is_away):
    session = sessions.current()
    (key, host) = next(iter(session.hosts.items()))
    channel = session.endpoint.channels[key]
    monkeypatch.setattr(channel, "dial", replace(channel.dial, endpoint=endpoint))
    fit()
    line = f"training runs in this process; the connected hosts ({host.name}) are used from devices=2 or num_nodes=2 on"
    assert idle_lines(caplog) == ([line] if is_away else [])


def test_a_session_that_has_ended_is_not_told(folders, monkeypatch):
    monkeypatch.setattr(sessions.current(), "closed", gpulayer.GPUlayerError("over"))
    assert onlookers.publisher() is None
