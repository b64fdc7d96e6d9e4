"""The part of a coordinate in a pipeline is what its text says."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.compile.text.pipelines import fields_of, fields_text
from shardfn.ops.messages import Receive, Send
from shardfn.ops.pipeline import Pipeline


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w) @ params[0]  # sent to the second stage, as its gradient is back
    return x.square().mean()


def pipelines() -> list[Pipeline]:
    args = [torch.ones(4, 4)] * 2, torch.ones(6, 4)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        grad = sf.pipelined_grad(loss, 3, schedule="zero_bubble")
        step = sf.shard(grad, mesh, ([P(pp=0), P(pp=1)], None), backend="aten")
        programs = step.lower(*args).programs.values()
    nodes = [node for program in programs for node in program.graph.nodes]
    return [node.target for node in nodes if isinstance(node.target, Pipeline)]


def without_groups(x: Any) -> Any:
    return attrs.evolve(x, group="") if isinstance(x, (Send, Receive)) else x


def test_all_instructions_and_results_are_those_of_the_text() -> None:
    for pipeline in pipelines():
        read = fields_of(json.loads(json.dumps(fields_text(pipeline))))
        assert read["instructions"] == tuple(map(without_groups, pipeline.instructions))
        for name in ("consts", "length", "coordinates", "results"):
            assert read[name] == getattr(pipeline, name)


@pytest.mark.parametrize(
    "instruction",
    [
        ["run", 0, "X", 0, 0, [], []],
        ["run", -1, "F", 0, 0, [], []],
        ["zero", ["sum"], [[4], [1], "float32", "cpu"]],
        ["zero", ["else", 0], [[4], [1], "float32", "cpu"]],
        ["zero", ["sum", 0], [[4], [], "float32", "cpu"]],
        ["zero", ["sum", 0], [[-4], [1], "float32", "cpu"]],
        ["send", "pp", [0, 1], ["sum", 0], [[4], [1], "float32", "cpu"], [None] * 4],
        ["receive", 3, [0, 1, 2], ["sum", 0], [[4], [1], "float32", "cpu"], [None] * 4],
        ["else"],
    ],
)
def test_a_text_that_is_no_instruction_is_refused(instruction: Any) -> None:
    text = fields_text(pipelines()[0])
    with pytest.raises((ValueError, KeyError, TypeError)):
        fields_of({**text, "instructions": [instruction]})
