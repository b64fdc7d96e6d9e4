"""Indices that count all numbers of a dim, as a program says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.partition.rules.lookups.index import counts_along

X = torch.arange(35.0, dtype=torch.float64).view(7, 5)
INDICES: dict[str, tuple[Any, int | None]] = {
    "an arange": (lambda: torch.arange(7), 0),
    "along a dim of its own": (lambda: torch.arange(7)[:, None, None], 0),
    "the last dim": (lambda: (torch.arange(7) + 0)[None], 1),
    "another size": (lambda: torch.arange(5), None),
    "another start": (lambda: torch.arange(1, 8), None),
    "by twos": (lambda: torch.arange(0, 14, 2), None),
    "moved": (lambda: torch.arange(7) + 1 - 1, None),
    "narrower than its numbers may be": (lambda: torch.arange(7).to(torch.int8).long(), None),
    "backwards": (lambda: torch.arange(7).flip(0), None),
}


@pytest.mark.parametrize("case", INDICES)
def test_the_dim_along_which_an_index_counts(case: str) -> None:
    make, wanted = INDICES[case]
    graph = sf.jit(lambda x: x[make()]).trace(torch.ones(40, 2)).program.graph.graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    assert counts_along(node.args[1][0], 7) == wanted


@pytest.mark.parametrize("n", [2, 3])
def test_a_dim_and_its_index_are_sharded_together(n: int) -> None:
    """Uneven shards; an index used for both dims of a square is not such a pair."""
    rows = lambda x: x[torch.arange(7)[:, None, None], torch.arange(5)[None, None]]
    diagonal = lambda x: x[torch.arange(5), torch.arange(5)]
    with sf.fake_world(n):
        mesh = sf.make_mesh((n,), ("a",))
        read = sf.shard(rows, mesh, P("a"), P("a"), backend="aten")
        assert not read.lower(X).collectives
        assert torch.equal(sf.full(read(X)), rows(X))
        taken = sf.shard(diagonal, mesh, P("a"), backend="aten")
        assert torch.equal(sf.full(taken(X[:5])), diagonal(X[:5]))
