"""Padding and a convolution, or a convolution and a slice, are one op of the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf

torch.manual_seed(0)
X = torch.randn(2, 4, 10, dtype=torch.float64)
W = torch.randn(4, 2, 3, dtype=torch.float64)
Net = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (2, 0))
    return F.conv1d(padded, w, groups=2).sum() + padded.sin().sum()


JOINED: dict[str, Net] = {
    "padded before": lambda x, w: F.conv1d(F.pad(x, (2, 0)), w, groups=2),
    "padded on both sides": lambda x, w: F.conv1d(F.pad(x, (1, 1)), w, groups=2),
    "padded twice": lambda x, w: F.conv1d(F.pad(x, (1, 0)), w, padding=1, groups=2)[..., :10],
    "sliced": lambda x, w: F.conv1d(x, w, padding=2, groups=2)[..., :10],
    "sliced in all dims": lambda x, w: F.conv1d(x, w, padding=2, groups=2)[:, :, :10],
    "every second": lambda x, w: F.conv1d(F.pad(x, (2, 0)), w, stride=2, groups=2),
}
APART: dict[str, Net] = {
    "as it is": lambda x, w: F.conv1d(x, w, padding=1, groups=2),
    "the last elements": lambda x, w: F.conv1d(x, w, padding=2, groups=2)[..., 2:],
    "fewer elements": lambda x, w: F.conv1d(x, w, padding=2, groups=2)[..., :9],
    "ones before": lambda x, w: F.conv1d(F.pad(x, (2, 0), value=1.0), w, groups=2),
    "cut, then padded": lambda x, w: F.conv1d(F.pad(x, (3, -1)), w, groups=2),
    "more than it reads": lambda x, w: F.conv1d(x, w, padding=5, groups=2)[..., :10],
    "transposed": lambda x, w: F.conv_transpose1d(F.pad(x, (1, 0)), w, groups=2)[..., :10],
}


def ops(net: Net) -> list[str]:
    """The ops of the value and the gradients of a function, which are those of torch."""
    gradient = sf.value_and_grad(lambda x, w: net(x, w).square().sum(), argnums=(0, 1))
    leaves = X.clone().requires_grad_(), W.clone().requires_grad_()
    value = net(*leaves).square().sum()
    value.backward()
    wanted = value.detach(), tuple(x.grad for x in leaves)
    torch.testing.assert_close(gradient(X, W), wanted, rtol=0, atol=1e-12)
    graph = sf.jit(gradient).trace(X, W).program.graph.graph
    found = [node.target for node in graph.nodes if node.op == "call_function"]
    names = [getattr(x, "overloadpacket", x).__name__ for x in found]
    return [name for name in names if name.startswith("padded")]


@pytest.mark.parametrize("name", JOINED)
def test_padding_and_a_convolution_are_joined(name: str) -> None:
    assert ops(JOINED[name]) == ["padded_convolution", "padded_convolution_backward"]


@pytest.mark.parametrize("name", APART)
def test_other_convolutions_stay(name: str) -> None:
    assert ops(APART[name]) == []


def test_an_input_that_others_read_too_keeps_its_padding_and_its_gradient() -> None:
    assert ops(read_twice) == ["padded_convolution"]


def test_a_recomputed_convolution_is_joined_too() -> None:
    block = lambda x, w: F.conv1d(F.pad(x, (2, 0)), w, groups=2).sin()
    assert len(ops(sf.checkpoint(block))) == 3
