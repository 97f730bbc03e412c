"""A module written for the real Lightning, unchanged, through GPUlayer's Trainer: in this process and over two hosts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gpulayer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning warns of on import is its own business
    pl = pytest.importorskip("pytorch_lightning", reason="needs pip install pytorch-lightning: the real one, to compare with")
    torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::pytorch_lightning"), pytest.mark.timeout(120)]


class Net(pl.LightningModule):
    def __init__(self, width=8, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
        self.right = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.right(scores, batch[1])
        self.log("right", self.right)
        self.log_dict({"val_loss": functional.cross_entropy(scores, batch[1])}, sync_dist=True)

    def on_train_epoch_end(self):
        assert self.optimizers().param_groups[0]["lr"] == pytest.approx(self.hparams.lr * 0.9 ** (self.current_epoch + 1))
        self.print(f"epoch {self.current_epoch} of rank {self.global_rank} on {self.device} after {self.global_step} steps")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}}


class Data(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(2)
        self.set = TensorDataset(torch.randn(46, 5, generator=generator), torch.randint(0, 3, (46,), generator=generator))

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=self.batch_size)  # a shuffled order Lightning draws in a way of its own

    def val_dataloader(self):
        return DataLoader(self.set, batch_size=self.batch_size)


class Notes(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append((trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def fit(make_trainer, batch_size, **options):
    torch.manual_seed(0)
    net, notes = Net(), Notes()
    torch.manual_seed(9)
    trainer = make_trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                           accelerator="cpu", callbacks=[notes], **options)  # fmt: skip
    trainer.fit(net, datamodule=Data(batch_size))
    return net, notes.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def by_lightning():
    return fit(pl.Trainer, 8, num_sanity_val_steps=0, enable_model_summary=False)


def assert_same(ours, theirs, atol):
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.allclose(a, b, atol=atol, rtol=0)
    assert [seen[:2] for seen in ours[1]] == [seen[:2] for seen in theirs[1]]
    for name in ("train_loss_epoch", "val_loss", "right"):
        assert ours[2][name] == pytest.approx(theirs[2][name], abs=1e-5)


def test_module_trains_as_in_lightning(by_lightning):
    assert_same(fit(gpulayer.Trainer, 8), by_lightning, 0.0)


def test_module_trains_over_two_hosts_as_in_lightning_on_the_doubled_batch(by_lightning, two_hosts, capfd):
    ours = fit(gpulayer.Trainer, 4, num_nodes=2)
    assert_same(ours, by_lightning, 1e-5)
    said = capfd.readouterr().out
    assert said.count("epoch 1 of rank 0 on cpu after 12 steps") == 1
    assert "of rank 1" not in said


def test_module_goes_back_to_lightning_after_a_run(by_lightning, tmp_path):
    net = Net()
    trainer = gpulayer.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    result = trainer.fit(net, datamodule=Data(8))
    again = Net.load_from_checkpoint(result.best_model_path)
    assert torch.equal(again.net[0].weight, net.net[0].weight)
    pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
               enable_model_summary=False).fit(net, datamodule=Data(8))  # fmt: skip
    assert not torch.equal(again.net[0].weight, net.net[0].weight)
