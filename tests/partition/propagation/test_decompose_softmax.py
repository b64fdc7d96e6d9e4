"""A softmax along a sharded dim is decomposed, and then sends a maximum and a sum."""

from __future__ import annotations

import pieces
import torch

from shardfn.partition import plan as steps
from shardfn.partition.propagation.decompose_softmax import decomposed, works_along_sharded_dim
from tests.support.stages.graphs import shown
from tests.support.stages.plans import planned, told

aten = torch.ops.aten
OP = pieces.OneOp(aten._softmax.default, (torch.ones(4, 6), -1, False), {})


def slots(*marks: object) -> list[steps.Slot]:
    return [steps.Slot(i, OP.call.ins[0], (mark,)) for i, mark in enumerate(marks)]


def test_it_is_sharded_along_its_dim_if_every_slot_is() -> None:
    assert works_along_sharded_dim(OP.call, [slots(1)], (2,))
    assert works_along_sharded_dim(OP.call, [slots((1, 3))], (2,))
    assert not works_along_sharded_dim(OP.call, [slots(1, "R")], (2,)), "one is not"
    assert not works_along_sharded_dim(OP.call, [slots(0)], (2,))
    assert not works_along_sharded_dim(OP.call, [slots(1)], (1,)), "by one rank"


def test_other_ops_are_never_decomposed() -> None:
    other = pieces.OneOp(aten.exp.default, (torch.ones(4, 6),), {})
    assert not works_along_sharded_dim(other.call, [slots(1)], (2,))


def test_the_decomposition_computes_the_op_and_knows_where_it_comes_from() -> None:
    OP.node.meta.update(source="model.py:7", phase="backward")
    graph = decomposed(OP.call, OP.node)
    assert "amax" in shown(graph) and "sum" in shown(graph)
    assert {n.meta["source"] for n in graph.nodes} == {"model.py:7"}
    assert {n.meta["phase"] for n in graph.nodes} == {"backward"}
    x = torch.arange(24.0).view(4, 6).sin()
    got = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    torch.testing.assert_close(got, x.softmax(-1))


def test_only_a_number_for_each_row_is_sent() -> None:
    plan = planned(lambda x: [x.softmax(-1)], (torch.ones(4, 6),), [(1,)])
    sent = [line for line in told(plan) if line.startswith("redistribute")]
    assert [line.split(": ")[1] for line in sent] == [
        "max -> R by all_reduce (implicit)",
        "sum -> R by all_reduce (implicit)",
    ]
    assert plan.outs[0].placements == (1,)
