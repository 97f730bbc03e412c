"""Watching the loss for NaN, at no cost a step: losses are kept as they are and looked at together, now and then."""

from __future__ import annotations

import torch

MOST_KEPT = 1024  # scalars kept between two looks


class LossWatch:
    """Finds the first step whose loss was NaN."""

    def __init__(self) -> None:
        self.nan_step: int | None = None
        self._told = False
        self._kept: list[tuple[int, torch.Tensor]] = []

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Keep the loss of optimizer step `step`."""
        if self.nan_step is None:
            self._kept.append((step, loss.detach()))
            if len(self._kept) >= MOST_KEPT:
                self._look()

    def news(self) -> int | None:
        """Look (this waits for the device). The first step with a NaN, told once; else None."""
        self._look()
        if self.nan_step is None or self._told:
            return None
        self._told = True
        return self.nan_step

    def _look(self) -> None:
        kept, self._kept = self._kept, []
        if kept and self.nan_step is None:
            found = torch.isnan(torch.stack([loss.reshape(()) for _, loss in kept])).tolist()
            self.nan_step = next((step for (step, _), nan in zip(kept, found, strict=True) if nan), None)
