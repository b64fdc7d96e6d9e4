"""The payload of a collective: the one place where its bytes are counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ..collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    HALO,
    PPERMUTE,
    REDUCE_SCATTER,
    implement,
)
from ..types import Marks, MeshAxes
from . import layout, strided
from .redistribute import Move


@attrs.frozen
class Sender:
    """A rank in one move of a value of a global shape."""

    shape: tuple[int, ...]
    move: Move
    axes: MeshAxes
    coordinates: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of ranks of the axis."""
        return self.axes.sizes[self.move.axis]

    def local(self) -> list[int]:
        """The local shape before the move."""
        return list(self._local_shape(self.move.before))

    def opened(self, marks: Marks) -> strided.Open:
        """How the axis shards its dim, at one of the placements of the move."""
        return strided.opened(self.shape, marks, self.move.axis, self.axes.sizes, self.coordinates)

    def padded(self, cut: strided.Open, chunks: int) -> int:
        """The size of a dim with so many full chunks of the axis, to which shorter ones are
        padded.
        """
        full = layout.full_chunk(cut.size, cut.unit, self.n)
        return cut.outer * full * chunks * cut.inner

    def _local_shape(self, marks: tuple) -> tuple[int, ...]:
        return layout.local_shape(self.shape, marks, self.axes.sizes, self.coordinates)


def nbytes(
    shape: Sequence[int],
    itemsize: int,
    move: Move,
    axes: MeshAxes,
    coordinates: Sequence[int] | None = None,
) -> int:
    """The bytes of the full payload, including padding: of the value reduced, or gathered.

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
    cut = sender.opened(sender.move.before)
    local = sender.local()
    local[cut.dim] = sender.padded(cut, sender.n)
    return local


def _scattered(sender: Sender) -> list[int]:
    cut = sender.opened(sender.move.after)
    local = sender.local()
    local[cut.dim] = sender.padded(cut, sender.n)
    return local


def _exchanged(sender: Sender) -> list[int]:
    src = sender.opened(sender.move.before)
    dst = sender.opened(sender.move.after)
    local = sender.local()
    local[src.dim] = sender.padded(src, 1)
    local[dst.dim] = sender.padded(dst, sender.n)
    return local


def _edges(sender: Sender) -> list[int]:
    mark = sender.move.after[sender.move.axis]
    local = sender.local()
    local[layout.cut_of(mark)[0]] = sum(layout.halo(mark))
    return local


implement(ALL_REDUCE, payload=Sender.local)
implement(PPERMUTE, payload=Sender.local)
implement(ALL_GATHER, payload=_gathered)
implement(REDUCE_SCATTER, payload=_scattered)
implement(ALL_TO_ALL, payload=_exchanged)
implement(HALO, payload=_edges)
