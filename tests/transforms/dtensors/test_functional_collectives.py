"""Collectives that return their results: the ops behind them, and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf

ROWS = [torch.arange(4.0) + 10 * k for k in range(4)]
OPS = torch.ops._c10d_functional


def test_s7_3_ops_by_the_name_of_a_group() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        name, world = mesh.get_group("tp").group_name, dist.group.WORLD.group_name

        def fn(x: Any) -> Any:
            return (
                OPS.wait_tensor(OPS.all_reduce(x, "sum", world)),
                OPS.all_gather_into_tensor.default(x, 2, name),
                OPS.reduce_scatter_tensor(x, "avg", 2, name),
                OPS.all_to_all_single(x, [2, 2], [2, 2], name),
            )

        total, rows, part, parts = sf.jit(fn, backend="aten")(SimulatedTensor(ROWS))
    assert_close(total.shards, [sum(ROWS)] * 4)
    pairs = [ROWS[:2], ROWS[:2], ROWS[2:], ROWS[2:]]
    assert_close(rows.shards, [torch.cat(pair) for pair in pairs])
    means = [(a + b) / 2 for a, b in pairs]
    wanted = [mean[2 * (k % 2) :][:2] for k, mean in enumerate(means)]
    assert_close(part.shards, wanted)
    halves = [[x[2 * (k % 2) :][:2] for x in pairs[k]] for k in range(4)]
    assert_close(parts.shards, [torch.cat(h) for h in halves])


def test_derivatives_of_coalesced_and_permuted_tensors() -> None:
    with sf.fake_world(2):
        group = sf.make_mesh((2,), ("dp",)).get_group()

        def loss(x: Any) -> Any:
            (total,) = functional.all_reduce_coalesced([x.sin()], "sum", group)
            other = functional.permute_tensor(x, [1, 0], group)
            return (total * other).sum() * (1 + dist.get_rank())

        found = sf.jit(sf.grad(loss), backend="aten")(SimulatedTensor(ROWS[:2]))

    def plain(x: Any) -> Any:
        total = x.sin().sum(0)
        return (total * x[1]).sum() + 2 * (total * x[0]).sum()

    wanted = torch.func.grad(plain)(torch.stack(ROWS[:2]))
    assert_close(found.shards, [*wanted])
