"""Normalisations, not decomposed: they are sharded over batch dims, and over groups of
channels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...types import AxisPlacement
from .. import layout
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated

aten = torch.ops.aten


def _some(mask: list[bool], placements: list[Any]) -> tuple[Any, ...]:
    """Keep the placements of the gradients that are needed."""
    return tuple(m for m, wanted in zip(placements, mask, strict=True) if wanted)


def _linear_in_gradient(call: OpCall) -> Choice:
    """Return the strategy by which a Partial incoming gradient gives Partial gradients."""
    others = ("R",) * (len(call.ins) - 1)
    sums = ("sum",) * len(call.outs)
    return ("sum", *others), sums


def layer_norm(call: OpCall) -> list[Choice]:
    """Shard a layer norm over batch dims."""
    batch = call.ins[0].dim() - len(call.args[1])
    weights = ("R",) * (len(call.ins) - 1)
    choices = [replicated(call)]
    for d in range(batch):
        choices.append(((d, *weights), (d, d, d)))
    return choices


def layer_norm_backward(call: OpCall) -> list[Choice]:
    """Shard a layer norm's backward over batch dims; the gradients of weights are Partial sums."""
    batch = call.ins[0].dim() - len(call.args[2])
    mask = call.args[7]
    weights = ("R",) * (len(call.ins) - 4)
    choices = [replicated(call)]
    for d in range(batch):
        gradients = _some(mask, [d, "sum", "sum"])
        choices.append(((d, d, d, d, *weights), gradients))
    choices.append(_linear_in_gradient(call))
    return choices


def group_norm(call: OpCall) -> list[Choice]:
    """Shard a group norm over the batch or over groups of channels."""
    n = len(call.ins) - 1
    choices = [replicated(call), ((0, *("R",) * n), (0, 0, 0))]
    *_, channels, _, groups, _ = call.args
    if groups > 1:
        weight, x = _in_groups(channels, groups)
        choices.append(((x, *(weight,) * n), (x, 1, 1)))
    return choices


def _in_groups(channels: int, groups: int) -> tuple[AxisPlacement, AxisPlacement]:
    """Return the placements of weights and images that shard groups of channels."""
    size = channels // groups
    return layout.joined(0, size), layout.joined(1, size)


def group_norm_backward(call: OpCall) -> list[Choice]:
    """Shard a group norm's backward over the batch or over groups of channels."""
    n = len(call.ins) - 4
    mask = call.args[9]
    gradients = _some(mask, [0, "sum", "sum"])
    choices = [replicated(call), ((0, 0, 0, 0, *("R",) * n), gradients), _linear_in_gradient(call)]
    channels, _, groups = call.args[6:9]
    if groups > 1:
        weight, x = _in_groups(channels, groups)
        by_group = _some(mask, [x, weight, weight])
        choices.append(((x, x, 1, 1, *(weight,) * n), by_group))
    return choices


def _group_norm_args(position: int) -> Any:
    """Give a group norm the local sizes of batch, channels and groups."""

    def local(args: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
        batch, channels = shapes[0][:2]
        size = args[position + 1] // args[position + 3]
        args[position : position + 2] = batch, channels
        args[position + 3] = channels // size
        return args

    return local


row = functools.partial(Op, strided=True, of_sizes=True)
TABLE: dict[object, Op] = {
    aten.native_layer_norm.default: row(layer_norm),
    aten.native_layer_norm_backward.default: row(layer_norm_backward),
    aten.native_group_norm.default: row(group_norm, local_args=_group_norm_args(3)),
    aten.native_group_norm_backward.default: row(
        group_norm_backward, local_args=_group_norm_args(5)
    ),
}
