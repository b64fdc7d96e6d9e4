"""The state of torch.func and of a trace: asked about, and left as it was."""

from __future__ import annotations

import torch

import shardfn as sf

X = torch.ones(2)


def test_a_captured_value_is_described_once() -> None:
    fn = sf.jit(lambda x: (x * 2, x.max(0)), backend="aten")
    nodes = fn.trace(X).program.graph.graph.nodes
    described = [node for node in nodes if node.op == "call_function"]
    assert described
    assert all("val" in n.meta and "tensor_meta" not in n.meta for n in described)
