"""The random numbers of a pass over the data: the same on every rank and in a resumed run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch


class Draws:
    """The states of torch's and Python's default generators as a pass over the data finds them, for
    samplers without a generator of their own.

    Args:
        seed: of the loader.
        epoch: the number of the pass.
        use: other uses have other numbers.
    """

    def __init__(self, seed: int, epoch: int, use: str = "samples") -> None:
        self.seed, self.epoch = seed, epoch
        of_python = random.Random(f"{seed} {epoch} {use}")
        of_torch = torch.Generator().manual_seed(of_python.getrandbits(62))
        self.state = of_torch.get_state(), of_python.getstate()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Install these generator states as the defaults inside this context."""
        before = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(self.state[0])
        random.setstate(self.state[1])
        try:
            yield
        finally:
            self.state = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
