"""Convolutions and pooling, over batch and channels."""

from __future__ import annotations

from typing import Any

import torch

from ..choice import Choice, OpCall, Rule, replicated, together

aten = torch.ops.aten


def convolution(call: OpCall) -> list[Choice]:
    """Batch, output channels, and input channels where there is no bias to add more than once."""
    bias = len(call.ins) == 3
    choices = [replicated(call), ((0, "R", "R")[: 2 + bias], (0,))]
    if call.args[8] == 1 and not call.args[6]:
        choices.append(((("R", 0, 0)[: 2 + bias]), (1,)))
        choices += [] if bias else [((1, 1), ("sum",))]
    return choices


def convolution_backward(call: OpCall) -> list[Choice]:
    """Batch (the weight's gradient is a pending sum) and output channels (the input's is)."""
    mask = call.args[10]
    some = lambda *marks: tuple(m for m, wanted in zip(marks, mask, strict=True) if wanted)  # noqa: E731
    choices = [replicated(call), ((0, 0, "R"), some(0, "sum", "sum")), (("sum", "R", "R"), some("sum", "sum", "sum"))]
    if call.args[9] == 1 and not call.args[7]:
        choices.append(((1, "R", 0), some("sum", 0, 0)))
    return choices


def over_batch_and_channels(call: OpCall) -> list[Choice]:
    """Pooling looks at one image and one channel at a time."""
    space = 3 if call.target in VOLUMES else 2
    return [replicated(call), *together(call, range(call.ins[0].dim() - space))]


POOLS = (
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
)  # fmt: skip
VOLUMES = (
    aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool3d.default, aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default,
)  # fmt: skip
TABLE: dict[object, Rule] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    **dict.fromkeys((*POOLS, *VOLUMES), over_batch_and_channels),
}


def _bias_sizes(args: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    args[3] = [shapes[0][1]] if args[3] else args[3]
    return args


LOCAL_ARGS = {aten.convolution_backward.default: _bias_sizes}
