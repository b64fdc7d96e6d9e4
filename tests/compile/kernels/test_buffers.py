"""Buffers that several kernels write."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.kernels.stored import Stored
from tests.support.stages.graphs import graph_of

X = torch.ones(4, 4)
PLACES = torch.zeros(4, 4, dtype=torch.int64)


def writers(fn: Any, *args: torch.Tensor) -> list[int]:
    """How many kernels write each stored value."""
    known = Stored(graph_of(fn, *args), {})
    return [len(known.makers[x]) for x in known.results]


def homes(fn: Any) -> int:
    """In how many buffers stored values lie."""
    known = Stored(graph_of(fn, X, X[0]), {})
    made = [x for x in known.home if x.op != "placeholder"]
    return len({known.home[x] for x in made})


def test_scattered_elements_are_written_into_a_copy() -> None:
    scatter = lambda x, i, y: [x.scatter(0, i, y.sin())]
    assert writers(scatter, X, PLACES, X) == [2]
    known = Stored(graph_of(scatter, X, PLACES, X), {})
    assert [len(kernel.writes) for kernel in known.kernels] == [1, 1]


def test_elements_that_a_call_scatters_are_stored() -> None:
    scatter = lambda x, i, y: [x.scatter_reduce(0, i, y.sin(), "amax")]
    known = Stored(graph_of(scatter, X, PLACES, X), {})
    assert len(known.kernels) == 3 and known.kernels[-1].space is None


def test_a_joined_part_reads_its_own_values_alone() -> None:
    known = Stored(graph_of(lambda x, y: [torch.cat([x, y])], X, X.clone()), {})
    assert [len(kernel.layouts) for kernel in known.kernels] == [1, 1]


def test_a_scatter_is_in_the_memory_of_a_value_that_nothing_reads_later() -> None:
    spread = lambda x: torch.diag_embed(x.diagonal())
    last = lambda x, y: [spread(x @ x).diagonal_scatter(y)]
    assert homes(last) == 2
    kept = lambda x, y: [(z := spread(x @ x)).diagonal_scatter(y), z]
    assert homes(kept) == 3
