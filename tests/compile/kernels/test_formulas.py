"""Formulas, and the layouts in which they read."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.kernels.stored import Stored
from tests.support.stages.graphs import graph_of

X = torch.ones(4, 6)


def layouts(fn: Any) -> list[object]:
    """Those of the last kernel."""
    *_, last = Stored(graph_of(fn, X), {}).kernels
    return [layout for _, layout in last.layouts]


def test_a_view_that_merges_dims_is_read_as_the_value() -> None:
    assert layouts(lambda x: [x.view(2, 2, 6) + 1]) == layouts(lambda x: [x + 1])


def test_a_value_that_is_read_in_two_orders_counts_twice() -> None:
    assert len(layouts(lambda x: [x.sin() + x])) == 1
    assert len(layouts(lambda x: [x.flip(0) + x])) == 2


def test_places_that_two_ops_move_alike_are_one_layout() -> None:
    assert len(layouts(lambda x: [x.flip(0).sin() + x.flip(0)])) == 1
    assert len(layouts(lambda x: [x.flip(0).sin() + x.flip(1)])) == 2
