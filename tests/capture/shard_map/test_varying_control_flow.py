"""Nodes of control flow in a graph: which they are, their varying axes, and how they are raised."""

from __future__ import annotations

import operator
from typing import Any

import torch

from shardfn.capture.control_flow import bodies, endings
from shardfn.capture.shard_map import varying_control_flow as flow
from shardfn.capture.shard_map.varying import Kinds
from tests.support.stages.loop_code import Code, varied

DP, NONE = frozenset({"dp"}), frozenset()


def scan(step: Any, **axes: Any) -> tuple[Code, Any]:
    code = Code(**axes)
    c, xs, w = code.inputs
    outs = code.body("step", step, [c, xs], [w])
    return code, code.ending(endings.scan, outs, [c], [xs], 3, False)


def step(g: Any, c: Any, x: Any, w: Any) -> Any:
    return [g(torch.add, c, x), g(torch.mul, w, 2)]


def nodes_of(code: Code, target: Any) -> Any:
    (node,) = code.graph.find_nodes(op="call_function", target=target)
    return node


def test_parts_of_control_flow_are_told_from_other_nodes() -> None:
    code, node = scan(step, c=NONE, xs=DP, w=NONE)
    run = nodes_of(code, torch.ops.higher_order.wrap)
    enter = nodes_of(code, bodies.enter)
    assert flow.is_part(node) and flow.is_part(run) and flow.is_part(enter)
    item = next(iter(enter.users))
    assert not flow.is_part(item) and flow.kind(Kinds(code.module()), item) is None
    module = code.module()
    assert flow.is_apart(module, run) and flow.is_apart(module, enter)
    assert not flow.is_apart(module, item)
    backward = code.graph.call_function(operator.add, (item, item))
    assert not flow.is_apart(module, backward)


def test_the_axes_of_each_part_are_those_that_are_agreed() -> None:
    code, node = scan(step, c=NONE, xs=DP, w=NONE)
    kinds = Kinds(code.module())
    kinds.result(code.axes)
    of = lambda target: flow.kind(kinds, nodes_of(code, target))
    assert of(bodies.enter) == [DP, DP]
    assert of(torch.ops.higher_order.wrap) == [DP, NONE]
    assert flow.kind(kinds, node) == [DP, NONE]


def test_results_have_the_axes_of_their_position_in_leave() -> None:
    code, _ = scan(step, c=NONE, xs=DP, w=NONE)
    inner = code.root.step.graph
    (output,) = inner.find_nodes(op="output")
    output.args = (output.args[0][::-1],)
    kinds = Kinds(code.module())
    kinds.result(code.axes)
    run = nodes_of(code, torch.ops.higher_order.wrap)
    assert flow.kind(kinds, run) == [NONE, DP]


def test_a_body_returns_what_its_op_agreed_on() -> None:
    same = lambda g, c, x, w: [g(torch.mul, w, w), g(torch.add, c, x)]
    code, node = scan(same, c=DP, xs=NONE, w=NONE)
    module = code.settled()
    assert varied(module) == []
    assert varied(module.step) == ["mul over dp", "step_1 over dp"]
    (left,) = module.step.graph.find_nodes(op="call_function", target=bodies.leave)
    first, _ = left.args[0]
    assert first.target.__name__ == "vary" and first.args[1] == "dp"
    assert node.args[1] == [code.inputs[0]], "the carry varies already"


def test_a_body_that_no_op_takes_is_as_its_arguments() -> None:
    code = Code(x=DP, w=NONE)
    outs = code.body("alone", lambda g, x, w: [x, w], code.inputs, [])
    code.graph.output(tuple(outs))
    kinds = Kinds(code.module())
    kinds.result(code.axes)
    run = nodes_of(code, torch.ops.higher_order.wrap)
    assert flow.kind(kinds, run) == [DP, DP]
    assert flow.rewrite(kinds, run) and not flow.rewrite(kinds, outs[0])
