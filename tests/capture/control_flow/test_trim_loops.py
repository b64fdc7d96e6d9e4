"""Trimmed loops: unread results and what only they need are gone, and the rest is the same."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.control_flow.trim_loops import trim
from shardfn.ops.loops import Branch, Scan
from tests.support.stages.graphs import graph_of
from tests.support.stages.plans import graph_with_loop

W, C, D = torch.tensor(3.0), torch.ones(2), torch.full((2,), 2.0)
ROWS = torch.arange(6.0).view(3, 2)
BODY = graph_of(lambda w, c, d, x: [c + x, d * w, x * 2, d + 1], W, C, D, ROWS[0])


def kept(loop: Any, args: Any, results: list[int]) -> tuple[Any, list[torch.Tensor]]:
    """A loop after only some of its results were read, and those results."""
    graph = graph_with_loop(loop, *args)
    (output,) = graph.find_nodes(op="output")
    output.args = ([output.args[0][i] for i in results],)
    trim(graph)
    graph.lint()
    nodes = [n.target for n in graph.nodes if isinstance(n.target, (Scan, Branch))]
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return (nodes[0] if nodes else None), list(module(*args))


def test_a_scan_keeps_the_carries_that_its_results_depend_on() -> None:
    scan, args = Scan((BODY,), 1, 2, 3), (W, C, D, ROWS)
    everything = scan(*args)
    for results, consts, carries in (
        ([0], 0, 1),
        ([2], 0, 0),
        ([1], 1, 1),
        ([3], 1, 1),
        ([0, 3], 1, 2),
    ):
        trimmed, got = kept(scan, args, results)
        assert (trimmed.consts, trimmed.carries) == (consts, carries), results
        for i, x in zip(results, got, strict=True):
            assert torch.equal(x, everything[i])


def test_an_unread_loop_is_gone() -> None:
    trimmed, got = kept(Scan((BODY,), 1, 2, 3), (W, C, D, ROWS), [])
    assert trimmed is None and got == []


def test_a_branch_keeps_the_inputs_of_either_side() -> None:
    yes = graph_of(lambda a, b: [a + 1, b], C, D)
    no = graph_of(lambda a, b: [a, b * 2], C, D)
    branch, args = Branch((yes, no), 2), (C, D, torch.tensor(False))
    trimmed, (got,) = kept(branch, args, [1])
    assert trimmed.consts == 1 and got.tolist() == [4.0, 4.0]
    assert len(trimmed.graphs[0].find_nodes(op="placeholder")) == 1
