"""The communication of a plan as data: who reads a transfer, and what would need none."""

from __future__ import annotations

from typing import Any

import pieces
import torch

from shardfn.inspect.alternatives import considered
from shardfn.inspect.transfers import NO_RULE, argument_names, fallbacks, strictest, transfers
from tests.support.stages.plans import planned, program_of

X, W = torch.ones(8, 4), torch.ones(4, 6)


def told(fn: Any, args: Any, ins: Any) -> Any:
    axes = pieces.mesh_axes((2,))
    weighed = considered(program_of(fn, *args), axes, ins, [None], ())
    return transfers(planned(fn, args, ins), "allow", weighed)


def test_an_implicit_transfer_names_its_op_and_argument() -> None:
    (found,) = told(lambda x, w: [x @ w], (torch.ones(80, 4), W), [(0,), (1,)])
    assert (found.kind, found.axis, found.implicit) == ("all_gather", "a", True)
    assert (found.op, found.argument, found.source) == ("aten.mm.default", "mat2", "model.py:mm")
    assert found.arguments == ("self f32[80@a, 4]", "mat2 f32[4, 6@a]")
    assert found.value == "f32[4, 6@a]" and found.wanted == "f32[4, 6]"
    assert found.native == ("R",), "with the rows sharded"
    assert found.nbytes == 4 * 6 * 4 and found.whole is None


def test_a_result_that_is_reduced_is_asked_for() -> None:
    (found,) = told(lambda x: [x.sum(0)], (X,), [(0,)])
    assert (found.op, found.argument, found.implicit) == ("result", "it", False)


def test_an_op_without_a_rule_is_a_fallback_once_for_its_line() -> None:
    found = told(lambda x: [x.roll(1, 0)], (X,), [(1,)])
    assert found[0].whole == NO_RULE
    (fallback,) = fallbacks(found)
    assert (fallback.op, fallback.nbytes, fallback.why) == ("aten.roll.default", 8 * 4 * 4, NO_RULE)


def test_the_stricter_setting_counts() -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["custom"] = {"implicit_comm=warn": True}
    assert strictest(node, "allow") == "warn" and strictest(node, "error") == "error"


def test_arguments_have_the_names_of_the_schema() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    cat = graph.call_function(torch.ops.aten.cat.default, ([x, y], 0))
    assert argument_names(cat) == ["tensors[0]", "tensors[1]"]
    add = graph.call_function(torch.ops.aten.add.Tensor, (x, y), {"alpha": 2})
    assert argument_names(add) == ["self", "other"]
