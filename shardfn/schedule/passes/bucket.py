"""Replace the collectives of a bucket by one: pack, send, and split the result into the leaves.

The schedule_plan, which all ranks share, says which collectives are joined. To watch this pass at
work, stop at `join` (docs/debug-bucketing.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from ...collectives import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, implement
from ...ops.graph_copies import copied
from ...ops.nodes import args_of
from ...ops.pack import PACK
from ..reorder import sort
from ..schedule_plan import SchedulePlan

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


def bucket(graph: torch.fx.Graph, schedule_plan: SchedulePlan) -> torch.fx.Graph:
    """Replace the collectives of each batch by one."""
    if not any("collective" in node.meta and "transfer" in node.meta for node in graph.nodes):
        return graph
    out = copied(graph)
    found: dict[int, dict[Any, torch.fx.Node]] = {}
    for node in out.nodes:
        if "collective" in node.meta and "transfer" in node.meta:
            key = node.meta["transfer"]
            found.setdefault(schedule_plan.batch_of[key], {})[key] = node
    instead: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, starts in sorted(found.items()):
        instead.update(
            join(
                out,
                schedule_plan,
                index,
                [starts[key] for key in schedule_plan.members[index] if key in starts],
            )
        )
    _replace(out, instead)
    if instead:
        sort(out)
    return out


def _replace(graph: torch.fx.Graph, instead: dict[torch.fx.Node, torch.fx.Node]) -> None:
    """Let the readers of each old wait read the value from its bucket."""
    for reader in dict.fromkeys(user for wait in instead for user in wait.users):
        reader.args, reader.kwargs = torch.fx.node.map_arg(
            (reader.args, reader.kwargs), lambda x: instead.get(x, x)
        )
    for wait in instead:
        (start,) = wait.all_input_nodes
        graph.erase_node(wait)
        graph.erase_node(start)


def join(
    graph: torch.fx.Graph, schedule_plan: SchedulePlan, index: int, starts: list[torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Add one collective that replaces several. Returns what replaces each old wait.

    Args:
        graph: the graph to extend. Its nodes may be out of topological order afterwards.
        schedule_plan: the schedule.
        index: the index of the batch.
        starts: the collectives that it joins.

    Returns:
        The replacement of each collective's wait. Empty if nothing changes.
    """
    number = schedule_plan.bucket_of.get(index)
    for node in starts:
        node.meta["batch"] = index
        node.meta["collective"] = attrs.evolve(node.meta["collective"], bucket=number)
    first = starts[0]
    own_dtype: torch.dtype = args_of(first)[0].meta["val"].dtype
    dtype = schedule_plan.dtypes.get(index, own_dtype)
    if len(starts) == 1 and dtype == own_dtype:
        return {}
    packing = COLLECTIVES[first.meta["collective"].kind].packing
    with graph.inserting_before(first):
        record = first.meta["collective"]
        origin = record.name if number is None else f"bucket {number}"
        place = (record.source, record.module) if number is None else (None, None)
        pack = _Pack.next_to(first, origin, *place)
        parts = [pack.cast(packing.payload(node), dtype) for node in starts]
        wait = _sent(pack, packing, first, parts)
        wait.meta["batch"] = index
        return _unpacked(pack, packing, wait, dict(zip(starts, parts, strict=True)))


def _sent(
    pack: _Pack, packing: _Packing, first: torch.fx.Node, parts: list[torch.fx.Node]
) -> torch.fx.Node:
    """Add the packed payload, the collective and its wait."""
    n = packing.ranks(first)
    packed = packing.pack(pack, parts, n)
    start = pack.call(first.target, packed, *first.args[1:])
    wait = pack.call(WAIT, start)
    record = attrs.evolve(
        first.meta["collective"],
        nbytes=packing.nbytes(packed, n),
        name=pack.about["origin"],
        source=pack.about["source"],
        module=pack.about["module"],
    )
    start.meta.update(collective=record, batch=first.meta["batch"], transfer=first.meta["transfer"])
    return wait


def _unpacked(
    pack: _Pack, packing: _Packing, wait: torch.fx.Node, parts: dict[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Unpack the result of a bucket into the value that each old wait gave.

    Args:
        pack: adds nodes to the graph.
        packing: the packing of this kind of collective.
        wait: the wait for the bucket.
        parts: the collectives that it joins, each with its payload.

    Returns:
        The replacement of each collective's wait.
    """
    instead: dict[torch.fx.Node, torch.fx.Node] = {}
    offset = 0
    for start, part in parts.items():
        (old,) = start.users
        n = packing.ranks(start)
        size = packing.received(part, n)
        result = packing.unpack(pack, wait, offset, size, n)
        result = pack.viewed(result, list(old.meta["val"].shape))
        result = pack.cast(result, args_of(start)[0].meta["val"].dtype)
        result.meta.update({key: old.meta[key] for key in ("type", "moved") if key in old.meta})
        instead[old] = result
        offset += size
    return instead


def _unviewed(x: Any) -> torch.fx.Node:
    """Return the value before a view, since packing does not depend on the shape."""
    while (
        x.target is aten.view.default
        and len(x.args[0].users) == 1
        and x.args[0].meta["val"].is_contiguous()
    ):
        x = x.args[0]
    return x


@attrs.frozen(eq=False)
class _Pack:
    """Adds calls to a graph, with metadata."""

    graph: torch.fx.Graph
    about: dict[str, Any]

    @classmethod
    def next_to(
        cls, node: torch.fx.Node, origin: str, source: str | None = None, module: str | None = None
    ) -> _Pack:
        """Start adding calls of the same phase and step as a node."""
        about = {
            "source": source,
            "module": module,
            "phase": node.meta["phase"],
            "step": node.meta["step"],
            "origin": origin,
        }
        return cls(node.graph, about)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Add a call and compute its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta.update(self.about, val=target(*fakes, **kwargs))
        return node

    def cast(self, x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        """Cast a value if needed."""
        return (
            x if x.meta["val"].dtype == dtype else self.call(aten._to_copy.default, x, dtype=dtype)
        )

    def viewed(self, x: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
        """View a value if needed."""
        if list(x.meta["val"].shape) == shape:
            return x
        return self.call(aten.view.default, x, shape)


def _pack_flat(pack: _Pack, parts: list[torch.fx.Node], n: int) -> torch.fx.Node:
    """Concatenate payloads."""
    return parts[0] if len(parts) == 1 else pack.call(PACK, parts)


def _pack_rows(pack: _Pack, parts: list[torch.fx.Node], n: int) -> torch.fx.Node:
    """Interleave payloads so that the chunks for each rank are together."""
    if len(parts) == 1:
        return parts[0]
    rows = [pack.call(aten.view.default, x, [n, x.meta["val"].numel() // n]) for x in parts]
    whole = pack.call(aten.cat.default, rows, 1)
    return pack.call(aten.view.default, whole, [whole.meta["val"].numel()])


def _cut_flat(pack: _Pack, whole: torch.fx.Node, offset: int, size: int, n: int) -> torch.fx.Node:
    """Slice one payload out of a flat result."""
    return (
        whole
        if whole.meta["val"].numel() == size
        else pack.call(aten.slice.Tensor, whole, 0, offset, offset + size)
    )


def _cut_columns(
    pack: _Pack, whole: torch.fx.Node, offset: int, size: int, n: int
) -> torch.fx.Node:
    """Collect the chunks of one payload from every rank."""
    if whole.meta["val"].numel() == n * size:
        return whole
    rows = pack.call(aten.view.default, whole, [n, whole.meta["val"].numel() // n])
    mine = pack.call(aten.slice.Tensor, rows, 1, offset, offset + size)
    return pack.call(aten.clone.default, mine, memory_format=torch.contiguous_format)


@attrs.frozen
class _Packing:
    """How one collective of a kind carries several payloads."""

    pack: Callable[[_Pack, list[torch.fx.Node], int], torch.fx.Node]
    unpack: Callable[[_Pack, torch.fx.Node, int, int, int], torch.fx.Node]
    # the position of the number of ranks in the op's arguments
    ranks_at: int | None = None
    gathers: bool = False  # whether a rank receives the payloads of all ranks
    scatters: bool = False  # whether a rank receives one n-th of its payload
    any_shape: bool = False  # whether the shape of a payload does not matter

    def ranks(self, start: torch.fx.Node) -> int:
        """Return the number of ranks of the group, if packing depends on it."""
        return 1 if self.ranks_at is None else args_of(start)[self.ranks_at]

    def payload(self, start: torch.fx.Node) -> torch.fx.Node:
        """Return the payload of an old collective."""
        x = args_of(start)[0]
        return _unviewed(x) if self.any_shape else x

    def received(self, part: torch.fx.Node, n: int) -> int:
        """Return how many elements of a part go to each receiver."""
        size = part.meta["val"].numel()
        return size // n if self.scatters else size

    def nbytes(self, packed: torch.fx.Node, n: int) -> int:
        """Return the bytes of the full payload."""
        value = packed.meta["val"]
        sent = value.numel() * value.element_size()
        return sent * n if self.gathers else sent


implement(ALL_REDUCE, packing=_Packing(_pack_flat, _cut_flat, any_shape=True))
implement(ALL_GATHER, packing=_Packing(_pack_flat, _cut_columns, ranks_at=1, gathers=True))
implement(REDUCE_SCATTER, packing=_Packing(_pack_rows, _cut_flat, ranks_at=2, scatters=True))
