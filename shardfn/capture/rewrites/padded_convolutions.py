"""Convolutions whose result is as long as their input, but for the stride, as one op each: of an
input that is padded first, or with padding of which a slice takes the surplus away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.convolution import PADDED, PADDED_BACKWARD
from ...ops.nodes import args_of

aten = torch.ops.aten
CONVOLUTION, BACKWARD = aten.convolution.default, aten.convolution_backward.default
SPACE = 2  # the first dim of space


@attrs.frozen(eq=False)
class Padded:
    """A convolution by its input before all padding.

    Args:
        x: the input.
        weight: the kernel.
        stride: by dim of space, as the next two.
        pad: the zeros before the input that an op puts there; None if the input is not padded.
        before: those, and the convolution's own.
        dilation: of the kernel.
        groups: how many there are.
    """

    x: Node
    weight: Node
    stride: list[int]
    pad: list[int] | None
    before: list[int]
    dilation: list[int]
    groups: int

    def after(self, made: torch.Tensor) -> list[int] | None:
        """Return the zeros that a result reads after each dim; None where no dim of it lines up
        with the input, or it leaves more of the input unread than strides do.
        """
        sizes, results = self.x.meta["val"].shape[SPACE:], made.shape[SPACE:]
        kernel = self.weight.meta["val"].shape[SPACE:]
        if not all(isinstance(n, int) for n in (*sizes, *results, *kernel)):
            return None
        pairs = zip(sizes, self.stride, results, strict=True)
        lines_up = any(n == stride * rows for n, stride, rows in pairs)
        reach = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
        rows = zip(results, self.stride, reach, sizes, self.before, strict=True)
        after = [(rows - 1) * s + reach + 1 - n - before for rows, s, reach, n, before in rows]
        reads_all = all(n > -stride for n, stride in zip(after, self.stride, strict=True))
        return after if lines_up and reads_all else None

    def settings(self, after: list[int]) -> tuple[Any, ...]:
        """Return the arguments of our ops after the tensors."""
        return self.stride, self.before, after, self.dilation, self.groups


def join_padding(graph: Graph) -> None:
    """Replace convolutions that line up with their input before its padding, and their backwards.
    What is then unread stays in the graph.
    """
    for node in graph.find_nodes(op="call_function", target=CONVOLUTION):
        x, weight, bias, *settings = args_of(node)
        padded = _padded(x, weight, settings)
        if padded is None:
            continue
        for made in _results(node, padded):
            after = padded.after(made.meta["val"])
            if after is not None:
                args = (padded.x, weight, bias, *padded.settings(after))
                _replace(graph, made, PADDED, args, _dense(made))
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        _join_backward(graph, node)


def _join_backward(graph: Graph, node: Node) -> None:
    """Replace a backward whose cotangent is that of a slice, or whose input is padded."""
    sliced, x, weight, bias, *settings, mask = args_of(node)
    padded, g = _padded(x, weight, settings), _unsliced(sliced)
    if padded is None or (padded.pad is None and g is sliced):
        return
    after = padded.after(g.meta["val"])
    of_x = [user for user in node.users if args_of(user)[1] == 0 and mask[0]]
    readers = [user for x in of_x for user in x.users] if padded.pad is not None else []
    if after is None or not all(_unpads(user, padded) for user in readers):
        return
    args = (g, padded.x, weight, bias, *padded.settings(after), mask)
    first, *others = node.meta["val"]
    value = _dense(padded.x) if mask[0] else first
    _replace(graph, node, PADDED_BACKWARD, args, (value, *others))
    for gradient in of_x:
        gradient.meta["val"] = value
    for user in readers:
        user.replace_all_uses_with(args_of(user)[0])


def _padded(x: Node, weight: Node, settings: list[Any]) -> Padded | None:
    """Return a convolution by its input before all padding; None for a transposed one."""
    *by_dim, is_transposed, _, groups = settings
    if is_transposed:
        return None
    space = weight.meta["val"].dim() - SPACE
    stride, before, dilation = ([*n] * (space if len(n) == 1 else 1) for n in by_dim)
    pad = _zeros_before(x, space)
    if pad is not None:
        x, before = args_of(x)[0], [n + own for n, own in zip(before, pad, strict=True)]
    return Padded(x, weight, stride, pad, before, dilation, groups)


def _zeros_before(x: Node, space: int) -> list[int] | None:
    """Return the zeros before each dim of space of a padded tensor; None for another tensor."""
    if x.target is not aten.constant_pad_nd.default:
        return None
    pad, *value = args_of(x)[1:]
    pad = [*pad, *[0] * 2 * space]
    is_of_zeros = all(isinstance(n, int) and n >= 0 for n in pad) and value in ([], [0])
    is_of_space = not any(pad[2 * space :])
    return pad[: 2 * space : 2][::-1] if is_of_zeros and is_of_space else None


def _results(node: Node, padded: Padded) -> Iterator[Node]:
    """Yield the slices of a convolution that are its first elements along a dim of space, and
    itself if its input is padded.
    """
    for user in list(node.users):
        if user.target is aten.slice.Tensor and _is_first(*args_of(user)[1:]):
            yield user
    if padded.pad is not None:
        yield node


def _unsliced(g: Node) -> Node:
    """Return the cotangent of a slice of a convolution, given that of the convolution."""
    is_of_slice = g.target is aten.slice_backward.default and _is_first(*args_of(g)[2:])
    return args_of(g)[0] if is_of_slice else g


def _is_first(dim: int = 0, start: int | None = 0, end: Any = None, step: int = 1) -> bool:
    """Return whether a slice has the first elements along a dim of space."""
    return dim >= SPACE and start in (0, None) and isinstance(end, int) and step == 1


def _unpads(node: Node, padded: Padded) -> bool:
    """Return whether a node takes the padding of the input away from its gradient."""
    if node.target is not aten.constant_pad_nd.default or padded.pad is None:
        return False
    space = len(padded.pad)
    pad = [*args_of(node)[1], *[0] * 2 * space][: 2 * space : 2]
    is_whole = node.meta["val"].shape == padded.x.meta["val"].shape
    return is_whole and pad[::-1] == [-n for n in padded.pad]


def _dense(node: Node) -> torch.Tensor:
    """Return a fake tensor of the shape of a node's, dense."""
    x = node.meta["val"]
    return x.new_empty(x.shape)


def _replace(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], value: Any) -> None:
    """Put a call in the place of a node."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(new)
