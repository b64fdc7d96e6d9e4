"""A copy of a graph in which the ops of a loop are batched."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ... import _compat
from ...ops.nodes import args_of, remove_unread
from ...ops.placement import AFTER
from .search import Loop, Repeated, Sum
from .slices import Slices, gradient_of

aten = torch.ops.aten

# Views that the strides may not allow once the ops before are batched.
RESHAPES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
NUMBERED: dict[Any, Any] = {aten.eq.Scalar: aten.eq.Tensor, aten.ne.Scalar: aten.ne.Tensor}
ABOUT = ("source", "module", "phase", "custom")  # what a node says of the user's op

Several = tuple[torch.Tensor, int | None]  # a tensor, and 0 if its first dim is that of the turns


class Unbatched(Exception):
    """torch batches an op to results of another kind."""


def batched(graph: Graph, loop: Loop) -> Graph:
    """Copy a graph, with a loop batched.

    Args:
        graph: functional ATen.
        loop: of its nodes.

    Raises:
        Unbatched: it cannot be done.
    """
    return _Copy(loop).run(graph)


def _products(a: Several, b: Several) -> torch.Tensor:
    """Return the matrix products of all turns. A matrix that all turns read is multiplied once, by
    the others side by side, so that it is sent once where ranks hold different ones of those.
    """
    (x, in_turns), (y, also) = a, b
    if in_turns == also == 0:
        return torch.bmm(x, y)
    if in_turns == 0:
        return (x.flatten(0, 1) @ y).unflatten(0, x.shape[:2])
    columns = y.permute(1, 0, 2).flatten(1, 2)
    return (x @ columns).unflatten(1, (y.shape[0], y.shape[2])).permute(1, 0, 2)


def _later(x: Several, token: Several) -> torch.Tensor:
    """Return the values of all turns, available only after others."""
    wide = x[0] if x[1] == 0 else x[0].expand(token[0].shape[0], *x[0].shape)
    return AFTER(wide, token[0])


OF_ALL: dict[Any, Any] = {aten.mm.default: _products, AFTER: _later}  # in place of torch.vmap


@attrs.define(eq=False)
class _Copy:
    """A copy of a graph in which a loop is batched.

    Args:
        loop: what is batched.
        fresh: the new graph.
        env: the copies of the nodes that stay.
        stacked: the results of the ops of the loop for all turns, along a first dim.
    """

    loop: Loop
    fresh: Graph = attrs.field(factory=Graph)
    env: dict[Node, Node] = attrs.field(factory=dict)
    stacked: dict[Repeated, Any] = attrs.field(factory=dict)

    def run(self, graph: Graph) -> Graph:
        loop = self.loop
        for node in graph.nodes:
            if node in loop.at:
                op, _ = loop.at[node]
                if op not in self.stacked:
                    self.stacked[op] = self.op(op, node)
                if not op.reads_sharded:
                    self.copy(node)
            elif node in loop.sums and any(map(loop.is_sharded, loop.sums[node].summands)):
                if node is loop.sums[node].additions[-1]:
                    self.env[node] = self.sum(loop.sums[node])
            elif node in loop.joins and loop.joins[node].reads_sharded:
                self.env[node] = self.join(node)
            else:
                self.copy(node)
        remove_unread(self.fresh)
        return self.fresh

    def copy(self, node: Node) -> None:
        """Copy a node as it is."""
        self.env[node] = self.fresh.node_copy(node, self.env.__getitem__)

    def add(self, like: Node, fn: Callable[..., Any], inputs: Sequence[Node]) -> Any:
        """Add the ops of a function, as ops of the line that a node is of."""
        graph = _compat.trace_aten(fn, [x.meta["val"] for x in inputs], {}).graph
        about = {key: like.meta[key] for key in ABOUT if key in like.meta}
        for node in graph.nodes:
            node.meta = {**about, "val": node.meta.get("val")}
        holders = graph.find_nodes(op="placeholder")
        return self.fresh.graph_copy(graph, dict(zip(holders, inputs, strict=True)))

    def op(self, op: Repeated, node: Node) -> Any:
        """Add one op for all turns. `node` is the first of them."""
        at, inputs = self.loop.at, node.all_input_nodes
        if op.slices is not None:
            return self.add(node, _stacked(op.slices), [self.env[op.slices.source]])
        if not any(x in at for x in inputs):
            return self.add(node, self.numbered(node), [self.env[inputs[0]]])
        given: list[Any] = [self.stacked[at[x][0]] if x in at else self.env[x] for x in inputs]
        if op.is_gradient:
            return given[0]
        if node.target is operator.getitem:
            return given[0][args_of(node)[1]]
        dims = tuple(0 if x in at else None for x in inputs)
        made = self.add(node, _for_all_turns(node, dims), given)
        self.check(node, made)
        return made

    def check(self, node: Node, made: Any) -> None:
        """Check that an op for all turns has the results of the op of one, with one more dim."""
        wanted = node.meta["val"]
        pairs = [(wanted, made)] if isinstance(made, Node) else zip(wanted, made, strict=True)
        for one, several in pairs:
            value = several.meta["val"]
            shape, dtype = tuple(value.shape), value.dtype
            if one is not None and (shape, dtype) != ((self.loop.turns, *one.shape), one.dtype):
                raise Unbatched

    def numbered(self, node: Node) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the comparison of a tensor with the numbers of all turns."""
        turns, op = self.loop.turns, NUMBERED[node.target]

        def compared(x: torch.Tensor) -> torch.Tensor:
            numbers = torch.arange(turns, device=x.device)
            return op(x.unsqueeze(0), numbers.reshape(turns, *[1] * x.dim()))

        return compared

    def sum(self, whole: Sum) -> Node:
        """Add a sum of results of all turns and of other values."""
        loop, last = self.loop, whole.additions[-1]
        nodes = [x for x in whole.summands if isinstance(x, Node)]
        parts: list[Node] = []
        for op in dict.fromkeys(loop.at[x][0] for x in nodes if loop.is_sharded(x)):
            total = self.add(last, _total(op), [self.stacked[op]])
            parts += [total] * loop.count(op, whole)
        parts += [self.env[x] for x in nodes if not loop.is_sharded(x)]
        numbers = [x for x in whole.summands if not isinstance(x, Node)]

        def added(*tensors: Any) -> torch.Tensor:
            first, *others = tensors
            for x in (*others, *numbers):
                first = first + x
            return _like(first, last)

        return self.add(last, added, parts)

    def join(self, node: Node) -> Node:
        """Add a stack or cat of the results of all turns."""
        dim = [*args_of(node), 0][1] % node.meta["val"].dim()
        is_cat = node.target is aten.cat.default

        def joined(x: torch.Tensor) -> torch.Tensor:
            x = x.movedim(0, dim)
            return _like(x.flatten(dim, dim + 1) if is_cat else x, node)

        return self.add(node, joined, [self.stacked[self.loop.joins[node]]])


def _stacked(slices: Slices) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that stacks the slices of a tensor, as a function of one argument."""
    return lambda x: slices.stacked(x)  # noqa: PLW0108  make_fx counts the arguments of methods


def _for_all_turns(node: Node, dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """Return the function of an op for all turns.

    Args:
        node: the op of one turn.
        dims: for each input, 0 if it has a first dim of turns.
    """
    inputs = node.all_input_nodes
    if node.target in OF_ALL:
        own = OF_ALL[node.target]

        def several(*tensors: torch.Tensor) -> torch.Tensor:
            read = dict(zip(inputs, zip(tensors, dims, strict=True), strict=True))
            return own(*(read[x] for x in args_of(node)))

        return several
    op: Any = RESHAPES.get(node.target, node.target)

    def one(*tensors: torch.Tensor) -> Any:
        read = dict(zip(inputs, tensors, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), read.__getitem__)
        out = op(*args, **kwargs)
        return out if isinstance(out, torch.Tensor) else [_tensor(x) for x in out]

    return torch.vmap(one, dims)


def _tensor(x: torch.Tensor | None) -> torch.Tensor:
    """Return a result, or a tensor that nothing reads for one that was not asked for."""
    return torch.zeros(()) if x is None else x


def _total(op: Repeated) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the sum of an op's results over all turns, as a function of what the turns have."""
    of = gradient_of(op.all[0])
    if of is None:
        return lambda x: x.sum(0)
    dim, width = of[0].dim, of[0].width
    if width is None:
        return lambda x: x.movedim(0, dim)
    return lambda x: x.movedim(0, dim).flatten(dim, dim + 1)


def _like(x: torch.Tensor, node: Node) -> torch.Tensor:
    """Return a tensor that is contiguous if the result of a node is."""
    return x.contiguous() if node.meta["val"].is_contiguous() else x
