"""Attention as the kernel that Inductor makes of products and a softmax."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn.compile.kernels.attention import fuse_attention
from shardfn.schedule import copied


def kernels(scale: float) -> list[str]:
    fn = lambda q, k, v: torch.softmax(q @ k.mT / scale if scale else q @ k.mT, -1) @ v
    lowered = sf.jit(fn).lower(*[torch.ones(2, 3, 5, 7)] * 3)
    graph = copied(lowered.program.graph)
    fuse_attention(graph)
    graph.lint()
    return [str(x.target) for x in graph.nodes]


def test_products_around_a_scaled_softmax_are_one_kernel() -> None:
    assert any("_scaled_dot_product" in x for x in kernels(2.0))
    assert "aten._softmax.default" in kernels(0.0)
