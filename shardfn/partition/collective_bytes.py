"""The payload of a collective: the one place where its bytes are counted; and the collectives of a
local graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
from torch.fx import Graph

from ..collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    HALO,
    PPERMUTE,
    RAGGED_ALL_TO_ALL,
    REDUCE_SCATTER,
    implement,
)
from ..ops.loops import Loop
from ..types import Collective, MeshAxes, MeshPlacements
from . import layout, strided_shards
from .redistribute import Move


@attrs.frozen
class Sender:
    """One rank that takes part in one move of a global value."""

    shape: tuple[int, ...]
    move: Move
    axes: MeshAxes
    coordinates: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of ranks of the axis."""
        return self.axes.sizes[self.move.axis]

    def local(self) -> list[int]:
        """Return the rank's local shape before the move."""
        return list(self._local_shape(self.move.before))

    def opened(self, placements: MeshPlacements) -> strided_shards.Open:
        """Describe how the axis shards its dim before or after the move."""
        return strided_shards.opened(
            self.shape, placements, self.move.axis, self.axes.sizes, self.coordinates
        )

    def padded(self, cut: strided_shards.Open, chunks: int) -> int:
        """Return the size of a dim whose chunks are padded to full ones."""
        full = layout.full_chunk(cut.size, cut.unit, self.n)
        return cut.outer * full * chunks * cut.inner

    def _local_shape(self, placements: tuple) -> tuple[int, ...]:
        """Return the rank's local shape at some placements."""
        return layout.local_shape(self.shape, placements, self.axes.sizes, self.coordinates)


def nbytes(
    shape: Sequence[int],
    itemsize: int,
    move: Move,
    axes: MeshAxes,
    coordinates: Sequence[int] | None = None,
) -> int:
    """Return the bytes of a collective's full payload, padding included.

    Args:
        shape: global.
        itemsize: bytes of an element.
        move: that the collective carries out.
        axes: of the mesh.
        coordinates: of the rank. By default, a rank with full shards.
    """
    at = (0,) * len(axes.sizes) if coordinates is None else tuple(coordinates)
    payload = move.collective.payload
    assert payload is not None, f"{move.kind} has no payload"
    return math.prod(payload(Sender(tuple(shape), move, axes, at))) * itemsize


def _gathered(sender: Sender) -> list[int]:
    """Return the payload shape of an all-gather: the gathered value, padded."""
    cut = sender.opened(sender.move.before)
    local = sender.local()
    local[cut.dim] = sender.padded(cut, sender.n)
    return local


def _scattered(sender: Sender) -> list[int]:
    """Return the payload shape of a reduce-scatter: the value before it, padded."""
    cut = sender.opened(sender.move.after)
    local = sender.local()
    local[cut.dim] = sender.padded(cut, sender.n)
    return local


def _exchanged(sender: Sender) -> list[int]:
    """Return the payload shape of an all-to-all, padded in both dims."""
    src = sender.opened(sender.move.before)
    dst = sender.opened(sender.move.after)
    local = sender.local()
    local[src.dim] = sender.padded(src, 1)
    local[dst.dim] = sender.padded(dst, sender.n)
    return local


def _edges(sender: Sender) -> list[int]:
    """Return the payload shape of a halo exchange: the edge rows."""
    placement = sender.move.after[sender.move.axis]
    local = sender.local()
    local[layout.dim_and_unit(placement)[0]] = sum(layout.halo(placement))
    return local


def _rows(sender: Sender) -> list[int]:
    """Return the payload shape of a ragged all-to-all: the most that ranks send on average, which
    is at most what each has, and what each takes.
    """
    assert sender.move.rows is not None
    dim, rows = sender.move.rows
    local = sender.local()
    local[dim] = min(local[dim], rows)
    return local


implement(ALL_REDUCE, payload=Sender.local)
implement(PPERMUTE, payload=Sender.local)
implement(RAGGED_ALL_TO_ALL, payload=_rows)
implement(ALL_GATHER, payload=_gathered)
implement(REDUCE_SCATTER, payload=_scattered)
implement(ALL_TO_ALL, payload=_exchanged)
implement(HALO, payload=_edges)


def collectives_in(graph: Graph) -> Iterator[Collective]:
    """Yield the record of every collective and message, in the order in which they start."""
    for node in graph.nodes:
        if "collective" in node.meta:
            yield node.meta["collective"]
        if isinstance(node.target, Loop):
            for inner in node.target.runs_and_messages():
                if isinstance(inner, Graph):
                    yield from collectives_in(inner)
                else:
                    yield inner
