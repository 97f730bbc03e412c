"""One device: bit for bit the plain PyTorch loop."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpulayer.train.trainer as trainer_module
from gpulayer.errors import UsageError
from gpulayer.train.module import LightningModule
from gpulayer.train.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Noisy(Dataset):
    """Draws from every global generator in __getitem__, as augmentations do."""

    def __init__(self, n=22):
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.rand()), self.y[i]


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def seed(n=7):
    torch.manual_seed(n)
    random.seed(n)
    np.random.seed(n)


def plain_loop(net, loader, make_optimizer, epochs=3, accumulate=1, clip=None):
    optimizer = make_optimizer(net.parameters())
    for _ in range(epochs):
        total = len(loader)
        for i, (x, y) in enumerate(loader):
            held = min(accumulate, total - i // accumulate * accumulate)
            if i % accumulate == 0:
                optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            (loss / held if held > 1 else loss).backward()
            if i % accumulate == held - 1:
                if clip == "norm":
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                if clip == "value":
                    nn.utils.clip_grad_value_(net.parameters(), 0.01)
                optimizer.step()
    return net


def assert_bit_equal(one, other):
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


CASES = [
    (SGD, {}, {}),
    (ADAMW, {}, {}),
    (ADAMW, {"num_workers": 2}, {}),
    (SGD, {}, {"accumulate": 4}),
    (SGD, {}, {"clip": "norm"}),
    (ADAMW, {"drop_last": True}, {"accumulate": 2, "clip": "value"}),
]


@pytest.mark.parametrize(("optimizer", "loading", "extra"), CASES)
@pytest.mark.parametrize("validate", [False, True])
def test_fit_is_bit_equal_to_plain_loop(optimizer, loading, extra, validate):
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, **loading)
    seed()
    expected = plain_loop(make_net_after_seed(), loader, optimizer, **extra)
    after = torch.rand(3), random.random(), np.random.rand()
    seed()
    net = make_net_after_seed()
    clip = {"norm": 0.1, "value": 0.01, None: None}[extra.get("clip")]
    trainer = Trainer(
        max_epochs=3,
        accumulate_grad_batches=extra.get("accumulate", 1),
        gradient_clip_val=clip,
        gradient_clip_algorithm=extra.get("clip"),
        **QUIET,
    )
    val = DataLoader(Noisy(9), batch_size=4, shuffle=True) if validate else None
    result = trainer.fit(net, loader, val, loss="cross_entropy", optimizer=optimizer)
    assert_bit_equal(net, expected)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == (after[0].tolist(), *after[1:])
    assert ("val_loss" in result.metrics) is validate


def make_net_after_seed():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def test_fit_is_bit_equal_for_an_optimizer_instance_and_a_loader_generator():
    def loader():
        return DataLoader(Noisy(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3))

    seed()
    expected = plain_loop(make_net(), loader(), ADAMW)
    seed()
    net = make_net()
    Trainer(max_epochs=3, **QUIET).fit(net, loader(), loss=nn.CrossEntropyLoss(), optimizer=ADAMW(net.parameters()))
    assert_bit_equal(net, expected)


def test_fit_is_bit_equal_for_a_lightning_module_with_a_step_scheduler():
    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True, on_epoch=True)
            return {"loss": loss}

        def configure_optimizers(self):
            optimizer = SGD(self.parameters())
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}

    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    seed()
    expected = make_net()
    optimizer = SGD(expected.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(expected(x), y).backward()
            optimizer.step()
            step += 1
            if step % 2 == 0:
                scheduler.step()
    seed()
    module = Net()
    trainer = Trainer(max_epochs=2, **QUIET)
    result = trainer.fit(module, loader)
    assert_bit_equal(module.net, expected)
    assert result.steps == trainer.global_step == step
    assert {"train_loss", "train_loss_epoch"} <= set(result.metrics)


def test_epoch_schedulers_step_before_validation_and_plateau_ones_after_it():
    class Net(LightningModule):
        def __init__(self, plateau):
            super().__init__()
            self.net, self.plateau, self.rates = make_net(), plateau, []

        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

        def on_validation_start(self):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            if self.plateau:
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            else:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    loader = DataLoader(Noisy(), batch_size=4)
    rates = {}
    for plateau in (False, True):
        module = Net(plateau)
        Trainer(max_epochs=3, **QUIET).fit(module, loader, loader)
        rates[plateau] = module.rates
    assert rates == {False: [0.5, 0.25, 0.125], True: [1.0, 1.0, 0.5]}


def test_fit_accumulates_over_an_iterable_without_length_as_over_one_with():
    batches = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(7)]

    class Stream:
        def __iter__(self):
            return iter(batches)

    nets = [make_net(), make_net()]
    for net, data in zip(nets, [batches, Stream()], strict=True):
        seed()
        Trainer(max_epochs=2, accumulate_grad_batches=3, **QUIET).fit(net, data, loss="cross_entropy", optimizer=SGD)
    assert_bit_equal(*nets)


def test_fit_with_seed_ends_with_the_same_weights_twice():
    nets = [make_net(), make_net()]
    for number, net in enumerate(nets):
        torch.manual_seed(number)
        Trainer(max_epochs=2, seed=11, **QUIET).fit(net, Noisy(), loss="cross_entropy", optimizer="adamw", batch_size=4)
    assert_bit_equal(*nets)


def test_fit_stops_at_max_steps_and_says_so():
    trainer = Trainer(max_steps=7, **QUIET)
    result = trainer.fit(make_net(), Noisy(), loss="cross_entropy", optimizer=SGD, batch_size=4)
    assert (result.steps, result.epochs, result.stopped) == (7, 2, "max_steps=7 reached")


def test_fit_trains_on_a_share_of_the_batches_when_limited():
    trainer = Trainer(max_epochs=2, limit_train_batches=0.5, limit_val_batches=1, **QUIET)
    result = trainer.fit(make_net(), Noisy(), Noisy(), loss="cross_entropy", optimizer=SGD, batch_size=4)
    assert result.steps == 2 * 3
    assert trainer.num_val_batches == [1]


def test_fit_moves_nothing_and_keeps_the_model_where_it_was():
    net = make_net()
    before = [id(p) for p in net.parameters()]
    Trainer(max_epochs=1, **QUIET).fit(net, Noisy(), loss="cross_entropy", optimizer=SGD)
    assert [id(p) for p in net.parameters()] == before


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", 64])
def test_fit_trains_in_every_precision(precision):
    net = nn.Linear(6, 3)
    before = net.weight.detach().clone()
    result = Trainer(max_epochs=2, precision=precision, gradient_clip_val=1.0, **QUIET).fit(
        net, TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,))), loss="cross_entropy", optimizer=SGD
    )
    assert result.metrics["train_loss"] > 0
    assert not torch.equal(before, net.weight.float())
    assert net.weight.dtype == {"bf16-true": torch.bfloat16, 64: torch.float64}.get(precision, torch.float32)


def test_fit_trains_a_model_that_computes_its_own_loss_from_a_dict():
    class Output:
        def __init__(self, loss):
            self.loss = loss

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x, labels):
            return Output(functional.cross_entropy(self.linear(x), labels))

    data = [{"x": torch.randn(4), "labels": i % 2} for i in range(8)]
    result = Trainer(max_epochs=1, **QUIET).fit(Model(), DataLoader(data, batch_size=4), optimizer="sgd")
    assert result.steps == 2


def test_fit_trains_an_object_that_is_no_module():
    class Thing:
        def __init__(self):
            self.net = nn.Linear(6, 3)

        def training_step(self, batch):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return SGD(self.net.parameters())

    thing = Thing()
    before = thing.net.weight.detach().clone()
    result = Trainer(max_epochs=1, **QUIET).fit(thing, Noisy())
    assert not torch.equal(before, thing.net.weight)
    assert "loss" in result.metrics
    assert not hasattr(thing, "log")


def test_fit_here_needs_no_runtime():
    import subprocess
    import sys

    code = (
        "import sys, torch; from gpulayer.train.trainer import Trainer\n"
        "net = torch.nn.Linear(2, 1)\n"
        "Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit("
        "net, [(torch.ones(2, 2), torch.ones(2, 1))], loss='mse', optimizer='sgd')\n"
        "bad = [m for m in sys.modules if m.startswith(('gpulayer.runtime', 'gpulayer.wire', 'zmq', 'rich'))]\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("epoch 1/1  step 1  train_loss ")


def test_trainer_refuses_an_unknown_argument_with_the_nearest_name():
    with pytest.raises(UsageError, match="did you mean 'max_epochs'"):
        Trainer(max_epoch=3)


def test_devices_here_counts_what_was_asked_for():
    assert trainer_module.Trainer(devices=2)._devices_here() == 2
    assert trainer_module.Trainer(accelerator="cpu")._devices_here() == 1
