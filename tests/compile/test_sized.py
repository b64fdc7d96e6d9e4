"""Graphs that differ in sizes alone: skeletons, formulas, and programs that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn import _compat
from shardfn.compile.skeletons import Formula, arguments_at, formulas, skeleton_of
from shardfn.runtime import cache

D = torch.float64


def graph_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> torch.fx.Graph:
    with _compat.fake_mode():
        return make_fx(fn)(*[torch.ones(shape) for shape in shapes]).graph


def padded(x: Tensor) -> Tensor:
    n = x.shape[0]
    return torch.cat([x, x.new_zeros(n + 1, 3)]).reshape(-1, 3).expand(2, 2 * n + 1, 3)


def test_graphs_of_other_sizes_have_one_skeleton() -> None:
    first, second = (skeleton_of(graph_of(padded, (n, 3))) for n in (4, 6))
    assert first is not None and second is not None
    assert first.key == second.key and first.ints != second.ints
    other = skeleton_of(graph_of(lambda x: padded(x) * 2.0, (4, 3)))
    scaled = skeleton_of(graph_of(lambda x: padded(x) * 3.0, (4, 3)))
    assert other is not None and scaled is not None
    assert len({first.key, other.key, scaled.key}) == 3


def test_ints_are_formulas_of_sizes_and_give_back_the_graph() -> None:
    graphs = [graph_of(padded, (n, 3)) for n in (4, 6, 9)]
    first, second, third = (skeleton_of(graph) for graph in graphs)
    assert first is not None and second is not None and third is not None
    found = formulas([first.ints, second.ints], first.places)
    assert found is not None and found.fits(third.ints)
    given = arguments_at(graphs[0], first, found.at([9]))
    pairs = zip(graphs[0].nodes, graphs[2].nodes, strict=True)
    assert all(str(given(a)[0]) == str(b.args) for a, b in pairs)


def test_the_simplest_formula_is_found() -> None:
    rows = [(4, 1, 8, 16, 5, 12, 0, 2), (6, 1, 12, 36, 7, 12, 0, 3)]
    found = formulas(rows, (1,))
    assert found is not None
    assert found.bases == (0,)
    assert found.of == (
        Formula((0,), 1),
        Formula((), 1),
        Formula((0,), 2),
        Formula((0, 0), 1),
        Formula((0,), 1, 1),
        Formula((), 12),
        Formula((), 0),
        Formula((0,), 1, 0, 2),
    )
    assert found.fits((9, 1, 18, 81, 10, 12, 0, 4))
    assert not found.fits((8, 1, 16, 64, 9, 11, 0, 4))


@pytest.mark.parametrize(
    "rows",
    [
        [(4, 1, 3), (6, 1, 10), (8, 1, 12)],  # no formula
        [(1, 1, 1), (6, 1, 6)],  # a size of 1 is a constant
        [(4, 1, 3), (4, 1, 4)],  # no size differs
    ],
)
def test_without_simple_formulas_there_are_none(rows: list[Any]) -> None:
    assert formulas(rows, (1,)) is None


def test_two_sizes_that_changed_together_are_told_apart_by_a_third_graph() -> None:
    together = [(4, 1, 4, 1, 8), (6, 1, 6, 1, 12)]
    found = formulas(together, (1, 1))
    assert found is not None and found.bases == (0,)
    assert not found.fits((6, 1, 8, 1, 14))
    apart = formulas([*together, (6, 1, 8, 1, 16)], (1, 1))
    assert apart is not None and apart.bases == (0, 2)


def weighed(x: Tensor) -> Tensor:
    n = x.shape[0]
    return (x * torch.arange(n)[:, None]).sum(0) / n


def test_inductor_compiles_twice_for_all_sizes() -> None:
    step = sf.jit(weighed, dynamic=0)
    compiled = []
    for n in (4, 6, 8, 7):
        before = cache.counts["compilations"]
        x = torch.randn(n, 3, dtype=D)
        torch.testing.assert_close(step(x), weighed(x))
        compiled.append(cache.counts["compilations"] - before)
    assert compiled == [1, 1, 0, 0]
