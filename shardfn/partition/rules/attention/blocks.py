"""Attention of a rank's queries to one block of keys, and the merge of several blocks.

Blocks are merged by their logsumexp, as an online softmax does. What is visible depends on the rank
and is computed from its coordinates, so ranks with equal shards run one program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.fx import Node

from .... import _compat
from ...emission.graph_builder import Builder, LocalShard
from ...rule_api.strategy import named
from .arguments import mask_name

aten = torch.ops.aten
INFINITE = float("-inf")
QUERIES, HEADS = 2, 1  # dims


@attrs.frozen(eq=False)
class Block:
    """Some keys with their values, and which queries see them.

    Args:
        key: (B, G, S, D)
        value: (B, G, S, E)
        causal: whether query i sees the keys up to i; else all of them.
        visible: a bool scalar of the rank, whether it sees the block at all. None: it does.
        mask: the columns of the mask that belong to the keys.
    """

    key: Node
    value: Node
    causal: bool = False
    visible: Node | None = None
    mask: Node | None = None


@attrs.frozen(eq=False)
class Kernel:
    """One attention op on a rank, whose arguments can be replaced by name.

    Args:
        b: the builder of the local graph.
        target: the op.
        given: its arguments by name.
        shards: its tensor arguments by name.
    """

    b: Builder
    target: Any
    given: dict[str, Any]
    shards: dict[str, LocalShard]

    def is_cut(self, name: str, dim: int) -> bool:
        """Return whether a rank has a part of an argument's dim alone."""
        shard = self.shards[name]
        return shard.local_shape[dim] != shard.shape[dim]

    def call(self, **instead: Any) -> Node:
        """Call the op with some arguments replaced; the op may lack some of them."""
        values = {**self.given, **{k: x for k, x in instead.items() if k in self.given}}
        args = []
        kwargs = {}
        for argument in _compat.schema(self.target).arguments:
            if argument.kwarg_only:
                kwargs[argument.name] = values[argument.name]
            else:
                args.append(values[argument.name])
        return self.b.call(self.target, *args, **kwargs)

    def with_given(self, instead: dict[str, Node]) -> Kernel:
        """Return the same op with other arguments."""
        return attrs.evolve(self, given={**self.given, **instead})

    def on(self, block: Block, **instead: Any) -> Node:
        """Call the op on the queries and one block of keys."""
        rows = shape(self.given["query"])[QUERIES]
        columns = shape(block.key)[QUERIES]
        if block.mask is not None:
            name = mask_name(self.target)
            assert name is not None, f"{self.target} takes no mask"
            instead[name] = block.mask
        return self.call(
            key=block.key,
            value=block.value,
            is_causal=block.causal,
            compute_log_sumexp=True,
            max_q=rows,
            max_k=columns,
            **instead,
        )


def kernel_of(
    b: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Kernel:
    """Bind the arguments of a call on a rank to their names."""
    given = named(target, args, kwargs)
    feed = iter(shards)
    own = {name: next(feed) for name, x in given.items() if isinstance(x, Node)}
    return Kernel(b, target, given, own)


def shape(x: Node) -> torch.Size:
    """Return the shape of a node's fake tensor."""
    return x.meta["val"].shape


def dtype(x: Node) -> torch.dtype:
    """Return the dtype of a node's fake tensor."""
    return x.meta["val"].dtype


def cast(b: Builder, x: Node, to: torch.dtype) -> Node:
    """Cast a value, if it has another dtype."""
    return x if dtype(x) == to else b.call(aten._to_copy.default, x, dtype=to)


def chosen(b: Builder, visible: Node | None, x: Node, otherwise: float) -> Node:
    """Return x on ranks that see a block, and a number on others."""
    if visible is None:
        return x
    like = {"dtype": dtype(x), "device": x.meta["val"].device}
    return b.call(aten.where.self, visible, x, b.call(aten.full.default, [], otherwise, **like))


@attrs.frozen(eq=False)
class Merged:
    """Attention to the blocks so far.

    Args:
        out: (B, H, T, E), in the dtype of logsumexp.
        logsumexp: (B, H, T)
    """

    out: Node
    logsumexp: Node

    def with_block(self, b: Builder, other: Merged) -> Merged:
        """Merge the attention to one more block."""
        total = b.call(aten.logaddexp.default, self.logsumexp, other.logsumexp)
        # no key at all so far: -inf, of which -inf cannot be subtracted
        is_empty = b.call(aten.eq.Scalar, total, INFINITE)
        finite = b.call(aten.masked_fill.Scalar, total, is_empty, 0.0)
        terms = [_weighted(b, x, finite) for x in (self, other)]
        return Merged(b.call(aten.add.Tensor, *terms), total)


def _weighted(b: Builder, part: Merged, total: Node) -> Node:
    """Weigh the result of some blocks by their share of all exponentials."""
    share = b.call(aten.exp.default, b.call(aten.sub.Tensor, part.logsumexp, total))
    return b.call(aten.mul.Tensor, part.out, b.call(aten.unsqueeze.default, share, -1))


def attended(b: Builder, block: Block, results: Node) -> Merged:
    """Return what a kernel made of one block, or nothing where the rank does not see it."""
    out, rows = b.item(results, 0), b.item(results, 1)
    if rows.meta["val"].dim() > QUERIES + 1:  # of cuDNN: (B, H, T, 1)
        rows = b.call(aten.squeeze.dim, rows, -1)
    if block.mask is not None:  # whose logsumexp is 0 for a query that sees no key
        most = b.call(aten.amax.default, block.mask, [-1])
        is_hidden = b.call(aten.eq.Scalar, most, INFINITE)
        rows = b.call(aten.masked_fill.Scalar, rows, is_hidden, INFINITE)
    out = chosen(b, block.visible, cast(b, out, dtype(rows)), 0.0)
    return Merged(out, chosen(b, block.visible, rows, INFINITE))


def finished(kernel: Kernel, merged: Merged, results: Node) -> list[Node]:
    """Return merged blocks in the form in which the kernel returned one: all its tensors."""
    b = kernel.b
    out, rows, *rest = tensors_of(b, results)
    pairs = ((merged.out, out), (merged.logsumexp, rows))
    whole = [formed(b, x, own.meta["val"]) for x, own in pairs]
    if not kernel.given.get("compute_log_sumexp", True):
        whole[1] = b.call(aten.slice.Tensor, whole[1], QUERIES, 0, 0)
    return [*whole, *rest]


def tensors_of(b: Builder, results: Node) -> list[Node]:
    """Return the tensors that a kernel returned."""
    values = enumerate(results.meta["val"])
    return [b.item(results, i) for i, x in values if isinstance(x, torch.Tensor)]


def joined(b: Builder, parts: Sequence[Node]) -> Node:
    """Join the rows of some parts."""
    return b.call(aten.cat.default, [*parts], QUERIES) if len(parts) > 1 else parts[0]


def summed(b: Builder, terms: Sequence[Node]) -> Node:
    """Add some values."""
    return functools.reduce(lambda x, y: b.call(aten.add.Tensor, x, y), terms)


def formed(b: Builder, x: Node, like: torch.Tensor) -> Node:
    """Give a value the dtype, the number of dims and their order in memory of another one."""
    x = cast(b, x, like.dtype)
    if x.meta["val"].dim() < like.dim():
        x = b.call(aten.unsqueeze.default, x, -1)
    return b.restride(x, like.shape, like.stride())


def pulled_back(kernel: Kernel, block: Block, results: Node) -> list[Node]:
    """Return the gradients of queries, keys and values by one block, in the dtype of logsumexp;
    zeros where the rank does not see it.
    """
    b = kernel.b
    wide = dtype(kernel.given["logsumexp"])
    each = (cast(b, b.item(results, i), wide) for i in range(3))
    return [chosen(b, block.visible, x, 0.0) for x in each]
