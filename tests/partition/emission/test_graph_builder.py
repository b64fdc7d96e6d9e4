"""The builder of one rank's graph: offsets from coordinates, shapes, and memory layout."""

from __future__ import annotations

import pieces
import pytest
import torch

from shardfn import _compat
from shardfn.partition import layout
from shardfn.partition.emission.graph_builder import Builder
from shardfn.types import MeshPlacements
from tests.support.stages.graphs import shown

aten = torch.ops.aten


def builder(sizes: tuple[int, ...], coordinates: tuple[int, ...]) -> Builder:
    names = tuple(f"g{i}" for i in range(len(sizes)))
    mode = _compat.FakeTensorMode()
    return Builder(pieces.mesh_axes(sizes), coordinates, mode, "cpu", names)


@pytest.mark.parametrize("marks", [(0, "R"), ("R", 0), (0, 0), ((0, 2), 0)])
@pytest.mark.parametrize("size", [6, 10, 4, 12])
def test_the_offset_of_a_shard_is_where_its_first_element_stands(
    size: int, marks: MeshPlacements
) -> None:
    sizes = (2, 3)
    plain = layout.canonical((size,), marks, sizes)
    if plain is None:
        pytest.skip("not a placement of this size")
    rows = pieces.cut(torch.arange(size), plain, sizes)
    for coordinates, row in zip(pieces.ranks(sizes), rows, strict=True):
        if not len(row):
            continue
        b = builder(sizes, coordinates)
        with b.mode:
            x = torch.empty(size)
            piece = b.shard(b.placeholder("x", x), x, plain)
            b.graph.output(b.offset(piece, 0))
        module = torch.fx.GraphModule(torch.nn.Module(), b.graph)
        given = [torch.tensor(c) for c in coordinates]
        assert int(module(*given, None)) == int(row[0])
        assert piece.local_shape == (len(row),)


def test_a_piece_knows_which_dims_are_sharded_and_notes_its_type() -> None:
    b = builder((2, 3), (0, 0))
    with b.mode:
        x = torch.empty(4, 6)
        piece = b.shard(b.placeholder("x", x), x, ("sum", (1, 2)))
    assert [piece.is_sharded(d) for d in (0, 1)] == [False, True]
    assert piece.node.meta["type"] == ((4, 6), ("sum", (1, 2)))


def test_an_equal_offset_is_computed_once() -> None:
    b = builder((2,), (1,))
    with b.mode:
        first, second = b.start(0, 5, 1), b.start(0, 5, 1)
        other = b.start(0, 6, 1)
    assert first is second and other is not first
    assert [n.name for n in b.graph.nodes if "clamp" in n.name] == ["clamp_default"]


def test_memory_in_the_order_of_the_global_value_is_left_alone() -> None:
    b = builder((2,), (0,))
    with b.mode:
        x = b.placeholder("x", torch.empty(4, 6))
        assert b.restride(x, (8, 6), (6, 1)) is x
        assert b.contiguous(x) is x
        turned = b.restride(x, (8, 6), (1, 8))
        assert turned.meta["val"].stride() == (1, 4)
        back = b.restride(turned, (8, 6), (6, 1))
        assert back.meta["val"].stride() == (6, 1)


def test_a_call_carries_what_it_is_about_and_its_value() -> None:
    b = builder((2,), (0,))
    b.about = {"phase": "backward", "step": 3}
    with b.mode:
        x = b.placeholder("x", torch.empty(4, 6))
        parts = b.call(aten.split.Tensor, x, 2)
        second = b.item(parts, 1)
        b.graph.output(second)
    assert {k: second.meta[k] for k in b.about} == b.about
    assert second.meta["val"].shape == (2, 6)
    assert shown(b.graph).startswith("split_tensor = split(x, 2)")
