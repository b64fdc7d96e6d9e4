"""torch's caching allocator with expandable segments, as torchtitan runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

MIB = 2**20
SMALLEST, SMALL = 512, MIB  # bytes of a block, and of a block that lies among small ones


@attrs.define(eq=False)
class Block:
    """A part of a segment, between its neighbours."""

    address: int
    size: int
    is_free: bool
    before: Block | None = None
    after: Block | None = None


class Segment:
    """Memory that grows by pages. The smallest free block that is large enough is taken, the first
    of equal ones, and split; the one at the end, which can grow, counts as the largest. If there is
    none, the segment grows at its end. It never shrinks.

    Args:
        page: its bytes.

    Source: torch's c10/cuda/CUDACachingAllocator.cpp.
    """

    def __init__(self, page: int) -> None:
        self.page, self.reserved = page, 0
        self.free: dict[Block, None] = {}
        self.end: Block | None = None

    def allocate(self, size: int) -> Block:
        """Take a block."""
        fitting = [x for x in self.free if x.size >= size]
        order = lambda x: (x is self.end, x.size, x.address)
        block = min(fitting, key=order) if fitting else self._grown(size)
        del self.free[block]
        block.is_free = False
        if block.size > size:
            rest = Block(block.address + size, block.size - size, True, block, block.after)
            self._link(rest, rest.after)
            block.size, block.after = size, rest
            self.free[rest] = None
        return block

    def release(self, block: Block) -> None:
        """Give a block back, and join it with free neighbours."""
        block.is_free = True
        self.free[block] = None
        self._join(block)
        if block.before is not None and block.before.is_free:
            self._join(block.before)

    def _grown(self, size: int) -> Block:
        """Return a free block at the end that is large enough."""
        own = self.end.size if self.end is not None and self.end.is_free else 0
        grown = _rounded(size - own, self.page)
        self.reserved += grown
        block = Block(self.reserved - grown, grown, False, self.end)
        if self.end is not None:
            self.end.after = block
        self.end = block
        self.release(block)
        return block if block in self.free else self.end

    def _join(self, block: Block) -> None:
        """Join a free block with the one after it, if that is free."""
        after = block.after
        if after is not None and after.is_free:
            del self.free[after]
            block.size += after.size
            block.after = after.after
            self._link(block, block.after)

    def _link(self, block: Block, after: Block | None) -> None:
        """Let a block be the one before another, or the last."""
        if after is None:
            self.end = block
        else:
            after.before = block


class Allocator:
    """The segments of the streams of a device, and the tensors that lie in them."""

    def __init__(self) -> None:
        self.segments: dict[tuple[str, bool], Segment] = {}
        self.blocks: dict[tuple[Any, ...], tuple[Segment, Block]] = {}

    def allocate(self, key: tuple[Any, ...], size: int, stream: str = "") -> None:
        """Allocate a tensor."""
        if size:
            size = _rounded(size, SMALLEST)
            is_small = size <= SMALL
            own = stream, is_small
            if own not in self.segments:
                self.segments[own] = Segment(2 * MIB if is_small else 20 * MIB)
            self.blocks[key] = self.segments[own], self.segments[own].allocate(size)

    def allocate_all(self, name: str, sizes: Mapping[Any, int], stream: str = "") -> None:
        """Allocate a tensor for each key."""
        for key, size in sizes.items():
            self.allocate((name, key), size, stream)

    def release(self, key: tuple[Any, ...]) -> None:
        """Release a tensor, if it has bytes."""
        if key in self.blocks:
            segment, block = self.blocks.pop(key)
            segment.release(block)

    @property
    def reserved(self) -> int:
        """Return the bytes of all segments."""
        return sum(x.reserved for x in self.segments.values())


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
