"""Ops that rearrange: views, permutations, slices, concatenations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from .. import layout
from ..emission.graph_builder import Builder, LocalShard
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, Rule, replicated, together
from .reshape import linear, reshape

aten = torch.ops.aten


def permuted(order: Callable[[OpCall, int], list[int]]) -> Rule:
    """Make the rule of an op that permutes dims."""

    def rule(call: OpCall) -> list[Choice]:
        dims = order(call, call.ins[0].dim())
        choices: list[Choice] = []
        for d in range(len(dims)):
            place = dims.index(d)
            choices.append(((d,), (place,)))
        return linear(choices, call)

    return rule


def _swapped(call: OpCall, n: int) -> list[int]:
    """Return the order of dims after a transpose."""
    dims = list(range(n))
    a, b = (d % max(n, 1) for d in call.args[1:3])
    if n:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def expand(call: OpCall) -> list[Choice]:
    """Shard an expand over the dims that keep their size."""
    (x,), (out,) = call.ins, call.outs
    lead = out.dim() - x.dim()
    choices: list[Choice] = []
    for d in range(x.dim()):
        place = d + lead
        if x.shape[d] == out.shape[place]:
            choices.append(((d,), (place,)))
    return linear(choices, call)


def all_but(position: int, name: str = "dim", default: int = 0) -> Rule:
    """Make the rule of a slice, split or concatenation, which shards every other dim."""

    def rule(call: OpCall) -> list[Choice]:
        n = call.ins[0].dim()
        dim = call.arg(position, name, default) % max(n, 1)
        dims = [d for d in range(n) if d != dim or _whole(call, d)]
        return linear(together(call, dims), call)

    return rule


def parts_of(call: OpCall, whole: torch.Tensor, dim: int) -> int:
    """Return the number of equal parts that an op splits a dim into or joins; 0 if they differ."""
    parts = call.outs if whole is call.ins[0] else call.ins
    sizes = {x.shape[dim] for x in parts}
    return len(parts) if len(sizes) == 1 and len(parts) > 1 else 0


def split(call: OpCall) -> list[Choice]:
    """Shard a split over other dims, or its dim as a strided shard of equal parts."""
    choices = all_but(2)(call)
    (x,) = call.ins
    dim = call.arg(2, "dim", 0) % max(x.dim(), 1)
    n = parts_of(call, x, dim)
    if n:
        choices.append(((layout.joined(dim, 1, outer=n),), (dim,) * n))
    return choices


def cat(call: OpCall) -> list[Choice]:
    """Shard a concatenation over other dims, or its dim as a strided shard of equal parts;
    empty 1-D operands are skipped.
    """
    out = call.outs[0]
    takes_part = [x.dim() == out.dim() for x in call.ins]
    ins = tuple(x for x in call.ins if x.dim() == out.dim())
    joined = attrs.evolve(call, ins=ins)
    choices = []
    for placed, outs in _joined(joined):
        rest = iter(placed)
        placements = []
        for takes in takes_part:
            placement = next(rest) if takes else "R"
            placements.append(placement)
        choices.append((tuple(placements), outs))
    return choices


def _joined(call: OpCall) -> list[Choice]:
    """List the strategies of a concatenation of operands that have the dims of the result."""
    choices = all_but(1)(call)
    out = call.outs[0]
    dim = call.arg(1, "dim", 0) % max(out.dim(), 1)
    n = parts_of(call, out, dim)
    if n:
        choices.append(((dim,) * n, (layout.joined(dim, 1, outer=n),)))
    if len(call.ins) == 1:
        choices.append(((dim,), (dim,)))
    return choices


def lower_split(target: Any) -> Any:
    """Split a rank's strided shard into its share of each part."""

    def lower(b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]) -> Any:
        (x,) = shards
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % len(x.shape)
        if x.is_sharded(dim):
            size = args[1] if isinstance(args[1], int) else args[1][0]
            n = x.shape[dim] // size
            own = x.local_shape[dim] // n
            sizes = own if isinstance(args[1], int) else [own] * n
            args = [args[0], sizes, *args[2:]]
        return b.call(target, *args, **kwargs)

    return lower


def _whole(call: OpCall, d: int) -> bool:
    """Return whether a slice takes all of a dim."""
    return (
        call.target is aten.slice.Tensor
        and call.outs[0].shape[d] == call.ins[0].shape[d]
        and call.arg(4, "step", 1) == 1
    )


def _without(n: int, dim: int) -> list[tuple[int, int]]:
    """List (dim before, dim after) for the dims that stay when one is removed."""
    dims = [d for d in range(n) if d != dim]
    return [(d, place) for place, d in enumerate(dims)]


def select(call: OpCall) -> list[Choice]:
    """Shard a select over all dims except the selected one."""
    n = call.ins[0].dim()
    dim = call.args[1] % n
    choices: list[Choice] = [((d,), (j,)) for d, j in _without(n, dim)]
    return linear(choices, call)


def select_backward(call: OpCall) -> list[Choice]:
    """Shard the backward of select."""
    n = call.outs[0].dim()
    dim = call.args[2] % n
    choices: list[Choice] = [((j,), (d,)) for d, j in _without(n, dim)]
    return linear(choices, call)


def stack(call: OpCall) -> list[Choice]:
    """Shard a stack over all dims except the new one."""
    n = call.outs[0].dim()
    dim = call.arg(1, "dim", 0) % n
    count = len(call.ins)
    choices: list[Choice] = [((j,) * count, (d,)) for d, j in _without(n, dim)]
    return linear(choices, call)


def pad(call: OpCall) -> list[Choice]:
    """Shard a pad over the dims that are not padded. A shift, which drops as many elements at one
    end as it adds zeros at the other, reads some of a neighbour: a halo.
    """
    n = call.ins[0].dim()
    widths = _widths(call.args[1], n)
    others = [d for d in range(n) if not any(widths[d])]
    shifts = [] if call.arg(2, "value", 0) else [d for d in range(n) if _is_shift(*widths[d])]
    halos = [(d, layout.joined(d, 1, _halo_of_shift(*widths[d]))) for d in shifts]
    return [replicated(call), *together(call, others), *(((m,), (d,)) for d, m in halos)]


def _widths(pads: Sequence[int], n: int) -> list[tuple[int, int]]:
    """Return by dim how many elements a pad adds before and after; negative ones it drops."""
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]  # the last dim first
    return [(0, 0)] * (n - len(pairs)) + pairs[::-1]


def _is_shift(before: int, after: int) -> bool:
    """Return whether a pad leaves the size of a dim as it is, and moves its elements."""
    return before == -after != 0


def _halo_of_shift(before: int, after: int) -> tuple[int, int]:
    """Return the elements of the previous and the next chunk that a shift reads."""
    return max(before, 0), max(after, 0)


def lower_pad(b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]) -> Any:
    """Pad a rank's shard. A halo holds what a shift adds."""
    (x,) = shards
    widths = _widths(args[1], len(x.shape))
    for placement in x.placements:
        if any(layout.halo(placement)):
            d, _ = layout.dim_and_unit(placement)
            before, after = (w - h for w, h in zip(widths[d], layout.halo(placement), strict=True))
            widths[d] = before, after
    pads = [width for pair in widths[::-1] for width in pair]
    return b.call(aten.constant_pad_nd.default, args[0], pads, *args[2:], **kwargs)


def pads_strided(call: OpCall, choice: Choice) -> bool:
    """Return whether a strategy of a pad for a chunk is one for any elements: without a halo."""
    return not any(any(layout.halo(m)) for m in choice[0] if not isinstance(m, str))


def same_dims(call: OpCall) -> list[Choice]:
    """Shard a view between complex and real over the dims that both have."""
    n = min(call.ins[0].dim(), call.outs[0].dim())
    choices: list[Choice] = [((d,), (d,)) for d in range(n)]
    return linear(choices, call)


def _off_diagonal(call: OpCall, n: int, position: int) -> list[int]:
    """List the dims that are not part of the diagonal."""
    a = call.arg(position, "dim1", 0) % n
    b = call.arg(position + 1, "dim2", 1) % n
    return [d for d in range(n) if d not in (a, b)]


def diagonal(call: OpCall) -> list[Choice]:
    """Shard a diagonal over the other dims."""
    dims = _off_diagonal(call, call.ins[0].dim(), 2)
    choices: list[Choice] = [((d,), (j,)) for j, d in enumerate(dims)]
    return linear(choices, call)


def diagonal_scatter(call: OpCall) -> list[Choice]:
    """Shard a write to a diagonal over the other dims."""
    dims = _off_diagonal(call, call.ins[0].dim(), 3)
    choices: list[Choice] = [((d, j), (d,)) for j, d in enumerate(dims)]
    return linear(choices, call)


def select_scatter(call: OpCall) -> list[Choice]:
    """Shard a write to one index over the other dims."""
    n = call.ins[0].dim()
    dim = call.args[2] % n
    choices: list[Choice] = [((d, j), (d,)) for d, j in _without(n, dim)]
    return linear(choices, call)


def unfold(call: OpCall) -> list[Choice]:
    """Shard an unfold over the dims that it leaves alone."""
    n = call.ins[0].dim()
    dim = call.args[1] % max(n, 1)
    choices: list[Choice] = [((d,), (d,)) for d in range(n) if d != dim]
    return linear(choices, call)


def repeat(call: OpCall) -> list[Choice]:
    """Shard a repeat over the dims that it repeats once."""
    times = call.args[1]
    n = call.ins[0].dim()
    lead = len(times) - n
    choices: list[Choice] = []
    for d in range(n):
        place = d + lead
        if times[place] == 1:
            choices.append(((d,), (place,)))
    return linear(choices, call)


def strided(call: OpCall) -> list[Choice]:
    """Shard an as_strided over the slowest dim, if no row reads beyond itself."""
    unit = _rows_apart(call.ins[0], *call.args[1:4])
    if not unit:
        return linear([], call)
    return linear([((layout.joined(0, unit),), (0,))], call)


def strided_scatter(call: OpCall) -> list[Choice]:
    """Shard an as_strided_scatter over the slowest dim."""
    unit = _rows_apart(call.ins[0], *call.args[2:5])
    if not unit:
        return linear([], call)
    rows = layout.joined(0, unit)
    return linear([((rows, 0), (rows,))], call)


def _rows_apart(
    x: torch.Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> int:
    """Return how many indices of dim 0 make one row of an as_strided; 0 if rows overlap."""
    if not x.dim() or not x.is_contiguous() or not x.numel():
        return 0
    if not size or 0 in size:
        return 0
    rows, *sizes = size
    step, *steps = stride
    unit, rest = divmod(step, x.stride(0))
    last = offset or 0
    for n, s in zip(sizes, steps, strict=True):
        last += (n - 1) * s
    is_apart = not rest and x.shape[0] == rows * unit and last < step
    return unit if is_apart else 0


def _written_size(args: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Give an as_strided_scatter the local size of the written values."""
    args[2] = list(shapes[1])
    return args


def _pairs_as_complex(
    b: Builder, args: list[Any], kwargs: dict[str, Any], mine: Sequence[LocalShard]
) -> torch.fx.Node:
    """View pairs as complex numbers, with the two numbers of a pair side by side in memory, as
    they are in the global tensor.
    """
    pairs = b.restride(args[0], mine[0].shape, mine[0].stride)
    return b.call(aten.view_as_complex.default, pairs)


row = functools.partial(Op, strided=True, of_sizes=True, rearranges=True)
TABLE: dict[object, Op] = {
    aten.view_as_real.default: row(same_dims),
    aten.view_as_complex.default: row(same_dims, lower=_pairs_as_complex),
    aten.diagonal.default: row(diagonal),
    aten.diagonal_scatter.default: row(diagonal_scatter),
    aten.slice_scatter.default: row(all_but(2)),
    aten.select_scatter.default: row(select_scatter),
    aten.unfold.default: row(unfold),
    aten.repeat.default: row(repeat),
    aten.as_strided.default: row(strided, size_arg=1, strided=False),
    aten.as_strided_scatter.default: row(strided_scatter, local_args=_written_size, strided=False),
    aten.view.default: row(reshape, as_view=True, constant_of=0),
    aten._unsafe_view.default: row(reshape, size_arg=1, constant_of=0),
    aten.reshape.default: row(reshape, as_view=True, constant_of=0),
    aten.unsqueeze.default: row(reshape, as_view=True, constant_of=0),
    aten.squeeze.default: row(reshape, as_view=True, constant_of=0),
    aten.squeeze.dim: row(reshape, as_view=True, constant_of=0),
    aten.squeeze.dims: row(reshape, as_view=True, constant_of=0),
    aten.t.default: row(permuted(lambda call, n: list(range(n))[::-1]), constant_of=0),
    aten.permute.default: row(
        permuted(lambda call, n: [d % n for d in call.args[1]]), constant_of=0
    ),
    aten.transpose.int: row(permuted(_swapped), constant_of=0),
    aten.expand.default: row(expand, size_arg=1),
    aten.slice.Tensor: row(all_but(1), constant_of=0),
    aten.slice_backward.default: row(all_but(2), size_arg=1),
    aten.split.Tensor: row(split, lower=lower_split(aten.split.Tensor)),
    aten.split_with_sizes.default: row(split, lower=lower_split(aten.split_with_sizes.default)),
    aten.cat.default: row(cat, rearranges=False),
    aten.stack.default: row(stack, rearranges=False),
    aten.select.int: row(select, constant_of=0),
    aten.select_backward.default: row(select_backward, size_arg=1),
    aten.constant_pad_nd.default: row(pad, lower=lower_pad, strided_by=pads_strided),
}
