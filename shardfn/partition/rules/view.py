"""Ops that rearrange: views, permutations, slices, concatenations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...types import Mark
from ..rule_api.strategy import Choice, OpCall, Rule, replicated, together

aten = torch.ops.aten


def _linear(choices: list[Choice], call: OpCall) -> list[Choice]:
    return [
        replicated(call),
        (("sum",) * len(call.ins), ("sum",) * len(call.outs)),
        *choices,
    ]


def reshape(call: OpCall) -> list[Choice]:
    """Shards the leading dim of each group of merged and split dims, in units that do not split
    rows.
    """
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
    """(leading dim of a, elements after it, leading dim of b, elements after it) for each
    group of dims that a reshape mixes.

    Example:
        >>> groups([6, 4], [2, 3, 4])
        [(0, 1, 0, 3), (1, 1, 2, 1)]
    """
    found = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        if a[i] == 1 and b[j] != 1:
            i += 1
            continue
        if b[j] == 1 and a[i] != 1:
            j += 1
            continue
        na = a[i]
        nb = b[j]
        lead_a = i
        lead_b = j
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
    """Shards dims that keep their size."""
    (x,), (out,) = call.ins, call.outs
    lead = out.dim() - x.dim()
    return _linear(
        [
            ((d,), (d + lead,))
            for d in range(x.dim())
            if x.shape[d] == out.shape[d + lead]
        ],
        call,
    )


def all_but(position: int, name: str = "dim", default: int = 0) -> Rule:
    """Shards every dim except one: slices, splits, concatenations."""

    def rule(call: OpCall) -> list[Choice]:
        n = call.ins[0].dim()
        dim = call.arg(position, name, default) % max(n, 1)
        same = all(x.dim() == n for x in call.ins)  # cat: legacy empty tensors
        dims = [d for d in range(n) if d != dim or _whole(call, d)] if same else []
        return _linear(together(call, dims), call)

    return rule


def _whole(call: OpCall, d: int) -> bool:
    """A slice that takes all of a dim."""
    return (
        call.target is aten.slice.Tensor
        and call.outs[0].shape[d] == call.ins[0].shape[d]
        and call.arg(4, "step", 1) == 1
    )


def select(call: OpCall) -> list[Choice]:
    """Shards all dims except the selected one."""
    n = call.ins[0].dim()
    dim = call.args[1] % call.ins[0].dim()
    return _linear([((d,), (d - (d > dim),)) for d in range(n) if d != dim], call)


def select_backward(call: OpCall) -> list[Choice]:
    """The inverse of select."""
    n = call.outs[0].dim()
    dim = call.args[2] % call.outs[0].dim()
    return _linear([((d - (d > dim),), (d,)) for d in range(n) if d != dim], call)


def stack(call: OpCall) -> list[Choice]:
    """Shards all dims except the new one."""
    dim = call.arg(1, "dim", 0) % call.outs[0].dim()
    count = len(call.ins)
    return _linear(
        [((d,) * count, (d + (d >= dim),)) for d in range(call.ins[0].dim())], call
    )


def pad(call: OpCall) -> list[Choice]:
    """Shards dims that are not padded."""
    n = call.ins[0].dim()
    pads = call.args[1]
    padded = {n - 1 - i // 2 for i, width in enumerate(pads) if width}
    return [
        replicated(call),
        *together(call, [d for d in range(n) if d not in padded]),
    ]


def same_dims(call: OpCall) -> list[Choice]:
    """Shards all dims that both have. Only a trailing dim of real and imaginary parts is added
    or removed.
    """
    return _linear(
        [((d,), (d,)) for d in range(min(call.ins[0].dim(), call.outs[0].dim()))],
        call,
    )


def _off_diagonal(call: OpCall, n: int, position: int) -> list[int]:
    """The dims that are not part of the diagonal. They come first in the result, in order."""
    a, b = (
        call.arg(position + k, name, k) % n
        for k, name in ((0, "dim1"), (1, "dim2"))
    )
    return [d for d in range(n) if d not in (a, b)]


def diagonal(call: OpCall) -> list[Choice]:
    """Shards the dims that are not part of the diagonal."""
    return _linear(
        [
            ((d,), (j,))
            for j, d in enumerate(_off_diagonal(call, call.ins[0].dim(), 2))
        ],
        call,
    )


def diagonal_scatter(call: OpCall) -> list[Choice]:
    """`diagonal` for the tensor, and for the values written on its diagonal."""
    return _linear(
        [
            ((d, j), (d,))
            for j, d in enumerate(_off_diagonal(call, call.ins[0].dim(), 3))
        ],
        call,
    )


def select_scatter(call: OpCall) -> list[Choice]:
    """Shards all dims except the written one."""
    n = call.ins[0].dim()
    dim = call.args[2] % call.ins[0].dim()
    return _linear([((d, d - (d > dim)), (d,)) for d in range(n) if d != dim], call)


def unfold(call: OpCall) -> list[Choice]:
    """Shards all dims except the unfolded one and the new last one."""
    n = call.ins[0].dim()
    return _linear(
        [((d,), (d,)) for d in range(n) if d != call.args[1] % max(n, 1)], call
    )


def repeat(call: OpCall) -> list[Choice]:
    """Shards dims that are repeated once."""
    lead = len(call.args[1]) - call.ins[0].dim()
    return _linear(
        [
            ((d,), (d + lead,))
            for d in range(call.ins[0].dim())
            if call.args[1][d + lead] == 1
        ],
        call,
    )


def strided(call: OpCall) -> list[Choice]:
    """Shards the slowest dim, if it stays the slowest and its elements do not overlap."""
    return _linear(
        [((0,), (0,))] if _rows_apart(call.ins[0], *call.args[1:4]) else [], call
    )


def strided_scatter(call: OpCall) -> list[Choice]:
    """`strided` for the tensor and the written values."""
    return _linear(
        [((0, 0), (0,))] if _rows_apart(call.ins[0], *call.args[2:5]) else [], call
    )


def _rows_apart(
    x: torch.Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> bool:
    if not x.dim() or not size or offset or not x.is_contiguous() or not x.numel():
        return False
    reach = sum(
        (n - 1) * step for n, step in zip(size[1:], stride[1:], strict=True)
    )
    return (
        size[0] == x.shape[0]
        and stride[0] == x.stride(0)
        and 0 not in size
        and reach < x.stride(0)
    )


TABLE: dict[object, Rule] = {
    aten.view_as_real.default: same_dims,
    aten.view_as_complex.default: same_dims,
    aten.diagonal.default: diagonal,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.slice_scatter.default: all_but(2),
    aten.select_scatter.default: select_scatter,
    aten.unfold.default: unfold,
    aten.repeat.default: repeat,
    aten.as_strided.default: strided,
    aten.as_strided_scatter.default: strided_scatter,
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

# Ops that only rearrange. Their results from a program's inputs are available from the start.
REARRANGES = {*TABLE, aten._to_copy.default, aten.alias.default} - {
    aten.cat.default,
    aten.stack.default,
}

# Ops that a rank runs as a view to its local shape: a dim of local size 1 need not have global
# size 1.
AS_VIEW = {
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
    aten.reshape.default,
}

# The argument with the result's shape. A rank passes its local shape.
SIZES: dict[object, int] = {
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.as_strided.default: 1,
}


def _written_size(args: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    args[2] = list(shapes[1])
    return args


LOCAL_ARGS = {aten.as_strided_scatter.default: _written_size}
