"""Ops that rearrange: views, permutations, slices, concatenations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...types import Mark
from ..choice import Choice, OpCall, Rule, replicated, together

aten = torch.ops.aten


def _linear(choices: list[Choice], call: OpCall) -> list[Choice]:
    return [replicated(call), (("sum",) * len(call.ins), ("sum",) * len(call.outs)), *choices]


def reshape(call: OpCall) -> list[Choice]:
    """A dim that leads its group of merged and split dims stays cut, in runs that keep rows whole."""
    (x,), (out,) = call.ins, call.outs
    if x.numel() == 0:
        return [replicated(call)]
    choices: list[Choice] = []
    for i, rows, j, other in groups(list(x.shape), list(out.shape)):
        run = math.lcm(rows, other)
        choices.append(((_scaled(i, run // rows),), (_scaled(j, run // other),)))
    return _linear(choices, call)


def _scaled(dim: int, scale: int) -> Mark:
    return dim if scale == 1 else (dim, scale)


def groups(a: list[int], b: list[int]) -> list[tuple[int, int, int, int]]:
    """(leading dim of a, elements behind it, leading dim of b, elements behind it) for each group of dims that a reshape mixes.

    Example:
        >>> groups([6, 4], [2, 3, 4])
        [(0, 1, 0, 3), (1, 1, 2, 1)]
    """
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] == 1 and b[j] != 1:
            i += 1
            continue
        if b[j] == 1 and a[i] != 1:
            j += 1
            continue
        na, nb, lead_a, lead_b = a[i], b[j], i, j
        i, j = i + 1, j + 1
        while na != nb:
            if na < nb:
                na, i = na * a[i], i + 1
            else:
                nb, j = nb * b[j], j + 1
        found.append((lead_a, na // a[lead_a], lead_b, nb // b[lead_b]))
    return found


def permuted(order: Callable[[OpCall, int], list[int]]) -> Rule:
    """Dims in another order."""

    def rule(call: OpCall) -> list[Choice]:
        dims = order(call, call.ins[0].dim())
        return _linear([((d,), (dims.index(d),)) for d in range(len(dims))], call)

    return rule


def _swapped(call: OpCall, n: int) -> list[int]:
    dims = list(range(n))
    a, b = (d % max(n, 1) for d in call.args[1:3])
    if n:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def expand(call: OpCall) -> list[Choice]:
    """Dims that keep their size stay cut."""
    (x,), (out,) = call.ins, call.outs
    lead = out.dim() - x.dim()
    return _linear([((d,), (d + lead,)) for d in range(x.dim()) if x.shape[d] == out.shape[d + lead]], call)


def all_but(position: int, name: str = "dim", default: int = 0) -> Rule:
    """Every dim but one stays cut: slices, splits, concatenations."""

    def rule(call: OpCall) -> list[Choice]:
        n = call.ins[0].dim()
        dim = call.arg(position, name, default) % max(n, 1)
        same = all(x.dim() == n for x in call.ins)  # cat takes legacy empty tensors
        dims = [d for d in range(n) if d != dim or _whole(call, d)] if same else []
        return _linear(together(call, dims), call)

    return rule


def _whole(call: OpCall, d: int) -> bool:
    """A slice that takes all of a dim."""
    return call.target is aten.slice.Tensor and call.outs[0].shape[d] == call.ins[0].shape[d] and call.arg(4, "step", 1) == 1


def select(call: OpCall) -> list[Choice]:
    """The selected dim is whole; the others stay cut."""
    n, dim = call.ins[0].dim(), call.args[1] % call.ins[0].dim()
    return _linear([((d,), (d - (d > dim),)) for d in range(n) if d != dim], call)


def select_backward(call: OpCall) -> list[Choice]:
    """The inverse of select."""
    n, dim = call.outs[0].dim(), call.args[2] % call.outs[0].dim()
    return _linear([((d - (d > dim),), (d,)) for d in range(n) if d != dim], call)


def stack(call: OpCall) -> list[Choice]:
    """The new dim is whole; the others stay cut."""
    dim = call.arg(1, "dim", 0) % call.outs[0].dim()
    count = len(call.ins)
    return _linear([((d,) * count, (d + (d >= dim),)) for d in range(call.ins[0].dim())], call)


def pad(call: OpCall) -> list[Choice]:
    """Dims that are not padded stay cut."""
    n, pads = call.ins[0].dim(), call.args[1]
    padded = {n - 1 - i // 2 for i, width in enumerate(pads) if width}
    return [replicated(call), *together(call, [d for d in range(n) if d not in padded])]


TABLE: dict[object, Rule] = {
    aten.view.default: reshape,
    aten._unsafe_view.default: reshape,
    aten.reshape.default: reshape,
    aten.unsqueeze.default: reshape,
    aten.squeeze.default: reshape,
    aten.squeeze.dim: reshape,
    aten.squeeze.dims: reshape,
    aten.t.default: permuted(lambda call, n: list(range(n))[::-1]),
    aten.permute.default: permuted(lambda call, n: [d % n for d in call.args[1]]),
    aten.transpose.int: permuted(_swapped),
    aten.expand.default: expand,
    aten.slice.Tensor: all_but(1),
    aten.slice_backward.default: all_but(2),
    aten.split.Tensor: all_but(2),
    aten.split_with_sizes.default: all_but(2),
    aten.cat.default: all_but(1),
    aten.stack.default: stack,
    aten.select.int: select,
    aten.select_backward.default: select_backward,
    aten.constant_pad_nd.default: pad,
}

# Ops that only rearrange: what they make of a program's input still costs nothing to have early.
REARRANGES = {*TABLE, aten._to_copy.default, aten.alias.default} - {aten.cat.default, aten.stack.default}

# Ops that a rank runs as a view to its own shape: a dim of size 1 there need not be one of size 1 in the whole.
AS_VIEW = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.view.default, aten.reshape.default}

# The argument that states the shape of the result, which on a rank is the local one.
SIZES: dict[object, int] = {
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}
