"""Graphs that differ in sizes alone: skeletons, formulas, and programs that they share."""

from __future__ import annotations

import torch
from stagings import counts
from torch import Tensor

import shardfn as sf

D = torch.float64


def weighed(x: Tensor) -> Tensor:
    n = x.shape[0]
    return (x * torch.arange(n)[:, None]).sum(0) / n


def test_inductor_compiles_twice_for_all_sizes() -> None:
    step = sf.jit(weighed, dynamic=0)
    compiled = []
    for n in (4, 6, 8, 7):
        before = counts["compilations"]
        x = torch.randn(n, 3, dtype=D)
        torch.testing.assert_close(step(x), weighed(x))
        compiled.append(counts["compilations"] - before)
    assert compiled == [1, 1, 0, 0]
