"""Indices that count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardfn.partition.rules.lookups.counted import along
from tests.support.stages.graphs import graph_of

N = 5
COUNT: dict[str, tuple[Callable[[], torch.Tensor], int | None]] = {
    "arange": (lambda: torch.arange(N), 0),
    "from 0": (lambda: torch.arange(0, N), 0),
    "a column": (lambda: torch.arange(N)[:, None], 0),
    "a row": (lambda: torch.arange(N)[None], 1),
    "plus 0": (lambda: torch.arange(N) + 0, 0),
    "of 32 bits": (lambda: torch.arange(N).int(), 0),
    "from 1": (lambda: torch.arange(1, N + 1), None),
    "by twos": (lambda: torch.arange(0, 2 * N, 2), None),
    "of another size": (lambda: torch.arange(N + 1), None),
    "plus 1": (lambda: torch.arange(N) + 1, None),
    "of 8 bits": (lambda: torch.arange(N).to(torch.int8), None),
    "turned": (lambda: torch.arange(N).flip(0), None),
}


@pytest.mark.parametrize("name", COUNT)
def test_an_index_counts_if_the_program_says_so(name: str) -> None:
    fn, dim = COUNT[name]
    graph = graph_of(fn)
    (output,) = graph.find_nodes(op="output")
    assert along(output.args[0], N) == dim
