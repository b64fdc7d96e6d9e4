"""Attention to keys that stay sharded on their sequence: they travel around the ranks of an axis.

In step i a rank attends to the chunk of the rank i places before it, and merges the result. In the
backward the gradients of a chunk travel with it, and one step more brings them home. Permutes are
steps of the plan, so the schedule starts each while the chunk before it is in use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ....collectives import PPERMUTE
from ....ops.placement import AFTER
from ....types import ATTENTION, MeshAxes, MeshPlacements
from ... import layout, plan
from ...emission.graph_builder import Builder, LocalShard
from ...redistribute import Move, local_bytes
from ...rule_api.strategy import OpCall, named
from . import zigzag
from .arguments import is_backward, mask_name, names_of, tensors_by_name
from .blocks import (
    INFINITE,
    QUERIES,
    Block,
    Kernel,
    Merged,
    attended,
    formed,
    joined,
    pulled_back,
    shape,
    summed,
    tensors_of,
)
from .gather import Keys

aten = torch.ops.aten
NewSlot = Callable[[torch.Tensor, MeshPlacements], plan.Slot]
Emitted = list[Node]


def ring_axis(query: MeshPlacements, key: MeshPlacements) -> int | None:
    """Return the mesh axis over which keys travel; None if none."""
    pairs = enumerate(zip(query, key, strict=True))
    return next((k for k, ms in pairs if all(layout.shards(m, QUERIES) for m in ms)), None)


def in_steps(step: plan.Apply, axes: MeshAxes, slot: NewSlot) -> Sequence[plan.Step]:
    """Write attention over a ring as steps; another one is a step as it is."""
    slots = dict(zip(_tensor_names(step.node), step.ins, strict=True))
    axis = ring_axis(slots["query"].placements, slots["key"].placements)
    if axis is None or axes.sizes[axis] == 1:
        return [step]
    ring = Ring(step, slots, axes, axis, slot)
    return [*(ring.backward() if is_backward(step.node.target) else ring.forward())]


def _tensor_names(node: Node) -> list[str]:
    """List the names of a call's tensor arguments."""
    given = [*zip(names_of(node.target), node.args, strict=False), *node.kwargs.items()]
    return [name for name, x in given if isinstance(x, Node)]


def sends(
    call: OpCall, ins: Sequence[MeshPlacements], axis: int, sizes: Sequence[int]
) -> tuple[float, int]:
    """Return the bytes that a rank sends around a ring, and in how many collectives."""
    tensors = tensors_by_name(call)
    placements = dict(zip(tensors, ins, strict=True))
    of_query, of_key = placements["query"], placements["key"]
    n = sizes[axis]
    if n == 1 or ring_axis(of_query[axis:][:1], of_key[axis:][:1]) is None:
        return 0.0, 0
    key, value = tensors["key"], tensors["value"]
    _, unit = layout.dim_and_unit(of_key[axis])
    full = layout.full_chunk(key.shape[QUERIES], unit, n)
    elements = (key.numel() + value.numel()) / max(key.shape[QUERIES], 1) * full
    elements = local_bytes(elements, of_key, sizes[: len(of_key)], without=axis)
    hops = n - 1
    sent = hops * elements * key.element_size()
    if is_backward(call.target):  # gradients come home, and are summed in the dtype of logsumexp
        sent += n * elements * tensors["logsumexp"].element_size()
        hops += n
    return sent, 2 * hops  # as many as of keys and values apart


def pieces(size: int, full: int, n: int) -> list[tuple[int, int, int]]:
    """Cut a chunk into pieces which a rank has all or nothing of: (start, end, the number of
    ranks that have it). The last chunk of a sequence may be short.
    """
    count, rest = divmod(size, full)
    whole = [(rest, full, count)] if count else []
    return [(0, rest, count + 1), *whole] if rest else whole


@attrs.frozen(eq=False)
class Ring:
    """The steps of one attention whose keys travel over an axis.

    Args:
        step: of the op.
        slots: its inputs by name.
        axes: of the mesh.
        axis: the one over which keys travel.
        slot: makes a slot.
    """

    step: plan.Apply
    slots: dict[str, plan.Slot]
    axes: MeshAxes
    axis: int
    slot: NewSlot
    graph: Graph = attrs.field(factory=Graph)

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.axes.sizes[self.axis]

    @property
    def full(self) -> int:
        """The size of a full chunk of keys."""
        key = self.slots["key"]
        _, unit = layout.dim_and_unit(key.placements[self.axis])
        return layout.full_chunk(key.value.shape[QUERIES], unit, self.n)

    @property
    def width(self) -> int:
        """The features of a key."""
        return self.slots["key"].value.shape[-1]

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """The pieces of a chunk."""
        return pieces(self.slots["key"].value.shape[QUERIES], self.full, self.n)

    @property
    def masks(self) -> tuple[str, ...]:
        """The name of the mask, if there is one."""
        name = mask_name(self.step.node.target)
        return (name,) if name in self.slots else ()

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments of the op that are no tensors."""
        node = self.step.node
        given = named(node.target, node.args, node.kwargs)
        return {name: None if isinstance(x, Node) else x for name, x in given.items()}

    @property
    def is_causal(self) -> bool:
        """Whether query i sees the keys up to i."""
        return self.constants["is_causal"]

    @property
    def is_zigzag(self) -> bool:
        """Whether a rank has an early and a late chunk of a causal sequence."""
        return layout.is_zigzag(self.slots["query"].placements[self.axis])

    # Steps

    def forward(self) -> Iterator[plan.Step]:
        """Yield the steps of the forward."""
        query, masks = self.slots["query"], self.masks
        out, rows, *rest = self.step.outs
        wide = rows.value.dtype
        of_rows = query.value.new_empty(query.value.shape[:-1], dtype=wide)
        sums = [self.like(out, of_dtype(out.value, wide)), self.like(query, of_rows)]
        block = self.packed()
        yield self.pack(block)
        first = ("query", "key", "value", *masks)
        ins = [self.slots[name] for name in first]
        made = [*sums, *rest]
        attend = functools.partial(self.attend, outs=made)
        yield self.apply(first, ins, made, attend, run_empty=True)
        for i in range(1, self.n):
            arrived = self.like(block)
            yield from self.permute(block, arrived, after=query if i > 1 else None)
            block = arrived
            is_last = i == self.n - 1
            others = [out, rows] if is_last else [self.like(x) for x in sums]
            names = ("query", "block", "out", "logsumexp", *masks)
            query = yield from self.after(query, sums[0])  # else all blocks are summed at once
            ins = [query, block, *sums, *(self.slots[name] for name in masks)]
            yield self.apply(names, ins, others, functools.partial(self.merge, i=i, outs=others))
            sums = others

    def backward(self) -> Iterator[plan.Step]:
        """Yield the steps of the backward."""
        query, key, value = self.step.outs
        wide = self.slots["logsumexp"].value.dtype
        block = self.packed()
        of_keys = self.like(block, of_dtype(block.value, wide))
        yield self.pack(block)
        names = tuple(self.slots)
        sums = self.like(query, of_dtype(query.value, wide))
        made = [sums, of_keys]
        pull_back = functools.partial(self.pull_back, i=0, outs=made)
        yield self.apply(names, [*self.slots.values()], made, pull_back, run_empty=True)
        at = names.index("key")
        others = tuple(name for name in names if name not in ("key", "value"))
        own = self.slots["query"]
        for i in range(1, self.n):
            arrived, with_block = self.like(block), self.like(of_keys)
            yield from self.permute(block, arrived, after=own if i > 1 else None)
            yield from self.permute(of_keys, with_block)
            block = arrived
            made = [query if i == self.n - 1 else self.like(sums), self.like(of_keys)]
            own = yield from self.after(self.slots["query"], sums)  # as in the forward
            ins = [{**self.slots, "query": own}[name] for name in others]
            ins[at:at] = [block, with_block]
            names = (*others[:at], "block", "gradients", *others[at:], "sum")
            pull_back = functools.partial(self.pull_back, i=i, outs=made)
            yield self.apply(names, [*ins, sums], made, pull_back, run_empty=True)
            sums, of_keys = made
        home = self.like(of_keys)
        yield from self.permute(of_keys, home)
        yield self.unpack(home, key, value)

    def like(self, slot: plan.Slot, value: torch.Tensor | None = None) -> plan.Slot:
        """Make a slot of another value at the placements of a slot."""
        return self.slot(slot.value if value is None else value, slot.placements)

    def packed(self) -> plan.Slot:
        """Make the slot of all chunks, keys beside values, each padded to a full one."""
        key, value = self.slots["key"], self.slots["value"]
        size = [*key.value.shape]
        size[QUERIES] = self.n * self.full
        size[-1] += value.value.shape[-1]
        placements = list(key.placements)
        placements[self.axis] = QUERIES
        return self.slot(key.value.new_empty(size), tuple(placements))

    def pack(self, block: plan.Slot) -> plan.Step:
        """Make the step that packs a rank's chunk of keys and values."""
        ins = (self.slots["key"], self.slots["value"])
        node = self.node(aten.cat.default, ([*plan.holders(self.graph, ins)], -1), block.value)
        return plan.Apply(node, ins, (block,), self.emit_pack, run_empty=True)

    def unpack(self, block: plan.Slot, key: plan.Slot, value: plan.Slot) -> plan.Step:
        """Make the step that takes the gradients of a rank's own chunk apart."""
        sizes = [self.width, block.value.shape[-1] - self.width]
        args = (*plan.holders(self.graph, (block,)), sizes, -1)
        node = self.node(aten.split_with_sizes.default, args, key.value, value.value)
        emit = functools.partial(self.emit_unpack, outs=(key, value))
        return plan.Apply(node, (block,), (key, value), emit, run_empty=True)

    def permute(
        self, source: plan.Slot, target: plan.Slot, after: plan.Slot | None = None
    ) -> Iterator[plan.Step]:
        """Yield the steps that send a chunk to the next rank, not before the queries of a block are
        available. So one chunk is in use and one on its way; else all would come at once, and be
        kept. Queries are in memory anyway; a sum would be kept for it.
        """
        if after is not None:
            source = yield from self.after(source, after)
        places = source.placements
        perm = tuple((k, (k + 1) % self.n) for k in range(self.n))
        move = Move(PPERMUTE, self.axis, places, places, perm)
        is_implicit = self.axes.option(ATTENTION, self.axis) is None
        yield plan.Redistribute(self.step.node, source, target, (move,), is_implicit)

    def after(self, source: plan.Slot, token: plan.Slot) -> Generator[plan.Step, None, plan.Slot]:
        """Yield the step that keeps a value back until another one is available."""
        ins, late = (source, token), self.like(source)
        node = self.node(AFTER, tuple(plan.holders(self.graph, ins)), late.value)
        yield plan.Apply(node, ins, (late,))
        return late

    def apply(
        self,
        names: Sequence[str],
        ins: Sequence[plan.Slot],
        outs: Sequence[plan.Slot],
        run: Callable[[Kernel], Emitted],
        *,
        run_empty: bool = False,
    ) -> plan.Step:
        """Make the step of one block, as a call of the op on queries and one chunk of keys.

        Args:
            names: of its inputs: arguments of the op, or of `run` alone.
            ins: its inputs.
            outs: its results.
            run: emits it.
            run_empty: whether a rank without queries runs it, too.
        """
        holders = plan.holders(self.graph, ins)
        key, value = self.slots["key"].value, self.slots["value"].value
        second = names.index("key") if "key" in names else names.index("block")
        for place, x in ((second, key), (second + 1, value)):
            holders[place].meta["val"] = x.new_empty((*x.shape[:QUERIES], self.full, x.shape[-1]))
        made = (slot.value for slot in outs)
        node = self.node(self.step.node.target, tuple(holders), *made)

        def local(b: Builder, _: Any, __: Any, shards: list[LocalShard]) -> Emitted:
            return run(self.kernel(b, dict(zip(names, shards, strict=True))))

        return plan.Apply(node, tuple(ins), tuple(outs), local, run_empty=run_empty)

    def node(self, target: Any, args: tuple[Any, ...], *outs: torch.Tensor) -> Node:
        """Make the node of a step."""
        return plan.part_of(self.step.node, self.graph, target, args, outs)

    # What a rank runs

    def kernel(self, b: Builder, shards: dict[str, LocalShard]) -> Kernel:
        """Bind the op's arguments on a rank; keys and values are those of the chunk at hand."""
        given = {**self.constants, **{name: x.node for name, x in shards.items()}}
        if "block" in shards:
            key, value = halved(b, shards["block"].node, self.width)
            given.update(key=key, value=value)
            shards = {**shards, "key": shards["block"]}
        return Kernel(b, self.step.node.target, given, shards)

    def emit_pack(self, b: Builder, _: Any, __: Any, shards: list[LocalShard]) -> Emitted:
        """Emit a rank's chunk of keys beside values, padded."""
        both = b.call(aten.cat.default, [shard.node for shard in shards], -1)
        return [padded(b, both, self.full)]

    def emit_unpack(
        self, b: Builder, _: Any, __: Any, shards: list[LocalShard], outs: Sequence[plan.Slot]
    ) -> Emitted:
        """Emit the gradients of a rank's own keys and values, without padding."""
        rows = b.local_shape(outs[0].value.shape, outs[0].placements)[QUERIES]
        both = b.call(aten.slice.Tensor, shards[0].node, QUERIES, 0, rows)
        halves = halved(b, both, self.width)
        return [formed(b, x, slot.value) for x, slot in zip(halves, outs, strict=True)]

    def blocks(self, kernel: Kernel, i: int) -> tuple[Keys, list[Block]]:
        """Return the keys that have arrived in step i, and the blocks that they are taken in."""
        b = kernel.b
        keys = Keys.of(kernel)
        own = b.coords[self.axis]
        size = shape(keys.key)[QUERIES]
        if not i:
            whole = attrs.evolve(keys.one_block(kernel), mask=self.columns(kernel, own, 0, size))
            return keys, [whole] if size else []
        owner = b.call(aten.remainder.Scalar, b.call(aten.sub.Tensor, own, i), self.n)
        # a chunk before that of queries is a full one
        parts = [(0, self.full, self.n)] if self.is_causal else self.pieces
        found = []
        for start, end, count in parts:
            visible = b.call(aten.lt.Scalar, owner, count) if count < self.n else None
            if self.is_causal:
                visible = b.call(aten.ge.Scalar, own, i)
            key, value = (
                b.call(aten.slice.Tensor, x, QUERIES, start, end) if end - start < size else x
                for x in (keys.key, keys.value)
            )
            mask = self.columns(kernel, owner, start, end)
            found.append(Block(key, value, visible=visible, mask=mask))
        return keys, found

    def is_before(self, b: Builder, i: int) -> Node:
        """Emit whether the rank whose chunk arrives in step i is before this one."""
        return b.call(aten.ge.Scalar, b.coords[self.axis], i)

    def columns(self, kernel: Kernel, owner: Node, start: int, end: int) -> Node | None:
        """Select the columns of the mask of some keys of a rank's chunk; None without a mask."""
        b = kernel.b
        mask = kernel.given[self.masks[0]] if self.masks else None
        if mask is None or shape(mask)[-1] == 1:
            return mask
        first = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, owner, self.full), start)
        steps = b.call(
            aten.arange.default, end - start, dtype=torch.int64, device=mask.meta["val"].device
        )
        places = b.call(aten.add.Tensor, steps, first)
        # columns of keys that no rank has: their block is not visible
        inside = b.call(aten.clamp.default, places, None, shape(mask)[-1] - 1)
        return b.call(aten.index_select.default, mask, -1, inside)

    def attend(self, kernel: Kernel, outs: Sequence[plan.Slot]) -> Emitted:
        """Attend to a rank's own chunk."""
        b = kernel.b
        is_empty = 0 in kernel.shards["query"].local_shape
        blocks = [] if is_empty else self.blocks(kernel, 0)[1]
        if not blocks:
            of_out, of_rows, *rest = (filled(b, slot) for slot in outs)
            rows = b.call(aten.full_like.default, of_rows, INFINITE)
            return [of_out, rows, *rest]
        results = kernel.on(blocks[0])
        merged = attended(b, blocks[0], results)
        return [merged.out, merged.logsumexp, *tensors_of(b, results)[2:]]

    def merge(self, kernel: Kernel, i: int, outs: Sequence[plan.Slot]) -> Emitted:
        """Attend to the chunk that has arrived in step i, and merge the result."""
        b = kernel.b
        merged = Merged(*(kernel.shards[name].node for name in ("out", "logsumexp")))
        if self.is_zigzag:
            merged = zigzag.merged(kernel, Keys.of(kernel), merged, self.is_before(b, i))
        else:
            for block in self.blocks(kernel, i)[1]:
                merged = merged.with_block(b, attended(b, block, kernel.on(block)))
        rows = merged.logsumexp
        if i == self.n - 1 and self.masks:  # a query may see no key
            is_empty = b.call(aten.eq.Scalar, rows, INFINITE)
            rows = b.call(aten.masked_fill.Scalar, rows, is_empty, 0.0)
        pairs = zip((merged.out, rows), outs, strict=True)
        return [formed(b, x, slot.value) for x, slot in pairs]

    def pull_back(self, kernel: Kernel, i: int, outs: Sequence[plan.Slot]) -> Emitted:
        """Add the gradients of the chunk that has arrived in step i to those before it."""
        b = kernel.b
        found = [kernel.shards[name].node for name in ("sum", "gradients")] if i else []
        if 0 not in kernel.shards["query"].local_shape:
            found = self.with_gradients(kernel, i, found)
        found = found or [filled(b, slot) for slot in outs]
        return [formed(b, x, slot.value) for x, slot in zip(found, outs, strict=True)]

    def with_gradients(self, kernel: Kernel, i: int, before: Emitted) -> Emitted:
        """Return the gradients of queries and of a chunk's keys and values, with those before."""
        b = kernel.b
        keys, blocks = self.blocks(kernel, i)
        if not blocks:
            return before
        if self.is_zigzag and i:
            of_queries, *of_keys = zigzag.pulled_back(kernel, keys, self.is_before(b, i))
        else:
            found = [pulled_back(kernel, block, kernel.on(block)) for block in blocks]
            queries, *others = zip(*found, strict=True)
            of_queries, of_keys = [summed(b, queries)], [[joined(b, x)] for x in others]
        pairs = zip(of_keys, ("key", "value"), strict=True)
        of_keys = [[keys.placed(b, x, kernel.given[name]) for x in parts] for parts, name in pairs]
        if not before:
            (own,), halves = of_queries, [x for (x,) in of_keys]
        else:
            own = added(b, before[0], of_queries)
            pairs = zip(halved(b, before[1], self.width), of_keys, strict=True)
            halves = [added(b, *pair) for pair in pairs]
        return [own, padded(b, b.call(aten.cat.default, halves, -1), self.full)]


def of_dtype(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Make a fake tensor of the same shape in another dtype."""
    return x.new_empty(x.shape, dtype=to)


def added(b: Builder, whole: Node, parts: Sequence[Node]) -> Node:
    """Add to a value the parts that together have its rows, each padded with zeros: elementwise, so
    that a compiler stores the sum alone.
    """
    start, rows = 0, shape(whole)[QUERIES]
    for part in parts:
        end = start + shape(part)[QUERIES]
        if len(parts) > 1:
            part = b.call(aten.constant_pad_nd.default, part, [0, 0, start, rows - end])
        whole = b.call(aten.add.Tensor, whole, part)
        start = end
    return whole


def padded(b: Builder, x: Node, size: int) -> Node:
    """Pad keys with zeros to so many."""
    missing = size - shape(x)[QUERIES]
    return b.call(aten.constant_pad_nd.default, x, [0, 0, 0, missing]) if missing else x


def halved(b: Builder, x: Node, width: int) -> tuple[Node, Node]:
    """Take keys and values apart that lie beside each other."""
    end = shape(x)[-1]
    return (
        b.call(aten.slice.Tensor, x, -1, 0, width),
        b.call(aten.slice.Tensor, x, -1, width, end),
    )


def filled(b: Builder, slot: plan.Slot) -> Node:
    """Emit a rank's shard of zeros."""
    like = {"dtype": slot.value.dtype, "device": slot.value.device}
    size = b.local_shape(slot.value.shape, slot.placements)
    return b.call(aten.full.default, [*size], 0, **like)
