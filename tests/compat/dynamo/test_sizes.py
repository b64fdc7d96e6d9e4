"""Sizes that are read as symbols: marks, names, and conditions on them."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from shardfn._compat.dynamo.sizes import (
    dim_hint,
    is_dense,
    is_symbol,
    read_as_symbols,
    signs,
    size_name,
    sizes_named,
    torch_marks,
)
from shardfn._compat.dynamo.symbols import Symbols


def symbols(*hints: int) -> tuple[Symbols, torch.Tensor]:
    made = Symbols(hints)
    stride = [1] * len(hints)
    return made, made.empty(torch.ones(1), made.sizes, stride)


def test_marks_of_torch_say_whether_a_constant_is_an_error() -> None:
    x = torch.ones(4, 5, 6)
    assert torch_marks(x) == {}
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.maybe_mark_dynamic(x, 2)
    assert torch_marks(x) == {0: True, 2: False}
    y = torch.ones(4)
    read_as_symbols(y, [])
    assert torch_marks(y) == {}
    read_as_symbols(y, [0])
    assert torch_marks(y) == {0: False}


def test_hints_of_export_have_names() -> None:
    assert [dim_hint(x) for x in (Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, 3, None)] == [
        "AUTO", "DYNAMIC", "STATIC", None, None,
    ]  # fmt: skip


def test_equal_symbols_have_equal_names() -> None:
    made, x = symbols(5, 7)
    n, m = made.sizes
    assert is_symbol(n) and not is_symbol(5)
    assert size_name(n) == size_name(n + 0) != size_name(m)
    assert sizes_named((n, 3, m)) == (size_name(n), 3, size_name(m))
    assert signs((n, 3, x.shape[1] - 100)) == (1, 3, -1)


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
