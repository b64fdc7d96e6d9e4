"""The cost of ops that a compiler fuses."""

from __future__ import annotations

import torch

from shardfn.hardware import H100, SENT
from shardfn.partition.auto import fused_op_cost
from shardfn.partition.planner import op_cost
from tests.support.stages.graphs import graph_of

X = torch.ones(1000)
UNIT = H100.compute(0.0, 4000.0, X.dtype) * SENT  # of one tensor


def costs(fn, *args) -> dict[str, float]:
    graph = graph_of(fn, *args)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return {node.name: round(fused_op_cost.in_bytes(node) / UNIT, 6) for node in calls}


def test_a_chain_reads_each_input_once_and_writes_its_end() -> None:
    assert costs(lambda x, y: [((x * y) + x).exp()], X, X.clone()) == {
        "mul": 2.0,
        "add": 0.0,
        "exp": 1.0,
    }


def test_a_value_that_others_read_is_written() -> None:
    found = costs(lambda x: [x.exp().cumsum(0)], X)
    assert found["exp"] == 2.0


def test_other_ops_cost_what_they_cost_alone() -> None:
    graph = graph_of(lambda x: [x.view(10, 100) @ x.view(100, 10)], X)
    (mm,) = [node for node in graph.nodes if node.name == "mm"]
    assert fused_op_cost.in_bytes(mm) == op_cost.in_bytes(mm) > 0
