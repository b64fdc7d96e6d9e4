"""The names of a printed program: by path, by op, each once."""

from __future__ import annotations

import pytest
import torch

from shardfn.capture.printed_names import dotted, dotted_names, free, op_name, printed_names, tells
from shardfn.ops.loops import Scan
from shardfn.types import Collective
from tests.support.stages.graphs import graph_of
from tests.support.stages.plans import graph_with_loop

PATHS = {
    "params['w1']": "params.w1",
    "args[0][2]": "args.0.2",
    "x": "x",
    "p['layer 1'][0].w": "p.layer_1.0.w",
    'd["a-b"]': "d.a_b",
    "": "x",
    "[0]": "0",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_as_a_name(path: str) -> None:
    assert dotted(path) == PATHS[path]


def test_a_name_tells_its_path_if_nothing_was_lost() -> None:
    assert tells("params.w1", "params['w1']")
    assert not tells("p.layer_1", "p['layer 1']")
    assert not tells("other", "x")


def test_a_taken_name_gets_the_first_free_number() -> None:
    taken = {"mm", "mm_1"}
    assert [free("mm", taken), free("mm", taken), free("x", taken)] == ["mm_2", "mm_3", "x"]
    assert dotted_names(["a b", "a-b", "c"]) == ["a_b", "a_b_1", "c"]


def test_an_op_has_its_name_without_an_overload_and_a_collective_that_of_its_kind() -> None:
    graph = graph_of(lambda x: (x + 1) * 2, torch.ones(3))
    add, mul = (n for n in graph.nodes if n.op == "call_function")
    assert (op_name(add), op_name(mul)) == ("add", "mul")
    mul.meta["collective"] = Collective("all_reduce", "a", 8, "sum", "mul", None, False)
    assert op_name(mul) == "all_reduce"


def test_nodes_keep_numbers_of_their_own_op_and_lose_other_names() -> None:
    graph = graph_of(lambda x: (x + 1) + 2, torch.ones(3))
    holder, first, second, _ = graph.nodes
    first.name, second.name = "add_7", "some_other"
    names = printed_names(graph, {holder: "params.w"})
    assert list(names.values()) == ["params.w", "add_7", "add"]


def test_inputs_of_a_loop_are_named_by_their_role() -> None:
    w, c, rows = torch.ones(2, 2), torch.ones(2), torch.ones(3, 2)
    body = graph_of(lambda w, c, x: [w @ c + x, c], w, c, rows[0])
    graph = graph_with_loop(Scan((body,), 1, 1, 3), w, c, rows)
    holders = graph.find_nodes(op="placeholder")
    names = printed_names(graph, dict(zip(holders, ("w", "c", "rows"), strict=True)))
    inner = [names[n] for n in body.find_nodes(op="placeholder")]
    assert inner == ["w", "carry", "step_input"]
    assert len(set(names.values())) == len(names) - 1, "w alone is named twice"
