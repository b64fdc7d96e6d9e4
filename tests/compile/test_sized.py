"""Graphs that differ in sizes alone: skeletons, formulas, and programs that they share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def test_pools_of_all_sizes_are_those_of_torch() -> None:
    pools = {
        "max": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
        "area": lambda x: F.interpolate(x, size=(3, 3), mode="area"),
    }
    for name, pool in pools.items():
        for repeat in range(2):  # the second finds what the first has compiled
            step = sf.jit(lambda x, pool=pool: pool(x).sin(), dynamic=({2, 3},))
            for n in (8, 10, 9, 7, 12):
                x = torch.randn(1, 2, n, n, dtype=D)
                wanted = pool(x).sin()
                torch.testing.assert_close(step(x), wanted, msg=f"{name} {repeat} {n}")
