"""Causal attention to the keys of another rank, where each rank has an early and a late chunk.

Rank r of n has chunks r and 2n - 1 - r of 2n. Its late queries see the early keys of every other
rank. Beside that its early queries see the early keys of ranks before it, and its late queries the
late keys of ranks after it. So each rank computes two blocks of one chunk by one, both visible.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...emission.graph_builder import Builder
from .blocks import QUERIES, Block, Kernel, Merged, attended, cast, chosen, dtype, joined, shape
from .gather import Keys

aten = torch.ops.aten
OF_QUERIES = ("query", "grad_out", "grad_out_", "out", "logsumexp")


def chunks(b: Builder, x: Node) -> tuple[Node, Node]:
    """Take the early and the late chunk of a rank apart."""
    size = shape(x)[QUERIES]
    half = size // 2
    return (
        b.call(aten.slice.Tensor, x, QUERIES, 0, half),
        b.call(aten.slice.Tensor, x, QUERIES, half, size),
    )


def _blocks(kernel: Kernel, keys: Keys, is_before: Node) -> list[tuple[Kernel, Block]]:
    """Make the two blocks: what else is visible, and late queries with early keys. The former runs
    first: its operands are copies, which end before the results of the latter begin.

    Args:
        kernel: of all queries of the rank.
        keys: those that arrived.
        is_before: whether they are of a rank before this one.
    """
    b = kernel.b
    key, value = chunks(b, keys.key), chunks(b, keys.value)
    own = {name: chunks(b, kernel.given[name]) for name in OF_QUERIES if name in kernel.given}
    select = lambda pair: b.call(aten.where.self, is_before, *pair)
    late = kernel.with_given({name: pair[1] for name, pair in own.items()})
    other = kernel.with_given({name: select(pair) for name, pair in own.items()})
    return [(other, Block(select(key), select(value))), (late, Block(key[0], value[0]))]


def _apart(b: Builder, x: Node, is_before: Node, otherwise: float) -> tuple[Node, Node]:
    """Put a chunk where it belongs: early if it is of a rank before this one, else late."""
    is_after = b.call(aten.logical_not.default, is_before)
    return chosen(b, is_before, x, otherwise), chosen(b, is_after, x, otherwise)


def merged(kernel: Kernel, keys: Keys, before: Merged, is_before: Node) -> Merged:
    """Merge the attention to keys of another rank into that to keys before."""
    b = kernel.b
    sums = zip(chunks(b, before.out), chunks(b, before.logsumexp), strict=True)
    early, late = (Merged(*pair) for pair in sums)
    other, of_late = (
        attended(b, block, half.on(block)) for half, block in _blocks(kernel, keys, is_before)
    )
    outs = _apart(b, other.out, is_before, 0.0)
    rows = _apart(b, other.logsumexp, is_before, float("-inf"))
    early = early.with_block(b, Merged(outs[0], rows[0]))
    late = late.with_block(b, of_late).with_block(b, Merged(outs[1], rows[1]))
    out = joined(b, [early.out, late.out])
    return Merged(out, joined(b, [early.logsumexp, late.logsumexp]))


def pulled_back(kernel: Kernel, keys: Keys, is_before: Node) -> list[list[Node]]:
    """Return the gradients of queries, keys and values by the keys of another rank, each of the
    early and of the late chunk.

    Args:
        kernel: of all queries of the rank.
        keys: those that arrived.
        is_before: whether they are of a rank before this one.
    """
    b = kernel.b
    wide = dtype(kernel.given["logsumexp"])
    other, of_late = (
        [cast(b, b.item(results, i), wide) for i in range(3)]
        for results in (half.on(block) for half, block in _blocks(kernel, keys, is_before))
    )
    found = []
    for i, (x, y) in enumerate(zip(other, of_late, strict=True)):
        early, late = _apart(b, x, is_before, 0.0)
        if i:  # of late queries and early keys
            early = b.call(aten.add.Tensor, early, y)
        else:
            late = b.call(aten.add.Tensor, late, y)
        found.append([early, late])
    return found
