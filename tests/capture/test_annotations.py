"""Annotations of nodes: the user's line, the phase, and the checkpointed calls of an op."""

from __future__ import annotations

import torch

from shardfn.capture import annotations
from shardfn.capture.annotations import annotations_restored, attach, fresh_region, line_of
from shardfn.errors import __file__ as ours

STACK = f"""
  File "/home/me/train.py", line 3, in step
  File "/home/me/model.py", line 7, in forward
  File "{ours}", line 1, in inside
"""


def graph(*noted: dict) -> torch.fx.GraphModule:
    """A chain of ops with these metas."""
    made = torch.fx.Graph()
    node = made.placeholder("x")
    for meta in noted:
        node = made.call_function(torch.ops.aten.exp.default, (node,))
        node.meta.update(meta)
    made.output([node])
    return torch.fx.GraphModule(torch.nn.Module(), made)


def attached(*noted: dict) -> list[torch.fx.Node]:
    module = graph(*noted)
    attach(module)
    return [n for n in module.graph.nodes if n.op == "call_function"]


def test_the_line_is_the_innermost_one_of_the_user() -> None:
    assert line_of(STACK) == "/home/me/model.py:7"
    assert line_of("") is None and line_of(None) is None


def test_a_backward_has_the_line_of_its_forward_op() -> None:
    forward = {"seq_nr": 5, "stack_trace": STACK}
    backward = {
        "stack_trace": STACK.replace("line 7", "line 99"),
        "custom": {"phase": "backward", "belongs_to": 5},
    }
    first, second = attached(forward, backward)
    assert (first.meta["phase"], second.meta["phase"]) == ("forward", "backward")
    assert second.meta["source"] == "/home/me/model.py:7"


def test_an_op_without_a_line_takes_that_of_its_input() -> None:
    _, second = attached({"stack_trace": STACK}, {})
    assert second.meta["source"] == "/home/me/model.py:7"


def test_a_backward_belongs_to_the_checkpointed_calls_of_its_forward() -> None:
    forward = {"seq_nr": 5, "stack_trace": STACK, "custom": {"checkpoint=0": "nothing_saveable"}}
    backward = {"custom": {"phase": "backward", "belongs_to": 5}}
    _, second = attached(forward, backward)
    assert second.meta["custom"]["inside"] == ("checkpoint=0",)


def test_a_backward_inherits_the_setting_of_implicit_comm() -> None:
    forward = {"seq_nr": 5, "stack_trace": STACK, "custom": {"implicit_comm=error": True}}
    backward = {"custom": {"phase": "backward", "belongs_to": 5}}
    _, second = attached(forward, backward)
    assert second.meta["custom"]["implicit_comm=error"]


def test_regions_and_places_of_a_node() -> None:
    noted = {"checkpoint=1": "nothing_saveable", "outermost": True, "phase": "backward"}
    assert annotations.regions(noted) == {"checkpoint=1": "nothing_saveable"}
    assert set(annotations.call_annotations(noted)) == {"checkpoint=1", "outermost"}
    assert annotations.is_checkpointed(noted)
    assert not annotations.is_checkpointed({"checkpoint=1": "everything_saveable"})


def test_every_checkpointed_call_has_a_number_of_its_own() -> None:
    assert fresh_region() != fresh_region()


def test_annotations_are_as_before_after_a_context() -> None:
    with torch.fx.traceback.preserve_node_meta():
        with annotations_restored():
            torch.fx.traceback.get_current_meta()["custom"] = {"phase": "backward"}
        assert not torch.fx.traceback.get_current_meta().get("custom")
