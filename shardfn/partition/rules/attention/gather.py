"""Attention of a rank's queries and heads to keys that it has of the whole sequence.

Causal attention takes the keys in the chunks in which the queries are sharded: its own chunk is
causal, chunks before it are visible, those after it are not. So no rank makes a mask of all keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.fx import Node

from ... import layout
from ...emission.graph_builder import Builder, LocalShard
from .arguments import is_backward
from .blocks import (
    HEADS,
    QUERIES,
    Block,
    Kernel,
    attended,
    dtype,
    finished,
    formed,
    kernel_of,
    pulled_back,
    shape,
    summed,
    tensors_of,
)

aten = torch.ops.aten


def lower(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], target: Any
) -> Any:
    """Compute attention on a rank."""
    kernel = kernel_of(b, target, args, kwargs, shards)
    keys = Keys.of(kernel)
    is_cut = kernel.given["is_causal"] and kernel.is_cut("query", QUERIES)
    if not is_cut and keys.heads is None:
        return b.call(target, *args, **kwargs)
    run = backward if is_backward(target) else forward
    return run(kernel, keys, Causal.of(kernel, keys) if is_cut else None)


@attrs.frozen(eq=False)
class Keys:
    """The keys and values of a rank's query heads.

    Args:
        key: (B, G, S, D)
        value: (B, G, S, E)
        heads: the places of these heads among those that the rank has, where it has more.
    """

    key: Node
    value: Node
    heads: Node | None

    @staticmethod
    def of(kernel: Kernel) -> Keys:
        """Select the key heads of a rank's query heads, if other ranks of an axis have others."""
        b = kernel.b
        key, value = kernel.given["key"], kernel.given["value"]
        heads = _own_heads(kernel) if _has_other_heads(kernel) else None
        if heads is not None:
            key = b.call(aten.index_select.default, key, HEADS, heads)
            value = b.call(aten.index_select.default, value, HEADS, heads)
        return Keys(key, value, heads)

    def one_block(self, kernel: Kernel) -> Block:
        """All keys as one block, for queries that are not sharded, or see all of them."""
        return Block(self.key, self.value, causal=kernel.given["is_causal"])

    def placed(self, b: Builder, gradient: Node, like: Node) -> Node:
        """Add the gradients of the selected heads, of some keys or values, to those of all heads
        that the rank has.
        """
        if self.heads is None:
            return gradient
        size = [*shape(gradient)]
        size[HEADS] = shape(like)[HEADS]
        zeros = b.call(aten.new_zeros.default, gradient, size)
        return b.call(aten.index_add.default, zeros, HEADS, self.heads, gradient)


def _has_other_heads(kernel: Kernel) -> bool:
    """Return whether an axis shards the heads of queries, but not those of keys."""
    pairs = zip(*(kernel.shards[name].placements for name in ("query", "key")), strict=True)
    return any(layout.shards(q, HEADS) and not layout.shards(k, HEADS) for q, k in pairs)


def _own_heads(kernel: Kernel) -> Node:
    """Emit the places of the key heads of a rank's query heads: one, if all share it, else one
    for each query head.
    """
    b = kernel.b
    query, key = kernel.shards["query"], kernel.shards["key"]
    together = query.shape[HEADS] // key.shape[HEADS]  # query heads of one key head
    chunks = chunks_of(b, query, HEADS)
    share_one = all(start // together == (start + n - 1) // together for start, n in chunks if n)
    count = 1 if share_one else query.local_shape[HEADS]
    heads = _numbers(b, query, HEADS, count)
    heads = b.call(aten.div.Tensor_mode, heads, together, rounding_mode="floor")
    if key.is_sharded(HEADS):
        heads = b.call(aten.sub.Tensor, heads, b.offset(key, HEADS))
    return heads


def _numbers(b: Builder, x: LocalShard, dim: int, count: int) -> Node:
    """Emit the global numbers of the first elements of a rank's shard along a dim."""
    device = x.node.meta["val"].device
    steps = b.call(aten.arange.default, count, dtype=torch.int64, device=device)
    return b.call(aten.add.Tensor, steps, b.offset(x, dim)) if x.is_sharded(dim) else steps


def chunks_of(b: Builder, x: LocalShard, dim: int) -> list[tuple[int, int]]:
    """List the (start, size) of the chunks of all ranks along a dim, in order."""
    found = [(0, x.shape[dim])]
    for placement, n in zip(x.placements, b.axes.sizes, strict=True):
        if layout.shards(placement, dim):
            _, unit = layout.dim_and_unit(placement)
            found = [
                (start + offset, mine)
                for start, size in found
                for offset, mine in (layout.chunk(size, unit, n, c) for c in range(n))
            ]
    return found


@attrs.frozen(eq=False)
class Causal:
    """How the queries of a rank see the keys of the whole sequence.

    Args:
        own: the global numbers of the queries. None: all keys are one block with a mask.
        blocks: the block of their own keys first, then those before it, in order.
        ends: where each of the latter ends.
    """

    own: Node | None
    blocks: tuple[Block, ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(kernel: Kernel, keys: Keys) -> Causal:
        """Take the keys in the chunks of the queries. Keys after the last query are not seen."""
        b = kernel.b
        query = kernel.shards["query"]
        rows = _numbers(b, query, QUERIES, query.local_shape[QUERIES])
        if shape(keys.key)[QUERIES] < query.shape[QUERIES]:
            return Causal(None, (_masked(kernel, keys, rows),), ())
        ends = tuple(start for start, n in chunks_of(b, query, QUERIES) if start and n)
        of_own = lambda x: b.call(aten.index_select.default, x, QUERIES, rows)
        own = Block(of_own(keys.key), of_own(keys.value), causal=True)
        offset = b.offset(query, QUERIES)
        before = [
            Block(
                b.call(aten.slice.Tensor, keys.key, QUERIES, start, end),
                b.call(aten.slice.Tensor, keys.value, QUERIES, start, end),
                visible=b.call(aten.ge.Scalar, offset, end),
            )
            for start, end in itertools.pairwise((0, *ends))
        ]
        return Causal(rows, (own, *before), ends)

    def joined(self, b: Builder, gradients: Sequence[Node], like: Node) -> Node:
        """Join the gradients of all blocks to that of the keys of the whole sequence."""
        own, *before = gradients
        if self.own is None:
            return own
        size = shape(like)[QUERIES]
        shape_after = [*shape(own)]
        shape_after[QUERIES] = size - (self.ends[-1] if self.ends else 0)
        as_own = {"dtype": dtype(own), "device": own.meta["val"].device}
        after = b.call(aten.full.default, shape_after, 0.0, **as_own)
        others = b.call(aten.cat.default, [*before, after], QUERIES) if before else after
        # no rank that has these queries sees these keys in another block
        return b.call(aten.index_copy.default, others, QUERIES, self.own, own)


def _masked(kernel: Kernel, keys: Keys, rows: Node) -> Block:
    """Make one block of all keys, with a mask: of fewer keys than queries."""
    b = kernel.b
    device = rows.meta["val"].device
    columns = b.call(aten.arange.default, shape(keys.key)[QUERIES], device=device)
    is_later = b.call(aten.gt.Tensor, columns, b.call(aten.unsqueeze.default, rows, 1))
    zeros = b.call(
        aten.full.default,
        [*shape(is_later)],
        0.0,
        dtype=dtype(kernel.given["query"]),
        device=device,
    )
    mask = b.call(aten.masked_fill.Scalar, zeros, is_later, float("-inf"))
    return Block(keys.key, keys.value, mask=mask)


def forward(kernel: Kernel, keys: Keys, causal: Causal | None) -> list[Node]:
    """Attend to the keys of the whole sequence."""
    b = kernel.b
    if causal is None or len(causal.blocks) == 1:
        block = keys.one_block(kernel) if causal is None else causal.blocks[0]
        return tensors_of(b, kernel.on(block))
    first, *others = ((block, kernel.on(block)) for block in causal.blocks)
    merged = attended(b, *first)
    for pair in others:
        merged = merged.with_block(b, attended(b, *pair))
    return finished(kernel, merged, first[1])


def backward(kernel: Kernel, keys: Keys, causal: Causal | None) -> list[Node]:
    """Return the gradients of a rank's queries, and their terms of those of keys and values."""
    b = kernel.b
    blocks = [keys.one_block(kernel)] if causal is None else causal.blocks
    results = [kernel.on(block) for block in blocks]
    first = tensors_of(b, results[0])
    if causal is None:
        query, key, value, *rest = first
    else:
        found = [pulled_back(kernel, *pair) for pair in zip(blocks, results, strict=True)]
        queries, *others = zip(*found, strict=True)
        query = summed(b, queries)
        key, value = (causal.joined(b, x, keys.key) for x in others)
        rest = []
    key, value = (
        keys.placed(b, x, kernel.given[name]) for x, name in ((key, "key"), (value, "value"))
    )
    whole = (query, key, value)
    pairs = zip(whole, first, strict=False)
    return [*(formed(b, x, own.meta["val"]) for x, own in pairs), *rest]
