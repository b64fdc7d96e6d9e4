"""Join the collectives of a bucket into one: pack, send, and cut each leaf out of what comes back.

Which collectives are joined stands in the agenda, which all ranks share; here it is only
carried out. To see it happen, stop at `join` (docs/debug-bucketing.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from ...capture.copying import copied
from ...ops.pack import pack as _pack_op  # noqa: F401
from ...types import Collective
from ..agenda import Agenda
from ..order import ordered

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


def bucket(graph: torch.fx.Graph, agenda: Agenda) -> torch.fx.Graph:
    """The graph with one collective for each batch of the agenda."""
    out = copied(graph)
    found: dict[int, dict[Any, torch.fx.Node]] = {}
    for node in out.nodes:
        if "collective" in node.meta:
            key = node.meta["transfer"]
            found.setdefault(agenda.batch_of[key], {})[key] = node
    instead: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, starts in sorted(found.items()):
        instead.update(
            join(
                out,
                agenda,
                index,
                [starts[key] for key in agenda.members[index] if key in starts],
            )
        )
    return ordered(_replaced(out, instead), out.nodes) if instead else out


def _replaced(
    graph: torch.fx.Graph, instead: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Graph:
    """Each wait's value taken from its bucket, all in one go: a program may return thousands of
    them.
    """
    for reader in dict.fromkeys(user for wait in instead for user in wait.users):
        reader.args, reader.kwargs = torch.fx.node.map_arg(
            (reader.args, reader.kwargs), lambda x: instead.get(x, x)
        )
    for wait in instead:
        (start,) = wait.all_input_nodes
        graph.erase_node(wait)
        graph.erase_node(start)
    return graph


def join(
    graph: torch.fx.Graph, agenda: Agenda, index: int, starts: list[torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Add one collective that does the work of several.

    Args:
        graph: added to; its nodes may be out of order afterwards.
        agenda: what ranks agreed on.
        index: of the batch.
        starts: the collectives that it joins.

    Returns:
        For the wait of each, what to read instead; empty if it stays as it is.
    """
    dtype, number = agenda.dtypes.get(index), agenda.bucket_of.get(index)
    for node in starts:
        node.meta["batch"] = index
        node.meta["collective"] = attrs.evolve(
            node.meta["collective"], bucket=number
        )
    own = [node.args[0].meta["val"].dtype for node in starts]
    if len(starts) == 1 and dtype in (None, own[0]):
        return {}
    kind = starts[0].meta["collective"].kind
    before = dict(starts[0].meta)
    with graph.inserting_before(starts[0]):
        pack = _Pack(
            graph,
            {
                "source": None,
                "phase": before["phase"],
                "step": before["step"],
                "origin": f"bucket {number}",
            },
        )
        parts = [
            pack.cast(
                _unviewed(node.args[0]) if kind == "all_reduce" else node.args[0],
                dtype or own[0],
            )
            for node in starts
        ]
        n = (
            starts[0].args[2]
            if kind == "reduce_scatter"
            else starts[0].args[1]
            if kind == "all_gather"
            else 1
        )
        packed = PACK[kind](pack, parts, n)
        start = pack.call(starts[0].target, packed, *starts[0].args[1:])
        wait = pack.call(WAIT, start)
        record = _record(start, kind, before["collective"], number, n)
        start.meta.update(
            collective=record, batch=index, transfer=before["transfer"]
        )
        wait.meta.update(batch=index)
        offset, instead = 0, {}
        for node, part, sent in zip(starts, parts, own, strict=True):
            (old,) = node.users
            size = part.meta["val"].numel() // (
                n if kind == "reduce_scatter" else 1
            )
            cut = UNPACK[kind](pack, wait, offset, size, n)
            shape = list(old.meta["val"].shape)
            cut = pack.cast(
                cut
                if list(cut.meta["val"].shape) == shape
                else pack.call(aten.view.default, cut, shape),
                sent,
            )
            cut.meta.update(
                {k: old.meta[k] for k in ("type", "moved") if k in old.meta}
            )
            instead[old] = cut
            offset += size
    return instead


def _unviewed(x: Any) -> torch.fx.Node:
    """The value in the shape in which it was made: packing does not ask for a shape."""
    while (
        x.target is aten.view.default
        and len(x.args[0].users) == 1
        and x.args[0].meta["val"].is_contiguous()
    ):
        x = x.args[0]
    return x


def _record(
    start: torch.fx.Node, kind: str, first: Collective, number: int | None, n: int
) -> Collective:
    value = start.args[0].meta["val"]
    nbytes = (
        value.numel() * value.element_size() * (n if kind == "all_gather" else 1)
    )
    return attrs.evolve(
        first, nbytes=nbytes, name=f"bucket {number}", source=None, bucket=number
    )


@attrs.frozen(eq=False)
class _Pack:
    """Calls added to a graph, with what they are for."""

    graph: torch.fx.Graph
    about: dict[str, Any]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta.update(self.about, val=target(*fakes, **kwargs))
        return node

    def cast(self, x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        return (
            x
            if x.meta["val"].dtype == dtype
            else self.call(aten._to_copy.default, x, dtype=dtype)
        )


def _pack_flat(pack: _Pack, parts: list[torch.fx.Node], n: int) -> torch.fx.Node:
    return (
        parts[0]
        if len(parts) == 1
        else pack.call(torch.ops.shardfn.pack.default, parts)
    )


def _pack_rows(pack: _Pack, parts: list[torch.fx.Node], n: int) -> torch.fx.Node:
    """What each rank is to receive of every part, rank after rank."""
    if len(parts) == 1:
        return parts[0]
    rows = [
        pack.call(aten.view.default, x, [n, x.meta["val"].numel() // n])
        for x in parts
    ]
    whole = pack.call(aten.cat.default, rows, 1)
    return pack.call(aten.view.default, whole, [whole.meta["val"].numel()])


def _cut_flat(
    pack: _Pack, whole: torch.fx.Node, offset: int, size: int, n: int
) -> torch.fx.Node:
    return (
        whole
        if whole.meta["val"].numel() == size
        else pack.call(aten.slice.Tensor, whole, 0, offset, offset + size)
    )


def _cut_columns(
    pack: _Pack, whole: torch.fx.Node, offset: int, size: int, n: int
) -> torch.fx.Node:
    """A part of what every rank sent, rank after rank."""
    if whole.meta["val"].numel() == n * size:
        return whole
    rows = pack.call(aten.view.default, whole, [n, whole.meta["val"].numel() // n])
    mine = pack.call(aten.slice.Tensor, rows, 1, offset, offset + size)
    return pack.call(
        aten.clone.default, mine, memory_format=torch.contiguous_format
    )


PACK: dict[str, Callable[[_Pack, list[torch.fx.Node], int], torch.fx.Node]] = {
    "all_reduce": _pack_flat,
    "all_gather": _pack_flat,
    "reduce_scatter": _pack_rows,
}
UNPACK: dict[
    str, Callable[[_Pack, torch.fx.Node, int, int, int], torch.fx.Node]
] = {
    "all_reduce": _cut_flat,
    "all_gather": _cut_columns,
    "reduce_scatter": _cut_flat,
}
