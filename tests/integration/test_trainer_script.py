"""Whole scripts: what they define is in `__main__`, and they end as scripts do."""

from __future__ import annotations

import os

import pytest

SOURCE = """
import copy, sys, time
import psutil, torch
from torch.utils.data import DataLoader, TensorDataset
import gpulayer
from gpulayer.errors import PlacementError

class Mark:
    def __init__(self, text):
        self.text = text

class Net(gpulayer.LightningModule):
    def __init__(self, act):
        super().__init__()
        self.net, self.act = torch.nn.Linear(5, 3), act
    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.act(self.net(batch[0])), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

class Notes(gpulayer.Callback):
    def on_train_end(self, trainer, pl_module):
        self.mark = Mark(f"{trainer.local_rank} {trainer.node_rank} {trainer.num_devices}")

def fit(net, batch_size, **options):
    torch.manual_seed(9)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=workers)
    return gpulayer.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, **options).fit(net, loader)

def same(one, two):
    return all(torch.allclose(a, b, atol=1e-5, rtol=0) for a, b in zip(one.parameters(), two.parameters()))

torch.manual_seed(0)
workers = 0
data = TensorDataset(torch.randn(22, 5), torch.randint(0, 3, (22,)))
scale = torch.tensor(0.5)
one = Net(lambda x: x * scale)
two = copy.deepcopy(one)
fit(one, 8)
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
def test_two_devices_of_one_host_train_what_a_script_defines(run_script):
    done = run_script(
        SOURCE
        + """
notes, workers = Notes(), 2
result = fit(two, 4, devices=2, callbacks=[notes])
print(same(one, two), result.world_size, result.steps, type(notes.mark) is Mark, notes.mark.text)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True 2 6 True 0 0 2\n"
    assert "epoch 2/2  step 6  loss" in done.stderr


@pytest.mark.slow
def test_two_nodes_without_a_session_are_an_error_that_says_how_and_leaves_nothing(run_script):
    done = run_script(
        SOURCE
        + """
try:
    fit(two, 4, num_nodes=2)
except PlacementError as error:
    print(error)
print("below:", [child.cmdline() for child in psutil.Process().children()])
with gpulayer.connect(local=2):
    print(fit(two, 4, num_nodes=2).world_size, same(one, two))
"""
    )
    assert done.returncode == 0, done.stderr
    assert "needs 2 host(s)" in done.stdout
    assert "connect(local=2)" in done.stdout
    assert done.stdout.endswith("below: []\n2 True\n")
    assert "Traceback" not in done.stderr
