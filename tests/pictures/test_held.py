"""What a picture shows of a rank is what `to_local` returns of it: every element, and no other."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn import P
from shardfn.mesh import axes_of
from shardfn.pictures import held
from shardfn.placement import marks_of
from shardfn.types import MeshAxes

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "one axis": ((3,), ("a",)),
    "two axes": ((2, 3), ("a", "b")),
    "three axes": ((2, 3, 2), ("a", "b", "c")),
}
SHAPES = [(), (12,), (5,), (0,), (12, 7), (1, 5), (12, 12, 3), (3, 2, 5, 12)]


def specs_of(names: tuple[str, ...], dims: int) -> list[Any]:
    """Placements of every kind on these axes."""
    axes: list[tuple[str, ...]] = [()]
    for n in range(1, len(names) + 1):
        axes += itertools.permutations(names, n)
    found: list[Any] = [P()]
    for dim in range(dims):
        before = (None,) * dim
        found += [P(*before, part) for part in axes if part]
        found += [P(*before, f"{name}*{k}") for name in names for k in (2, 3)]
        found += [P(*before, (f"{names[0]}*3", *names[1:]))]
        found += [P(*before, sf.zigzag(name)) for name in names]
    for name in names:
        found.append(P(**{name: 1}))
    others = [Replicate(), *(Shard(dim) for dim in range(dims))]
    found += [list(p) for p in itertools.product(others, repeat=len(names))]
    if dims > 1:
        for pair in itertools.permutations(names, 2):
            found += [P(*pair), P(pair[0], sf.zigzag(pair[1])), P(f"{pair[0]}*2", pair[1])]
            found += [P(pair[1], **{pair[0]: 1})]
    return found


def cases() -> list[tuple[str, tuple[int, ...]]]:
    return [(mesh, shape) for mesh in MESHES for shape in SHAPES]


def elements(cells: list[held.Cell]) -> list[tuple[int, ...]]:
    """Every element of some cells."""
    return [
        index for cell in cells for index in itertools.product(*(range(*run) for run in cell.runs))
    ]


@pytest.mark.parametrize(("mesh", "shape"), cases())
def test_the_cells_of_a_rank_are_the_elements_of_its_local_tensor(
    mesh: str, shape: tuple[int, ...]
) -> None:
    sizes, names = MESHES[mesh]
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    tried = 0
    with sf.fake_world(math.prod(sizes)):
        grid_of = sf.make_mesh(sizes, names)
        for spec in specs_of(names, len(shape)):
            try:
                marks_of(spec, shape, axes_of(grid_of))
                placed = sf.distribute(x, grid_of, spec)
            except (ValueError, sf.PlacementError):
                continue  # the shape does not have these shards
            compare(placed, x)
            tried += 1
    assert tried >= 2 + len(names)


def compare(placed: Any, x: torch.Tensor) -> None:
    """Compare what is drawn of a DTensor with the local tensors of all ranks."""
    axes = axes_of(placed.device_mesh)
    shards = held.sharding(x.shape, marks_of(list(placed.placements), x.shape, axes), axes)
    grids = [held.grid_of_blocks(shards)]
    if x.numel() < 100:
        grids.append(held.grid_of_elements(shards))
    for rank in shards.ranks:
        local = placed.to_local(rank=rank.place)
        if rank.runs is None:
            assert local.numel() == 0
            continue
        assert rank.shape == local.shape
        for grid in grids:
            drawn = elements([*grid.cells(rank.runs)])
            assert len(drawn) == len(set(drawn)) == local.numel()
            for index in drawn:
                assert local[rank.local(index)] == x[index]


@pytest.mark.parametrize("shape", SHAPES)
def test_cells_cover_a_tensor_without_overlap(shape: tuple[int, ...]) -> None:
    axes = MeshAxes(("a", "b"), (2, 3))
    last = len(shape) - 1
    marks = ("R", "R") if not shape else (0, last)
    shards = held.sharding(shape, marks, axes)
    for grid in (held.grid_of_blocks(shards), held.grid_of_elements(shards)):
        cells = [*grid.cells()]
        every = elements(cells)
        assert len(every) == len(set(every)) == math.prod(shape)
        for one, other in itertools.combinations(cells[:60], 2):
            is_beside = (
                one.x + one.width <= other.x + 1e-9
                or other.x + other.width <= one.x + 1e-9
                or one.y + one.height <= other.y + 1e-9
                or other.y + other.height <= one.y + 1e-9
            )
            assert is_beside, (one, other)
        for cell in cells:
            assert cell.x >= -1e-9 and cell.x + cell.width <= 1 + 1e-9
            assert cell.y >= -1e-9 and cell.y + cell.height <= 1 + 1e-9


def test_ranks_that_hold_the_same_are_one_holding() -> None:
    axes = MeshAxes(("dp", "tp"), (2, 3))
    shards = held.sharding((6,), ("R", 0), axes)
    assert [places for _, places in shards.holdings()] == [[0, 3], [1, 4], [2, 5]]
    terms = held.sharding((6,), ("sum", 0), axes)
    assert terms.reductions == (("dp", "sum"),)
    assert terms.words() == ["Partial sum over dp", "dim 0 sharded over tp"]


def test_a_large_mesh_shows_the_first_ranks_and_counts_the_others() -> None:
    shards = held.sharding((2**20, 8), (0, 1), MeshAxes(("dp", "tp"), (2**17, 8)))
    assert len(shards.ranks) == held.SOME_RANKS
    assert shards.hidden == 2**20 - held.SOME_RANKS
    assert {r.coordinates for r in shards.ranks} == {*itertools.product(range(4), range(4))}
    assert shards.ranks[5].place == 8 + 1
    assert shards.ranks[5].runs == (((8, 16),), ((1, 2),))


def test_a_dim_of_many_blocks_is_cut_off() -> None:
    shards = held.sharding((1000,), ((0, 1, 100),), MeshAxes(("tp",), (2,)))
    assert held.grid_of_blocks(shards).is_cut_off
    few = held.sharding((1000,), ((0, 1, 4),), MeshAxes(("tp",), (2,)))
    assert not held.grid_of_blocks(few).is_cut_off


def test_terms_of_a_value_are_placed_as_the_value() -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("a", "b"))
        x = sf.from_local(torch.ones(2, 3), mesh, [Partial(), Shard(0)])
        axes = axes_of(mesh)
        shards = held.sharding(x.shape, marks_of(list(x.placements), x.shape, axes), axes)
    assert [rank.runs for rank in shards.ranks[:3]] == [rank.runs for rank in shards.ranks[3:]]
    assert [rank.shape for rank in shards.ranks] == [(2, 3)] * 6
