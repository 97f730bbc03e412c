"""Train a small GPT on real text: the source code of Python's own standard library, character by character.

python examples/stdlib_gpt.py
"""

import ast
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gpulayer

CONTEXT = 64
TEXT = "".join(Path(module.__file__).read_text() for module in (json.decoder, json.encoder, ast))
CHARS = sorted(set(TEXT))


class GPT(gpulayer.LightningModule):
    def __init__(self, width=96, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(len(CHARS), width)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens):
        hidden = self.token(tokens) + self.place[: tokens.shape[1]]
        mask = self.mask[: tokens.shape[1], : tokens.shape[1]]
        return self.blocks(hidden, mask=mask, is_causal=True) @ self.token.weight.T

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    gpulayer.seed_everything(0)
    ids = torch.tensor([CHARS.index(char) for char in TEXT])
    windows = ids.unfold(0, CONTEXT + 1, CONTEXT)  # (windows, context + 1), no two overlap but in one character
    model = GPT()
    trainer = gpulayer.Trainer(max_steps=100, accelerator="cpu", logger=False, enable_checkpointing=False)
    result = trainer.fit(model, DataLoader(windows, batch_size=32, shuffle=True))
    loss, chance = result.metrics["loss"], math.log(len(CHARS))
    print(f"{len(TEXT)} characters, {result.steps} steps, loss {loss:.2f} (guessing: {chance:.2f})")
    return loss


if __name__ == "__main__":
    main()
