"""Sizes that are read as symbols: marks, names, and conditions on them."""

from __future__ import annotations

import pytest
import torch

from shardfn._compat.dynamo.sizes import is_dense
from shardfn._compat.dynamo.symbols import Symbols


def symbols(*hints: int) -> tuple[Symbols, torch.Tensor]:
    made = Symbols(hints)
    stride = [1] * len(hints)
    return made, made.empty(torch.ones(1), made.sizes, stride)


def test_a_size_that_became_constant_is_known_and_another_is_a_misfit() -> None:
    made, x = symbols(5)
    assert bool(made.sizes[0] == 5)
    found = made.conditions([x])
    given = lambda n: {0: ((n,), (1,))}
    assert found.misfit(given(5), {0: "x"}) is None
    assert "x" in (found.misfit(given(6), {0: "x"}) or "")
    assert {k: value for k, (value, _) in found.constants().items()} == {(0, 0): 5}


def test_a_relation_of_two_sizes_is_kept() -> None:
    made, x = symbols(4, 8)
    n, m = made.sizes
    assert bool(m == 2 * n)
    found = made.conditions([x])
    names = {0: "x"}
    assert found.misfit({0: ((3, 6), (1, 1))}, names) is None
    assert found.misfit({0: ((3, 7), (1, 1))}, names) is not None


@pytest.mark.parametrize("rows", [3, 1, 0])
def test_whether_a_copy_is_needed_does_not_depend_on_the_number_of_rows(rows: int) -> None:
    graph = torch.fx.Graph()
    node, turned = graph.placeholder("x"), graph.placeholder("y")
    node.meta["example_value"] = torch.ones(rows, 4)
    turned.meta["example_value"] = torch.ones(rows, 4).t()
    assert is_dense(node)
    assert not is_dense(turned)
