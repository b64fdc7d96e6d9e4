"""Ops that work element by element, with broadcasting."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch

from ...ops.elementwise import Elementwise
from ...types import AxisPlacement
from ..emission.graph_builder import Builder
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated
from .dtypes import keeps_values

aten = torch.ops.aten

# A Partial sum passes through where the op is linear:
ADDS = {aten.add.Tensor, aten.sub.Tensor, aten.complex.default}  # in all operands at once
SCALES = {aten.mul.Tensor}  # in either operand
LINEAR_IN_FIRST = {  # in the first operand, with the others replicated
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.clone.default,
    aten.alias.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.softplus_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten._conj.default,
}
UNTAGGED = {  # pointwise, although torch does not tag them so
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.detach.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.threshold_backward.default,
    aten.bernoulli.p,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten._conj.default,
    aten.complex.default,
    aten.polar.default,
    aten.frexp.Tensor,
    aten.softplus_backward.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.copy.default,
}


def is_pointwise(target: object) -> bool:
    """Return whether an op works element by element."""
    return target in UNTAGGED or torch.Tag.pointwise in getattr(target, "tags", ())


def pointwise(call: OpCall) -> list[Choice]:
    """Shard a pointwise op over any dim of its result; linear ones pass Partial sums on."""
    out = max(call.outs, key=lambda x: (x.dim(), x.numel()))
    if len(set(call.out_shapes)) != 1 and not _broadcast(call, out):
        return [replicated(call)]
    return [replicated(call), *_dims(call, out), *_partial_strategies(call)]


def _broadcast(call: OpCall, out: torch.Tensor) -> bool:
    """Return whether all operands and results broadcast to the largest result."""
    for shape in (*call.shapes, *call.out_shapes):
        if len(shape) > out.dim():
            return False
        pairs = zip(reversed(shape), reversed(out.shape), strict=False)
        if any(size not in (1, whole) for size, whole in pairs):
            return False
    return True


def _dims(call: OpCall, out: torch.Tensor) -> list[Choice]:
    """List one strategy for each dim of the largest result. Operands and results that broadcast
    over it are replicated.
    """

    def placed(x: torch.Tensor, d: int) -> AxisPlacement:
        place = d - out.dim() + x.dim()
        return "R" if place < 0 or (x.shape[place] == 1 and out.shape[d] != 1) else place

    return [
        (tuple(placed(x, d) for x in call.ins), tuple(placed(x, d) for x in call.outs))
        for d in range(out.dim())
    ]


def _partial_strategies(call: OpCall) -> list[Choice]:
    """List the strategies by which a linear op passes Partial sums on."""
    target = call.target
    n = len(call.ins)
    if target in ADDS:
        return [(("sum",) * 2, ("sum",))] if n == 2 else []
    choices = []
    if target in LINEAR_IN_FIRST and isinstance(call.args[0], torch.fx.Node):
        choices.append((("sum", *["R"] * (n - 1)), ("sum",)))
    if target in SCALES and n == 2:
        choices.append((("R", "sum"), ("sum",)))
    if target is aten._to_copy.default and widens(call):
        choices.append((("sum",), ("sum",)))
    if target is aten.where.self:
        choices.append((("R", "sum", "sum"), ("sum",)))
    return choices


def widens(call: OpCall) -> bool:
    """Return whether a cast keeps every value of a floating-point tensor."""
    (x,), (out,) = call.ins, call.outs
    return x.dtype.is_floating_point and keeps_values(x.dtype, out.dtype)


row = functools.partial(Op, pointwise, strided=True, of_sizes=True)
ROW = row()  # of every op that works element by element


def row_of(target: Any) -> Op:
    """Return the record of an op that works element by element."""
    if isinstance(target, Elementwise):
        return attrs.evolve(ROW, lower=functools.partial(_written_out, target))
    return ROW


def _written_out(block: Elementwise, b: Builder, args: list[Any], *_: Any) -> list[torch.fx.Node]:
    """Emit the ops of a block."""
    return b.inline(block, args)


TABLE: dict[object, Op] = {
    aten._to_copy.default: row(rearranges=True),
    aten.alias.default: row(rearranges=True),
    aten.copy.default: row(constant_of=1),
}
