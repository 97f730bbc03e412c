"""Random numbers: seed all generators, keep their state, and run a piece of code without moving them."""

from __future__ import annotations

import logging
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpulayer.errors import UsageError
from gpulayer.train.refusal import refuse_others

log = logging.getLogger(__name__)


def seed_everything(seed: Any, workers: bool = False, verbose: bool = True, **unknown: Any) -> int:
    """Seed Python, NumPy and torch (every device), and return the seed.

    `workers` changes nothing: torch itself seeds all three in the workers of a DataLoader, each apart, from what is seeded here.
    `verbose` logs the seed at level INFO.
    """
    refuse_others("seed_everything", unknown, ("seed", "workers", "verbose"), {})
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise UsageError(f"seed_everything(seed={seed!r}): pass a whole number")
    seed = int(seed)
    if verbose:
        log.info("seed set to %d", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


@dataclass
class RngState:
    """The state of the global generators: Python's, NumPy's, torch's on the CPU and on the current CUDA device."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None = None

    @classmethod
    def capture(cls) -> RngState:
        """The state as it is now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Make the global generators continue from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)


@contextmanager
def isolated_rng() -> Generator[None, None, None]:
    """What is drawn inside does not show outside."""
    before = RngState.capture()
    try:
        yield
    finally:
        before.restore()


class RngStream:
    """A stream of random numbers apart from the global one; inside `active()` the global generators are this stream.

    Every rank keeps such a stream from the same state, and so all of them see what one process would have drawn.
    """

    def __init__(self, state: RngState) -> None:
        self._state = state

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """The global generators continue this stream inside, and their own outside."""
        with isolated_rng():
            self._state.restore()
            try:
                yield
            finally:
                self._state = RngState.capture()
