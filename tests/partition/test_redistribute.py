"""Redistributions: every route ends in exactly the pieces that the target says, by the cheapest
moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pieces
import pytest
import torch
from effort import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from shardfn import _compat
from shardfn.partition import Plan, layout
from shardfn.partition import plan as steps
from shardfn.partition.redistribute import Move, axis_price, price, route
from shardfn.types import PARTIAL_KINDS, AxisPlacement, Cost, MeshPlacements

MESHES = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))
SIZES = st.integers(0, 7) | st.sampled_from((6, 8, 9, 12, 18, 24))
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
Case = tuple[tuple[int, ...], tuple[int, ...], MeshPlacements, MeshPlacements]


def moves(
    shape: Sequence[int], src: MeshPlacements, dst: MeshPlacements, sizes: Sequence[int]
) -> tuple[Move, ...]:
    found = route(tuple(shape), 8, src, dst, pieces.mesh_axes(sizes))
    assert found is not None, f"no way from {src} to {dst} for {tuple(shape)} on {tuple(sizes)}"
    return found[1]


def kinds(
    shape: Sequence[int], src: MeshPlacements, dst: MeshPlacements, sizes: Sequence[int]
) -> list[str]:
    return [m.kind for m in moves(shape, src, dst, sizes)]


def moved(
    x: torch.Tensor, src: MeshPlacements, dst: MeshPlacements, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Every rank's piece after a redistribution."""
    mode = _compat.FakeTensorMode()
    fake = mode.from_tensor(x)
    source, target = steps.Slot(0, fake, src), steps.Slot(1, fake, dst)
    node = torch.fx.Graph().placeholder("x")
    step = steps.Redistribute(node, source, target, moves(x.shape, src, dst, sizes), False)
    plan = Plan(axes=pieces.mesh_axes(sizes), steps=(step,), ins=(source,), outs=(target,))
    return pieces.run_plan(plan, [pieces.cut(x, src, sizes)])[0]


@st.composite
def marks(
    draw: st.DrawFn, shape: tuple[int, ...], sizes: tuple[int, ...], pending: MeshPlacements
) -> MeshPlacements:
    """Marks that fit a shape; `pending` says for each axis which pending reduction it may have."""
    out: list[AxisPlacement] = []
    for k in range(len(sizes)):
        offered: list[AxisPlacement] = ["R", *pending[k : k + 1]] if pending else ["R"]
        dims = [
            layout.joined(d, u, outer=o)
            for d in range(len(shape))
            for u, o in ((1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (1, -2), (1, -4))
        ]
        mark = draw(st.sampled_from(offered + dims))
        plain = layout.canonical(shape, (*out, mark), sizes[: k + 1])
        out = list(plain) if plain is not None else [*out, "R"]
    return tuple(out)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape, sizes, op = (
        draw(SHAPES),
        draw(st.sampled_from(MESHES)),
        draw(st.sampled_from(("sum", "sum", "max", "min"))),
    )
    src = draw(marks(shape, sizes, (op,) * len(sizes)))
    dst = draw(marks(shape, sizes, ()))
    kept = [
        s if s in PARTIAL_KINDS and draw(st.integers(0, 3)) == 0 else d
        for s, d in zip(src, dst, strict=True)
    ]
    plain = layout.canonical(shape, tuple(kept), sizes)
    assume(plain is not None)
    return shape, sizes, src, plain


@given(cases(), st.booleans())
@examples(150)
def test_a_route_turns_the_pieces_of_the_source_into_those_of_the_target(
    case: Case, turned: bool
) -> None:
    shape, sizes, src, dst = case
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
    back = tuple(reversed(range(x.dim())))
    x = x.permute(back).contiguous().permute(back) if turned else x
    got = moved(x, src, dst, sizes)
    pieces.check_pieces(got, x, dst, sizes)
    if not set(PARTIAL_KINDS) & set(dst):
        for a, b in zip(got, pieces.cut(x, dst, sizes), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@given(cases())
@examples(300)
def test_only_the_innermost_axis_of_a_dim_is_gathered_cut_or_exchanged(case: Case) -> None:
    shape, sizes, src, dst = case
    at = src
    for move in moves(shape, src, dst, sizes):
        assert move.before == at
        touched = [
            m for m in (move.before[move.axis], move.after[move.axis]) if not isinstance(m, str)
        ]
        for one in touched:
            dim, outer = layout.dim_and_unit(one)[0], layout.block_count(one)
            inner = [
                m
                for m in move.before[move.axis + 1 :]
                if not isinstance(m, str) and layout.block_count(m) == outer
            ]
            assert all(layout.dim_and_unit(m)[0] != dim for m in inner), (
                f"{move} works on dim {dim} under an inner axis"
            )
        others = [k for k in range(len(sizes)) if k != move.axis]
        assert all(move.before[k] == move.after[k] for k in others), "one axis at a time"
        at = move.after
    assert at == dst


@given(cases())
@examples(200)
def test_the_price_of_a_route_is_that_of_its_moves_and_staying_is_free(case: Case) -> None:
    shape, sizes, src, dst = case
    axes = pieces.mesh_axes(sizes)
    assert route(shape, 8, src, src, axes) == (0.0, ())
    cost, found = route(shape, 8, src, dst, axes)
    total = 0.0
    for move in found:
        whole = 8.0 * math.prod(shape)
        for k, (mark, n) in enumerate(zip(move.before, sizes, strict=True)):
            whole /= n if k != move.axis and not isinstance(mark, str) else 1
        total += price(move.kind, whole, sizes[move.axis])
    assert cost == pytest.approx(total)
    assert len({m.before for m in found}) == len(found), "no placement is visited twice"


def test_reduce_scatter_and_gather_cost_as_much_as_an_all_reduce() -> None:
    for n, nbytes in itertools.product((2, 3, 8), (0.0, 8.0, 1e6)):
        both = price("reduce_scatter", nbytes, n) + price("all_gather", nbytes, n)
        assert both == pytest.approx(price("all_reduce", nbytes, n) + Cost().start), (
            "but for the latency of one more collective"
        )
        assert price("all_to_all", nbytes, n) <= price("all_gather", nbytes, n)
        assert price("slice", nbytes, n) <= price("all_gather", nbytes, n) or nbytes == 0
    for kind in ("all_gather", "slice", "all_reduce", "reduce_scatter", "all_to_all"):
        assert price(kind, 1e6, 1) == 0.0, "one rank has nobody to send to"


DIRECT = {
    "staying": ((0,), (0,), []),
    "whole to cut": (("R",), (0,), ["slice"]),
    "cut to whole": ((0,), ("R",), ["all_gather"]),
    "one dim to another": ((0,), (1,), ["all_to_all"]),
    "pending to whole": (("sum",), ("R",), ["all_reduce"]),
    "pending to cut": (("sum",), (1,), ["reduce_scatter"]),
    "a maximum to whole": (("max",), ("R",), ["all_reduce"]),
    "units to plain chunks": (((0, 3),), (0,), ["all_gather", "slice"]),
    "both axes pending": (("sum", "sum"), ("R", "R"), ["all_reduce", "all_reduce"]),
    "both axes on one dim, gathered": ((0, 0), ("R", "R"), ["all_gather", "all_gather"]),
    "both axes on one dim, cut": (("R", "R"), (0, 0), ["slice", "slice"]),
    "the inner axis to another dim": ((0, 0), (0, 1), ["all_to_all"]),
    "reduced where it is smallest": (("sum", 1), (0, 1), ["reduce_scatter"]),
}


@pytest.mark.parametrize("case", list(DIRECT))
def test_the_moves_that_are_taken(case: str) -> None:
    src, dst, wanted = DIRECT[case]
    assert kinds((6, 9), src, dst, (4, 2)[: len(src)]) == wanted


ZIGZAG: AxisPlacement = (0, 1, -2)
ZIGZAGS = {
    "gathered": ((ZIGZAG,), ("R",), ["all_gather"]),
    "cut": (("R",), (ZIGZAG,), ["slice"]),
    "to another dim": ((ZIGZAG,), (1,), ["all_to_all"]),
    "from another dim": ((1,), (ZIGZAG,), ["all_to_all"]),
    "to that of another dim": ((ZIGZAG,), ((1, 1, -2),), ["all_to_all"]),
    "pending": (("sum",), (ZIGZAG,), ["reduce_scatter"]),
    "a maximum": (("max",), (ZIGZAG,), ["reduce_scatter"]),
    "beside an axis": (("sum", 1), (ZIGZAG, 1), ["reduce_scatter"]),
    "of merged dims": ((0, (0, 1, -4)), (0, "R"), ["all_gather"]),
    "of merged dims, pending": ((0, "sum"), (0, (0, 1, -4)), ["reduce_scatter"]),
}


@pytest.mark.parametrize("case", list(ZIGZAGS))
def test_a_zigzag_is_reached_and_left_by_one_move(case: str) -> None:
    src, dst, wanted = ZIGZAGS[case]
    for n in (2, 3) if len(src) == 1 else (2,):
        sizes = (n, 2)[: len(src)]
        x = torch.arange(24.0 * 12, dtype=torch.float64).reshape(24, 12)
        assert kinds(x.shape, src, dst, sizes) == wanted
        found = moved(x, src, dst, sizes)
        for a, b in zip(found, pieces.cut(x, dst, sizes), strict=True):
            torch.testing.assert_close(a, b)


def test_a_zigzag_and_chunks_of_its_dim_exchange_shards_where_that_sends_less() -> None:
    through_all, exchanged = ["all_gather", "slice"], ["all_to_all", "all_to_all"]
    for src, dst in (((ZIGZAG,), (0,)), ((0,), (ZIGZAG,)), ((ZIGZAG,), ((0, 1, 3),))):
        for n, width, wanted in ((2, 12, exchanged), (4, 12, exchanged), (4, 7, through_all)):
            x = torch.arange(96.0 * width, dtype=torch.float64).reshape(96, width)
            assert kinds(x.shape, src, dst, (n,)) == wanted
            for a, b in zip(moved(x, src, dst, (n,)), pieces.cut(x, dst, (n,)), strict=True):
                assert torch.equal(a, b)
    nbytes = 8.0 * 96 * 12
    assert axis_price(ZIGZAG, 0, nbytes, 4, (96, 12)) == 2 * price("all_to_all", nbytes, 4)
    both = price("all_gather", nbytes, 4) + price("slice", nbytes, 4)
    assert axis_price(ZIGZAG, 0, nbytes, 4, (96, 7)) == pytest.approx(both)


def test_gathers_start_with_the_inner_axis_and_cuts_with_the_outer() -> None:
    assert [m.axis for m in moves((12,), (0, 0, 0), ("R", "R", "R"), (2, 2, 2))] == [2, 1, 0]
    assert [m.axis for m in moves((12,), ("R", "R", "R"), (0, 0, 0), (2, 2, 2))] == [0, 1, 2]


def test_there_is_no_way_to_a_pending_reduction() -> None:
    axes = pieces.mesh_axes((2,))
    for src, dst in itertools.product(("R", 0, "max"), ("sum", "min")):
        assert route((4,), 8, (src,), (dst,), axes) is None


def test_an_uneven_exchange_sends_padded_chunks_of_equal_length() -> None:
    x = torch.arange(35.0, dtype=torch.float64).view(5, 7)
    for src, dst in itertools.permutations((0, 1, "R"), 2):
        pieces.check_pieces(moved(x, (src,), (dst,), (3,)), x, (dst,), (3,))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64])
def test_moves_keep_every_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(15).view(5, 3).to(dtype)
    for src, dst in itertools.permutations((0, 1, "R"), 2):
        pieces.check_pieces(moved(x, (src,), (dst,), (2,)), x, (dst,), (2,))
