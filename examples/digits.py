"""Train a small CNN on real handwritten digits, over two hosts' worth of workers on this machine.

    pip install '.[examples]' && python examples/digits.py

With more machines, run `gpulayer up` on each and write gpulayer.connect(["gpu1", "gpu2"]) instead.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpulayer


def load_data():
    digits = load_digits()  # 1797 images of 8 x 8 pixels; every fifth one is kept for the test
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10)),
    )


def main():
    gpulayer.seed_everything(1)
    train, test = load_data()
    model = make_model()
    with gpulayer.connect(local=2):
        for host in gpulayer.cluster().hosts:
            print(f"host {host.name}: {host.cpus:g} CPU, {len(host.gpus)} GPU, torch {host.versions['torch']}")
        trainer = gpulayer.Trainer(num_nodes=2, max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False)
        result = trainer.fit(
            model,
            DataLoader(train, batch_size=32, shuffle=True),
            DataLoader(test, batch_size=256),
            loss="cross_entropy",
            optimizer=partial(torch.optim.AdamW, lr=3e-3),
            metrics="accuracy",
        )
    with torch.no_grad():  # the trained weights are in the caller's model
        images, labels = test.tensors
        accuracy = (model.eval()(images).argmax(1) == labels).float().mean().item()
    print(f"trained on {result.world_size} workers: {result.steps} steps, {result.samples_s:.0f} samples/s")
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    assert main() >= 0.97, "below 97%: this should not happen"
