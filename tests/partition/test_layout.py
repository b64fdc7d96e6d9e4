"""How marks cut a tensor, against torch.chunk."""

from __future__ import annotations

import itertools
import math

import pieces
import torch
from effort import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from shardfn.partition import layout
from shardfn.types import AxisPlacement, MeshPlacements

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
LENGTHS = st.integers(0, 12) | st.sampled_from((16, 24, 36))
SHAPES = st.lists(LENGTHS, min_size=1, max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], MeshPlacements, tuple[int, ...]]:
    """A shape, marks that fit it, and the mesh's sizes; two axes often share a dim."""
    shape, sizes = draw(SHAPES), draw(SIZES)
    marks: list[AxisPlacement] = []
    for k in range(len(sizes)):
        dim, unit = (draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from((1, 1, 2, 3, 4))))
        outer = draw(st.sampled_from((2, 3, 4, 6, -2, -2, -4, -6))) if sizes[k] > 1 else 1
        mark = draw(
            st.sampled_from(
                (
                    "R",
                    layout.joined(dim, unit),
                    layout.joined(dim, unit),
                    layout.joined(dim, unit, outer=outer),
                )
            )
        )
        fits = layout.canonical(shape, (*marks, mark), sizes[: k + 1]) is not None
        fits_plain = layout.canonical(shape, (*marks, dim), sizes[: k + 1])
        marks.append(mark if fits else dim if fits_plain else "R")
    return shape, tuple(marks), sizes


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Every element another number."""
    return torch.arange(math.prod(shape)).reshape(shape)


@given(units=st.integers(0, 20), unit=st.integers(1, 4), n=st.integers(1, 9))
@examples(150)
def test_a_chunk_is_torch_chunks_full_ones_then_one_remainder_then_empty_ones(
    units: int, unit: int, n: int
) -> None:
    size = units * unit
    wanted = [c.tolist() for c in pieces.chunks(torch.arange(size), 0, unit, n)]
    got = [layout.chunk(size, unit, n, c) for c in range(n)]
    assert [list(range(start, start + length)) for start, length in got] == wanted
    full, lengths = layout.full_chunk(size, unit, n), [length for _, length in got]
    assert sorted(lengths, reverse=True) == lengths
    assert sum(length not in (full, 0) for length in lengths) <= 1, "at most one remainder"


@given(cuts())
@examples(200)
def test_the_local_shape_is_the_shape_of_the_piece(
    case: tuple[tuple[int, ...], MeshPlacements, tuple[int, ...]],
) -> None:
    shape, marks, sizes = case
    for c, piece in zip(
        pieces.ranks(sizes), pieces.cut(numbered(shape), marks, sizes), strict=True
    ):
        assert layout.local_shape(shape, marks, sizes, c) == piece.shape


@given(cuts())
@examples(200)
def test_pieces_of_all_ranks_hold_every_element(
    case: tuple[tuple[int, ...], MeshPlacements, tuple[int, ...]],
) -> None:
    shape, marks, sizes = case
    x = numbered(shape)
    assert torch.equal(pieces.joined(pieces.cut(x, marks, sizes), marks, sizes), x)


@given(cuts())
@examples(200)
def test_canonical_marks_cut_the_same_and_are_canonical(
    case: tuple[tuple[int, ...], MeshPlacements, tuple[int, ...]],
) -> None:
    shape, marks, sizes = case
    plain = layout.canonical(shape, marks, sizes)
    assert plain is not None
    assert layout.canonical(shape, plain, sizes) == plain
    x = numbered(shape)
    for a, b in zip(pieces.cut(x, marks, sizes), pieces.cut(x, plain, sizes), strict=True):
        assert torch.equal(a, b)


@given(cuts(), st.integers(0, 2), st.integers(1, 6), st.integers(1, 5))
@examples(200)
def test_canonical_refuses_a_unit_that_some_chunk_is_no_multiple_of(
    case: tuple[tuple[int, ...], MeshPlacements, tuple[int, ...]], dim: int, unit: int, n: int
) -> None:
    shape, marks, sizes = case
    assume(dim < len(shape) and all(map(layout.is_plain, marks)))
    found = [p.shape[dim] for p in pieces.cut(numbered(shape), marks, sizes)]
    if layout.canonical(shape, (*marks, (dim, unit)), (*sizes, n)) is not None:
        assert all(length % unit == 0 for length in found)
    elif all(m == "R" or layout.dim_and_unit(m)[0] != dim for m in marks):
        assert shape[dim] % unit


@given(cuts(), st.integers(0, 2))
@examples(200)
def test_every_chunk_is_a_multiple_of_the_grain(
    case: tuple[tuple[int, ...], MeshPlacements, tuple[int, ...]], dim: int
) -> None:
    shape, marks, sizes = case
    assume(dim < len(shape) and all(map(layout.is_plain, marks)))
    length, even = layout.grain(shape[dim], dim, marks, sizes)
    found = {p.shape[dim] for p in pieces.cut(numbered(shape), marks, sizes)}
    assert all(n % length == 0 if length else n == 0 for n in found)
    assert not even or found == {length}


def test_two_axes_on_one_dim_cut_in_mesh_order() -> None:
    shapes = [layout.local_shape((7, 2), (0, 0), (2, 3), c) for c in pieces.ranks((2, 3))]
    assert shapes == [(2, 2), (2, 2), (0, 2), (1, 2), (1, 2), (1, 2)]
    assert layout.canonical((12,), ((0, 3), (0, 3)), (2, 2)) == (0, 0), "even cuts need no units"
    assert layout.canonical((9,), ((0, 3), 0), (2, 3)) == ((0, 3), 0)
    assert layout.canonical((9,), (0, (0, 3)), (2, 3)) is None, "5 and 4 are no multiples of 3"
    assert layout.canonical((8,), ((0, 3),), (2,)) is None


def test_a_zigzag_turns_in_whole_pairs_of_blocks() -> None:
    assert layout.canonical((8,), ((0, 1, -2),), (2,)) == ((0, 1, -2),)
    assert layout.canonical((24,), (0, (0, 1, -6)), (3, 2)) == (0, (0, 1, -6))
    assert layout.canonical((8,), ((0, 1, -2),), (1,)) == (0,), "one rank has all"
    assert layout.canonical((6,), ((0, 1, -2),), (2,)) is None, "4 does not divide 6"
    assert layout.canonical((16,), (0, (0, 1, -2)), (2, 2)) is None, "a chunk has half a pair"
    assert layout.canonical((16,), ((0, 1, 2), (0, 1, -2)), (2, 2)) is None
    assert layout.canonical((48,), ((0, 1, 2), (0, 1, -6)), (2, 2)) is None, "3 blocks in a half"
    assert layout.canonical((8,), ((0, 1, -2), (0, 1, -2)), (2, 2)) is None


def test_the_words_for_marks() -> None:
    assert [layout.split(m) for m in ("R", "sum", 2, (1, 3))] == [None, None, (2, 1), (1, 3)]
    assert (layout.joined(2, 1), layout.joined(1, 3)) == (2, (1, 3))
    assert [layout.dim_and_unit(m) for m in (2, (1, 3))] == [(2, 1), (1, 3)]


@given(st.lists(st.integers(1, 5), max_size=4), st.randoms(use_true_random=False))
@examples(100)
def test_dense_strides_are_those_of_a_permuted_contiguous_tensor(
    shape: list[int], random: object
) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    x = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    assert layout.dense_strides(x.shape, order) == x.stride()
    assert layout.is_dense(x.shape, x.stride())
    same = torch.empty_strided(
        x.shape, layout.dense_strides(x.shape, layout.stride_order(x.shape, x.stride()))
    )
    wide = [d for d in range(x.dim()) if x.shape[d] > 1]
    assert [same.stride(d) for d in wide] == [x.stride(d) for d in wide]


def test_gaps_and_overlaps_are_not_dense() -> None:
    x = torch.empty(5, 3)
    for view in (x[:, :2], x[::2], x[:1].expand(5, 3), x[:, 0], x.t()[:2]):
        assert not layout.is_dense(view.shape, view.stride())
    for view in (x, x.t(), x[:2], x[None], torch.empty(()), x[:, :1].contiguous()):
        assert layout.is_dense(view.shape, view.stride())


def test_stride_order_keeps_equal_strides_in_the_order_of_dims() -> None:
    for shape in itertools.permutations((1, 1, 3)):
        assert layout.stride_order(shape, torch.empty(shape).stride()) == tuple(
            sorted(range(3), key=lambda d: (-torch.empty(shape).stride(d), d))
        )


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor with its dims permuted, expanded or sliced in memory, and another shape of as
    many elements.
    """
    x = torch.empty(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    x = x.permute(draw(st.permutations(range(x.dim()))))
    for d in range(x.dim()):
        if x.shape[d] == 1:
            x = x.expand(*x.shape[:d], draw(st.integers(1, 3)), *x.shape[d + 1 :])
        elif draw(st.integers(0, 3)) == 3:
            x = x.narrow(d, 0, x.shape[d] - 1)
    total, new = x.numel(), []
    while total > 1 or draw(st.booleans()):
        new.append(draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0])))
        total //= new[-1]
    return x, tuple(new)


@given(laid_out())
@examples(200)
def test_what_can_be_viewed_is_what_torch_views(
    drawn: tuple[torch.Tensor, tuple[int, ...]],
) -> None:
    x, new = drawn
    try:
        viewed = x.view(new).shape == new
    except RuntimeError:
        viewed = False
    assert layout.can_view(x.shape, x.stride(), new) == viewed
