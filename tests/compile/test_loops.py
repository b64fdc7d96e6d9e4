"""Loops in compiled programs: each graph once, steps from outside, forgotten with the program."""

from __future__ import annotations

import gc
from typing import Any

import torch

from shardfn.compile import loops
from shardfn.ops.loops import Scan
from tests.support.stages.graphs import graph_of
from tests.support.stages.plans import graph_with_loop

C, ROWS = torch.tensor([1.0, 2.0]), torch.arange(6.0).view(3, 2)


def outlined() -> tuple[torch.fx.GraphModule, list[Any], list[torch.fx.Graph]]:
    """A program with a scan whose body is compiled by a function that notes it."""
    seen: list[torch.fx.Graph] = []

    def compile_graph(graph: torch.fx.Graph, sums: dict[int, int]) -> Any:
        seen.append(graph)
        run = torch.fx.GraphModule(torch.nn.Module(), graph)
        return lambda inputs: run(*inputs)

    body = graph_of(lambda c, x: [c + x, c], C, ROWS[0])
    whole = graph_with_loop(Scan((body,), 0, 1, 3), C, ROWS)
    module = torch.fx.GraphModule(torch.nn.Module(), whole)
    return module, loops.compile_loops(module, compile_graph), seen


def test_a_body_is_compiled_once_however_many_steps_it_runs() -> None:
    module, found, seen = outlined()
    assert len(seen) == len(found) == 1
    carry, rows = module(C, ROWS)
    assert carry.tolist() == [7.0, 11.0]
    assert rows.tolist() == [[1.0, 2.0], [1.0, 3.0], [3.0, 6.0]]


def test_equal_loops_have_one_number_and_are_compiled_once() -> None:
    _, (first,), _ = outlined()
    _, (second,), seen = outlined()
    assert second is first and not seen and not first.is_own


def test_a_call_has_the_shapes_of_the_loop_and_memory_of_its_own() -> None:
    module, (loop,), _ = outlined()
    (node,) = [n for n in module.graph.nodes if "run_loop" in str(n.target)]
    assert node.args[1] == loop.number
    results = torch.ops.shardfn.run_loop([C, ROWS], loop.number)
    assert [x.shape for x in results] == [(2,), (3, 2)]
    assert results[0].data_ptr() != C.data_ptr()


def test_a_loop_is_forgotten_when_the_last_program_that_calls_it_is_gone() -> None:
    _, found, _ = outlined()
    _, again, _ = outlined()
    number = found[0].number
    del found
    gc.collect()
    assert number in loops._compiled
    del again
    gc.collect()
    assert number not in loops._compiled
