"""Skeletons of graphs that differ in sizes alone, and formulas of the sizes."""

from __future__ import annotations

import pytest
import torch

from shardfn.compile.skeletons import Formula, arguments_with, formulas, replace_ints, skeleton_of
from shardfn.ops.loops import Scan
from tests.support.stages.graphs import graph_of


def graph(n: int) -> torch.fx.Graph:
    return graph_of(lambda x: x.view(2 * n, 3)[1 : n + 1].sum(0), torch.ones(n, 6))


def test_graphs_of_other_sizes_have_one_skeleton_and_other_ops_another() -> None:
    first, second = skeleton_of(graph(5)), skeleton_of(graph(8))
    assert first is not None and second is not None
    assert first.key == second.key and first.ints != second.ints
    assert first.places == (2,) and first.ints[:4] == (5, 6, 6, 1)
    other = skeleton_of(graph_of(lambda x: x.view(10, 3)[1:6].sum(1), torch.ones(5, 6)))
    assert other is not None and other.key == first.key, "a dim is an int too"
    dtype = skeleton_of(graph_of(lambda x: x.view(10, 3), torch.ones(5, 6).double()))
    assert dtype is not None and dtype.key != first.key


def test_a_bool_and_a_float_are_no_sizes() -> None:
    keep = lambda flag: skeleton_of(graph_of(lambda x: x.sum(0, flag), torch.ones(5, 6)))
    assert keep(True).key != keep(False).key
    scaled = lambda f: skeleton_of(graph_of(lambda x: x * f, torch.ones(5, 6)))
    assert scaled(2.0).key != scaled(3.0).key


def test_a_graph_with_a_loop_has_none() -> None:
    made = torch.fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.ones(2)
    made.output([made.call_function(Scan((), 0, 0, 0), (x,))])
    assert skeleton_of(made) is None


def test_all_ints_are_formulas_of_the_sizes_that_differ() -> None:
    rows = [skeleton_of(graph(n)) for n in (5, 8)]
    found = formulas([row.ints for row in rows], rows[0].places)
    assert found is not None and found.bases == (0,)
    third = skeleton_of(graph(11))
    assert found.fits(third.ints)
    assert found.at([11]) == list(third.ints)
    broken = list(third.ints)
    broken[-1] += 1
    assert not found.fits(tuple(broken))


COLUMNS = {
    "the size": ((5, 8), Formula((0,), 1)),
    "a multiple": ((15, 24), Formula((0,), 3)),
    "one more": ((6, 9), Formula((0,), 1, 1)),
    "twice less one": ((9, 15), Formula((0,), 2, -1)),
    "the half, rounded up": ((3, 4), Formula((0,), 1, 1, 2)),
    "the square": ((25, 64), Formula((0, 0), 1)),
    "a constant": ((7, 7), Formula((), 7)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_the_simplest_formula_is_found(name: str) -> None:
    column, wanted = COLUMNS[name]
    rows = [(n, 1, x) for n, x in zip((5, 8), column, strict=True)]
    found = formulas(rows, [1])
    assert found is not None
    values = [found.of[2].at([n]) for n in (5, 8)]
    assert tuple(values) == column
    assert found.of[2] == wanted


def test_where_no_formula_fits_there_is_none() -> None:
    assert formulas([(5, 1, 3), (8, 1, 100), (9, 1, 4)], [1]) is None
    assert formulas([(5, 1, 3), (5, 1, 3)], [1]) is None, "no size differs"
    assert formulas([(1, 1, 1), (8, 1, 8)], [1]) is None, "a size of 1 is special"


def test_arguments_with_other_ints() -> None:
    assert replace_ints((1, [2, "a"], {"k": 3, "b": True}), iter([7, 8, 9])) == (
        7,
        [8, "a"],
        {"k": 9, "b": True},
    )
    small, large = graph(5), graph(8)
    skeleton, other = skeleton_of(small), skeleton_of(large)
    given = arguments_with(small, skeleton, list(other.ints))
    calls = [n for n in small.nodes if n.op == "call_function"]
    wanted = [n for n in large.nodes if n.op == "call_function"]
    assert [str(given(n)[0]) for n in calls] == [str(n.args) for n in wanted]
