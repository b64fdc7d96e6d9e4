"""halo: each rank receives the edges of its neighbours, as torch.chunk has them."""

from __future__ import annotations

import itertools

import pieces
import pytest
import torch

from shardfn import _compat
from shardfn.ops.halo import halo
from shardfn.partition import Plan, layout
from shardfn.partition import plan as steps
from shardfn.partition.redistribute import route
from shardfn.types import MeshPlacements
from tests.support.stages.exchange import exchanged

FLOAT = 8  # bytes


def halves(size: int, mark: tuple[int, int, int, int], n: int) -> tuple[Plan, torch.Tensor]:
    """The plan that brings (size, 2), cut on dim 0 over n ranks, to its chunks with a halo."""
    x = torch.arange(2.0 * size, dtype=torch.float64).view(size, 2)
    fake, axes = _compat.FakeTensorMode().from_tensor(x), pieces.mesh_axes((n,))
    src, dst = (layout.canonical(x.shape, (m,), (n,)) for m in (layout.joined(*mark[:2]), mark))
    _, moves = route(tuple(x.shape), FLOAT, src, dst, axes)
    source, target = steps.Slot(0, fake, src), steps.Slot(1, fake, dst)
    step = steps.Redistribute(torch.fx.Graph().placeholder("x"), source, target, moves, False)
    return Plan(axes=axes, steps=(step,), ins=(source,), outs=(target,)), x


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_halo_is_the_edges_of_the_neighbours_and_zeros_at_the_ends(n: int) -> None:
    for size, unit, before, after in itertools.product((6, 7, 9), (1, 3), (0, 1), (0, 1)):
        if size % unit == 0 and before + after:
            plan, x = halves(size, (0, unit, before, after), n)
            wanted = pieces.cut(x, plan.outs[0].placements, (n,))
            for got, chunk in zip(
                pieces.run_plan(plan, [pieces.cut(x, plan.ins[0].placements, (n,))])[0],
                wanted,
                strict=True,
            ):
                assert torch.equal(got, chunk), (
                    f"{size} in units of {unit} over {n}: {got}, not {chunk}"
                )


def test_a_halo_fits_the_chunks_it_comes_from_and_its_dim_is_cut_once() -> None:
    fits: dict[MeshPlacements, bool] = {
        ((0, 1, 3, 3), "R"): True, ((0, 1, 4, 0), "R"): False, ((0, 1, 1, 1), 1): True,
        ((0, 1, 1, 1), 0): False, (0, (0, 1, 1, 1)): False, ((0, 4, 1, 1), "R"): False,
    }  # fmt: skip
    assert {marks: layout.canonical((6, 4), marks, (2, 2)) is not None for marks in fits} == fits


def test_the_op_takes_from_the_neighbours_and_leaves_zeros_at_the_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank sends one element back and two on."""
    mine = lambda rank: torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
    got = exchanged(monkeypatch, lambda rank: halo(mine(rank), 2, "g"), 3)
    assert [x.tolist() for x in got] == [[0, 0, 11], [2, 3, 21], [12, 13, 0]]
