"""Loops and branches as ops: what they compute, and that results are memory of their own."""

from __future__ import annotations

import pytest
import torch

from shardfn.ops.loops import Branch, Scan, While, inner_nodes, loop_of, shapes_of
from tests.support.stages.graphs import graph_of

F64 = torch.float64
W, C = torch.tensor(2.0, dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)
ROWS = torch.arange(6.0, dtype=F64).view(3, 2)
STEP = graph_of(lambda w, c, x: [c * w + x, c + 1], W, C, ROWS[0])


def scan(length: int = 3, *, reverse: bool = False) -> Scan:
    return Scan((STEP,), 1, 1, length, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_carries_values_and_stacks_rows(reverse: bool) -> None:
    carry, rows = C, [C] * 3
    for i in (2, 1, 0) if reverse else (0, 1, 2):
        rows[i] = carry + 1
        carry = carry * 2 + ROWS[i]
    got = scan(reverse=reverse)(W, C, ROWS)
    assert torch.equal(got[0], carry)
    assert torch.equal(got[1], torch.stack(rows))


def test_a_scan_of_no_steps_returns_its_carry_and_no_rows() -> None:
    carry, rows = scan(0)(W, C, ROWS[:0])
    assert torch.equal(carry, C) and carry.data_ptr() != C.data_ptr()
    assert (rows.shape, rows.dtype) == ((0, 2), F64)


def test_a_while_loop_runs_until_its_condition_fails() -> None:
    condition = graph_of(lambda w, c: [c.sum() < 20], W, C)
    step = graph_of(lambda w, c: [c * w], W, C)
    loop = While((condition, step), 1, 1)
    assert loop(W, C)[0].tolist() == [8.0, 16.0]
    assert loop(W, 100 * C)[0].tolist() == [100.0, 200.0], "no step at all"


def test_a_branch_runs_one_graph() -> None:
    branch = Branch((graph_of(lambda x: [x + 1], C), graph_of(lambda x: [x - 1], C)), 1)
    assert branch(C, torch.tensor(True))[0].tolist() == [2.0, 3.0]
    assert branch(C, torch.tensor(False))[0].tolist() == [0.0, 1.0]


def test_results_share_no_memory_with_arguments_or_each_other() -> None:
    graph = graph_of(lambda x: [x, x], C)
    first, second = Branch((graph, graph), 1)(C, torch.tensor(True))
    assert len({x.data_ptr() for x in (C, first, second)}) == 3


def test_shapes_of_a_scan_have_a_row_for_each_step() -> None:
    assert [tuple(x.shape) for x in shapes_of(scan(5))] == [(2,), (5, 2)]


def test_inner_nodes_repeat_the_steps_of_a_scan() -> None:
    graph = torch.fx.Graph()
    holders = [graph.placeholder(name) for name in "wcx"]
    node = graph.call_function(scan(), tuple(holders))
    graph.output([node])
    inside = len(STEP.nodes)
    assert len(list(inner_nodes(graph))) == len(graph.nodes) + 3 * inside
    assert len(list(inner_nodes(graph, once=True))) == len(graph.nodes) + inside
    assert loop_of(node) is node.target
    with pytest.raises(AssertionError, match="w runs no loop"):
        loop_of(holders[0])


def test_loops_print_as_what_they_are() -> None:
    assert [repr(scan()), repr(Branch((), 0)), repr(While((), 0, 0))] == ["scan", "cond", "while"]
