"""Convolutions: sharded over batch, channels and groups, and over space with halos.

The chunks of input and result line up if the convolution makes one element of each `stride`
elements of its input. Elements that it reads beyond a chunk are the chunk's halo. Beyond the
ends of the mesh axis the halo is zero, which is the convolution's padding: as much on both sides,
or of our own ops any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from ...ops.convolution import PADDED, PADDED_BACKWARD, padding_of
from ...types import AxisPlacement
from .. import layout
from ..emission.graph_builder import Builder, LocalShard
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated

aten = torch.ops.aten


@attrs.frozen
class Window:
    """The window of a convolution along one spatial dim. `padding` is that before the dim; after
    it there is as much as the window of the last element of the result reads.
    """

    stride: int
    padding: int
    reach: int  # from the first element that it reads to the last: dilation * (kernel - 1)

    @property
    def halo(self) -> tuple[int, int]:
        """The input elements that a chunk of the result reads outside of its own chunk."""
        return self.padding, max(0, self.reach - self.stride - self.padding + 1)

    @property
    def gradient_halo(self) -> tuple[int, int]:
        """The elements of the result's gradient that a chunk of the input's gradient reads
        outside of its own chunk.
        """
        return (self.reach - self.padding) // self.stride, -(-self.padding // self.stride)


def windows(weight: Any, stride: Any, padding: Any, dilation: Any) -> list[Window]:
    """Return the window of each spatial dim."""
    kernel = weight[2:]
    settings = (
        [*values] * (len(kernel) if len(values) == 1 else 1)
        for values in (stride, padding, dilation)
    )
    return [Window(s, p, d * (k - 1)) for k, s, p, d in zip(kernel, *settings, strict=True)]


def _over_space(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, settings: Any
) -> Iterator[tuple[int, Window]]:
    """Yield the spatial dims whose input and result chunks line up."""
    stride, padding, dilation, transposed = settings
    for d, window in enumerate(windows(weight.shape, stride, padding, dilation), 2):
        if not transposed and x.shape[d] == window.stride * y.shape[d]:
            yield d, window


def _other_strategies(
    x: torch.Tensor, y: torch.Tensor, transposed: bool, groups: int
) -> list[tuple[AxisPlacement, AxisPlacement, AxisPlacement, AxisPlacement]]:
    """List the strategies that shard batch, channels or groups: input, weight, bias, result."""
    batch: tuple[AxisPlacement, AxisPlacement, AxisPlacement, AxisPlacement] = (0, "R", "R", 0)
    if groups > 1:
        read = x.shape[1] // groups
        made = y.shape[1] // groups
        weight = layout.joined(0, read if transposed else made)
        return [
            batch,
            (layout.joined(1, read), weight, layout.joined(0, made), layout.joined(1, made)),
        ]
    makes, reads = (1, 0) if transposed else (0, 1)
    return [batch, ("R", makes, 0, 1), (1, reads, "R", "sum")]


def _settings(args: tuple[Any, ...]) -> tuple[Any, int]:
    """Return the stride, the padding before each dim, the dilation, and whether it is transposed;
    and the number of groups.
    """
    *by_dim, is_transposed, _, groups = args
    return (*by_dim, is_transposed), groups


def _own_settings(args: tuple[Any, ...]) -> tuple[Any, int]:
    """Return the same of our own ops, which have padding before and after a dim."""
    stride, before, _, dilation, groups = args
    return (stride, before, dilation, False), groups


def convolution(call: OpCall, settings_of: Any = _settings) -> list[Choice]:
    """Shard a convolution over batch, channels, groups, or space with a halo."""
    (x, weight), (y,), n = call.ins[:2], call.outs, len(call.ins)
    settings, groups = settings_of(call.args[3:])
    choices = [replicated(call)]
    choices += [
        ((a, w, bias)[:n], (out,))
        for a, w, bias, out in _other_strategies(x, y, settings[-1], groups)
    ]
    for d, window in _over_space(x, y, weight, settings):
        choices.append(((layout.joined(d, window.stride, window.halo), "R", "R")[:n], (d,)))
    return choices


def convolution_backward(call: OpCall, settings_of: Any = _settings) -> list[Choice]:
    """Transpose each strategy of the convolution: sharded stays sharded, replicated becomes
    Partial.
    """
    (g, x, weight), mask = call.ins, call.args[-1]
    settings, groups = settings_of(call.args[4:-1])
    transpose = lambda placement: {"R": "sum", "sum": "R"}.get(placement, placement)
    some = lambda *placements: tuple(
        m for m, wanted in zip(placements, mask, strict=True) if wanted
    )
    choices = [replicated(call), (("sum", "R", "R"), some("sum", "sum", "sum"))]
    for a, w, bias, out in _other_strategies(x, g, settings[-1], groups):
        whole = out == "sum"  # then g is replicated, and so is the gradient of the bias
        choices.append(
            (
                (transpose(out), a, w),
                some(transpose(a), transpose(w), "R" if whole else transpose(bias)),
            )
        )
    for d, window in _over_space(x, g, weight, settings):
        made = layout.joined(d, 1, window.gradient_halo if mask[0] else (0, 0))
        read = layout.joined(d, window.stride, window.halo if mask[1] else (0, 0))
        choices.append(((made, read, "R"), some(layout.joined(d, window.stride), "sum", "sum")))
    return choices


def padded_convolution(call: OpCall) -> list[Choice]:
    """Shard our convolution as torch's."""
    return convolution(call, _own_settings)


def padded_convolution_backward(call: OpCall) -> list[Choice]:
    """Shard its gradients as those of torch's."""
    return convolution_backward(call, _own_settings)


def _bias_sizes(args: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Give the backward the local size of the bias."""
    args[3] = [shapes[0][1]] if args[3] else args[3]
    return args


def _halo(shard: LocalShard, dim: int) -> tuple[int, int]:
    """Return the halo of a shard along a dim."""
    return next(
        (
            layout.halo(m)
            for m in shard.placements
            if any(layout.halo(m)) and layout.dim_and_unit(m)[0] == dim
        ),
        (0, 0),
    )


def _has_halo(shard: LocalShard) -> bool:
    """Return whether a shard has a halo."""
    return any(any(layout.halo(m)) for m in shard.placements)


def _local_padding(padding: Any, x: LocalShard) -> list[int]:
    """Return the local padding: none along a sharded dim, whose halo holds it."""
    space = range(2, len(x.shape))
    return [
        0 if x.is_sharded(d) else p
        for d, p in zip(space, [*padding] * (len(space) if len(padding) == 1 else 1), strict=True)
    ]


def _local_groups(groups: int, x: LocalShard) -> int:
    """Return the number of groups on a rank."""
    return groups * x.local_shape[1] // x.shape[1] if groups > 1 else 1


def lower_convolution(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Convolve a rank's shards; the bias is added to a Partial sum on one rank only."""
    x = shards[0]
    groups = args[8]
    if args[2] is not None and groups == 1 and x.is_sharded(1):
        first = b.call(aten.eq.Scalar, b.offset(x, 1), 0)
        args[2] = b.call(aten.where.self, first, args[2], b.call(aten.zeros_like.default, args[2]))
    args[4], args[8] = _local_padding(args[4], x), _local_groups(groups, x)
    return b.call(aten.convolution.default, *args)


def lower_convolution_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Compute a rank's gradients: in one call, or one by one where halos differ."""
    g, x, weight = shards
    args[9] = _local_groups(args[9], x)
    empty = x.local_shape[1] == 0
    if not (empty or _has_halo(g) or _has_halo(x)):
        return b.call(aten.convolution_backward.default, *args)
    own = _without_halo(b, g)
    like = x.node.meta["val"]
    nothing = lambda shape: b.call(
        aten.full.default, list(shape), 0.0, dtype=like.dtype, device=like.device
    )
    gradients = (
        lambda: nothing(_shape_without_halo(x)) if empty else _input_gradient(b, args, g, x),
        lambda: nothing(weight.local_shape) if empty else _weight_gradient(b, args, own, x),
        lambda: b.call(aten.sum.dim_IntList, own, [d for d in range(len(g.shape)) if d != 1]),
    )
    return [gradient() for gradient, wanted in zip(gradients, args[10], strict=True) if wanted]


def _shape_without_halo(shard: LocalShard) -> list[int]:
    """Return a shard's shape without its halo."""
    return [n - sum(_halo(shard, d)) for d, n in enumerate(shard.local_shape)]


def _without_halo(b: Builder, shard: LocalShard) -> Any:
    """Slice the halo off a shard."""
    node = shard.node
    for d in range(2, len(shard.shape)):
        before, after = _halo(shard, d)
        if before or after:
            node = b.call(aten.slice.Tensor, node, d, before, shard.local_shape[d] - after)
    return b.restride(node, shard.shape, shard.stride)


def _input_gradient(b: Builder, args: list[Any], g: LocalShard, x: LocalShard) -> Any:
    """Compute the input's gradient by a transposed convolution over a chunk and its halo."""
    padding = []
    more = []
    sizes = _shape_without_halo(x)[2:]
    kernel = args[2].meta["val"].shape
    for d, window in enumerate(windows(kernel, *args[4:7]), 2):
        padding.append(
            _halo(g, d)[0] * window.stride + window.padding
        )  # where this rank's part starts
        made = (g.local_shape[d] - 1) * window.stride + window.reach + 1 - 2 * padding[-1]
        more.append(max(0, sizes[d - 2] - made))
    node = b.call(
        aten.convolution.default,
        args[0],
        args[2],
        None,
        args[4],
        padding,
        args[6],
        True,
        more,
        args[9],
    )
    for d, size in enumerate(sizes, 2):
        if node.meta["val"].shape[d] != size:
            node = b.call(aten.slice.Tensor, node, d, 0, size)
    return b.restride(node, x.shape, x.stride)


def _weight_gradient(b: Builder, args: list[Any], own: Any, x: LocalShard) -> Any:
    """Compute the weight's gradient from a rank's rows and the input with its halo."""
    padding = _local_padding(args[5], x)
    mask = [False, True, False]
    out = b.call(
        aten.convolution_backward.default,
        own,
        *args[1:3],
        None,
        args[4],
        padding,
        *args[6:10],
        mask,
    )
    return b.item(out, 1)


def _padded(b: Builder, x: LocalShard, before: Any, after: Any) -> tuple[LocalShard, list[Any]]:
    """Pad a shard along the dims that are not sharded. Along others its halo has the padding.

    Returns:
        The shard, and the padding before and after each dim of space.
    """
    is_sharded = [x.is_sharded(d) for d in range(2, len(x.shape))]
    pads = [
        [0 if s else n for s, n in zip(is_sharded, side, strict=True)] for side in (before, after)
    ]
    if not any(map(any, pads)):
        return x, pads
    node = b.call(aten.constant_pad_nd.default, x.node, padding_of(*pads))
    more = [0, 0, *map(sum, zip(*pads, strict=True))]
    shape, local = (
        tuple(n + k for n, k in zip(sizes, more, strict=True)) for sizes in (x.shape, x.local_shape)
    )
    strides = layout.dense_strides(shape, layout.stride_order(x.shape, x.stride))
    return attrs.evolve(x, node=node, shape=shape, local_shape=local, stride=strides), pads


def _as_torchs(x: LocalShard, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of torch's op after the tensors, for a shard that is padded along the
    dims that are not sharded.
    """
    stride, before, _, dilation, groups = args
    own = [n if x.is_sharded(d) else 0 for d, n in enumerate(before, 2)]
    return stride, own, dilation, False, [0] * len(own), groups


def lower_padded(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Convolve a rank's shards, padded where they are not sharded."""
    x, _ = _padded(b, shards[0], *args[4:6])
    return lower_convolution(
        b, [x.node, *args[1:3], *_as_torchs(x, args[3:])], kwargs, [x, *shards[1:]]
    )


def lower_padded_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Compute a rank's gradients, that of the input without its padding."""
    g, own, weight = shards
    x, pads = _padded(b, own, *args[5:7])
    mask = args[-1]
    torchs = [args[0], x.node, *args[2:4], *_as_torchs(x, args[4:-1]), mask]
    out = lower_convolution_backward(b, torchs, kwargs, [g, x, weight])
    if x is own or not mask[0]:
        return out
    several = isinstance(out, list)
    first, *others = out if several else [b.item(out, k) for k, wanted in enumerate(mask) if wanted]
    node = b.call(aten.constant_pad_nd.default, first, [-n for n in padding_of(*pads)])
    return [b.restride(node, own.shape, own.stride), *others]


TABLE: dict[object, Op] = {
    aten.convolution.default: Op(convolution, lower=lower_convolution, of_sizes=True),
    aten.convolution_backward.default: Op(
        convolution_backward,
        lower=lower_convolution_backward,
        local_args=_bias_sizes,
        # a rank without input channels still computes the gradient of the bias, which depends on
        # the first input alone
        decided_by_first=True,
        of_sizes=True,
    ),
    PADDED: Op(padded_convolution, lower=lower_padded, of_sizes=True),
    PADDED_BACKWARD: Op(
        padded_convolution_backward,
        lower=lower_padded_backward,
        local_args=_bias_sizes,
        decided_by_first=True,
        of_sizes=True,
    ),
}
