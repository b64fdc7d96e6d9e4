"""How placements shard a tensor: local sizes, offsets, strides, and the equality of placements.

Chunks follow torch.chunk (full ones, then one remainder, then empty ones), as DTensor's do. Two
axes on one dim shard in mesh order: the first axis shards the dim, the next one each chunk.

A strided shard views its dim as blocks of equal size and holds a chunk of each block. Axes that
view one dim as different numbers of blocks shard different factors of it, in any order. Blocks
that are the chunks of other axes may be uneven: a rank then holds a chunk of its one block.

A zigzag is a strided shard of an even number of blocks, in every second of which the ranks are in
reverse order. Its number of blocks is written as a negative one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ..types import AxisPlacement, MeshPlacements, stage_of


def split(placement: AxisPlacement) -> tuple[int, int] | None:
    """Return (dim, unit) of a Shard; None for a placement that shards nothing."""
    if isinstance(placement, str):
        return None
    return placement[:2] if isinstance(placement, tuple) else (placement, 1)


def dim_and_unit(placement: AxisPlacement) -> tuple[int, int]:
    """Return (dim, unit) of a placement that must be a Shard."""
    found = split(placement)
    assert found is not None, f"{placement} shards nothing"
    return found


def joined(dim: int, unit: int, halo: tuple[int, int] = (0, 0), outer: int = 1) -> AxisPlacement:
    """Make a Shard placement from a dim, a unit, and a halo or a number of blocks, negative for a
    zigzag.
    """
    if outer != 1:
        assert not any(halo), "a strided shard has no halo"
        return (dim, unit, outer)
    if any(halo):
        return (dim, unit, *halo)
    return dim if unit == 1 else (dim, unit)


def blocks(placement: AxisPlacement) -> int:
    """Return the blocks of a strided shard, as `joined` takes them; 1 for a plain shard."""
    return placement[2] if isinstance(placement, tuple) and len(placement) == 3 else 1


def block_count(placement: AxisPlacement) -> int:
    """Return the number of blocks of a strided shard; 1 for a plain shard."""
    return abs(blocks(placement))


def is_zigzag(placement: AxisPlacement) -> bool:
    """Return whether the ranks are in reverse order in every second block."""
    return blocks(placement) < 0


def is_plain(placement: AxisPlacement) -> bool:
    """Return whether a placement is not a strided shard."""
    return block_count(placement) == 1


def halo(placement: AxisPlacement) -> tuple[int, int]:
    """Return the numbers of halo elements from the previous and the next neighbour."""
    return placement[2:] if isinstance(placement, tuple) and len(placement) == 4 else (0, 0)


def without_halo(placement: AxisPlacement) -> AxisPlacement:
    """Drop the halo of a placement."""
    return joined(*dim_and_unit(placement)) if any(halo(placement)) else placement


def halo_share(shape: Sequence[int], placement: AxisPlacement) -> float:
    """Return the halo elements per element of the dim."""
    width = sum(halo(placement))
    if not width:
        return 0.0
    dim, _ = dim_and_unit(placement)
    return width / max(shape[dim], 1)


def scaled(placement: AxisPlacement, unit: int, outer: int = 1) -> AxisPlacement:
    """Multiply the unit and the number of blocks of a placement."""
    cut = split(placement)
    if cut is None:
        return placement
    dim, own_unit = cut
    return joined(dim, own_unit * unit, halo(placement), blocks(placement) * outer)


def full_chunk(size: int, unit: int, n: int) -> int:
    """Return the size of a full chunk: ceil(units / n) units."""
    units = size // unit
    return -(-units // n) * unit


def chunk(size: int, unit: int, n: int, coordinate: int) -> tuple[int, int]:
    """Return (offset, size) of one rank's chunk of a dim."""
    full = full_chunk(size, unit, n)
    start = min(coordinate * full, size)
    return start, min(full, size - start)


def grain(
    size: int, dim: int, placements: Sequence[AxisPlacement], sizes: Sequence[int], outer: int = 1
) -> tuple[int, bool]:
    """Return a size that divides every chunk of a dim's block under some axes, and whether all
    chunks are equal.
    """
    length = -(-size // outer)
    even = size % outer == 0
    for placement, n in zip(placements, sizes, strict=False):
        cut = split(placement)
        if cut is None or cut[0] != dim or block_count(placement) != outer or n == 1:
            continue
        if even and (length // cut[1]) % n == 0:
            length //= n
        else:
            length = cut[1]
            even = False
    return length, even


def shards(placement: AxisPlacement, dim: int) -> bool:
    """Return whether a placement shards a dim."""
    cut = split(placement)
    return cut is not None and cut[0] == dim


def canonical(
    shape: Sequence[int],
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    later: Sequence[int] = (),
) -> MeshPlacements | None:
    """Simplify placements to equal ones with the smallest units; None if they do not fit the
    shape.

    A halo must fit into its neighbours' chunks, and no other axis may shard its dim. Axes that
    view a dim as different numbers of blocks must shard different factors of it.

    Args:
        shape: global.
        placements: the placements on the first axes.
        sizes: of these axes.
        later: the sizes of axes whose placements are still open.
    """
    out: list[AxisPlacement] = []
    for placement, n in zip(placements, sizes, strict=True):
        simplest = _simplest(shape, out, placement, n, sizes)
        if simplest is None:
            return None
        out.append(simplest)
    strided = {dim_and_unit(m)[0] for m in out if not is_plain(m)}
    is_product = all(_is_product(shape[d], d, out, sizes, later) for d in strided)
    return tuple(out) if is_product else None


def _simplest(
    shape: Sequence[int],
    out: list[AxisPlacement],
    placement: AxisPlacement,
    n: int,
    sizes: Sequence[int],
) -> AxisPlacement | None:
    """Simplify the placement on one more axis; None if it does not fit those before it."""
    cut = split(placement)
    if cut is None:
        return placement
    if n == 1 and not is_plain(placement):
        return cut[0]
    dim, unit = cut
    outer = block_count(placement)
    is_uneven = shape[dim] % outer > 0
    if (outer > 1 and shape[dim] == 0) or (is_uneven and unit > 1):
        return None
    same = [m for m in out if shards(m, dim) and block_count(m) == outer]
    if any(map(is_zigzag, [*same, placement])) and (same or shape[dim] % (outer * n)):
        return None
    length, even = grain(shape[dim], dim, out, sizes, outer)
    if length % unit or max(halo(placement)) > full_chunk(length, unit, n):
        return None
    has_halo = any(any(halo(m)) for m in (*out, placement))
    if has_halo and any(shards(m, dim) for m in out):
        return None
    if even and (length // unit) % n == 0:
        unit = 1
    elif is_zigzag(placement):
        return None
    return joined(dim, unit, halo(placement), blocks(placement))


def agree(
    placements: Sequence[AxisPlacement], others: Sequence[AxisPlacement], sizes: Sequence[int]
) -> bool:
    """Return whether two placements give each rank the same; axes of one rank do not count."""
    rows = zip(placements, others, sizes, strict=True)
    return all(n == 1 or placement == other for placement, other, n in rows)


def levels(dim: int, placements: Sequence[AxisPlacement]) -> list[int]:
    """List the numbers of blocks by which axes shard a dim, the fewest first."""
    return sorted({block_count(m) for m in placements if shards(m, dim)})


def _is_product(
    size: int,
    dim: int,
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    later: Sequence[int],
) -> bool:
    """Return whether axes with different numbers of blocks shard different factors of a dim."""
    outers = [1, *(outer for outer in levels(dim, placements) if outer > 1)]
    turning = {block_count(m) for m in placements if shards(m, dim) and is_zigzag(m)}
    for outer, finer in itertools.pairwise(outers):
        length, _ = grain(size, dim, placements, sizes, outer)
        pair = 2 if finer in turning else 1  # of blocks, in which a zigzag goes there and back
        if size % finer:
            if not _are_chunks(finer, dim, placements, sizes, later):
                return False
        elif finer % (outer * pair) or length % (size // finer * pair):
            return False
    return True


def _are_chunks(
    blocks: int,
    dim: int,
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    later: Sequence[int],
) -> bool:
    """Return whether so many uneven blocks are the chunks of other axes, or may become so."""
    coarser = [
        (placement, n)
        for placement, n in zip(placements, sizes, strict=True)
        if shards(placement, dim) and block_count(placement) < blocks
    ]
    chunks = math.prod(n for _, n in coarser)
    possible = {chunks}
    for n in later:
        possible |= {n * found for found in possible}
    in_elements = all(dim_and_unit(placement)[1] == 1 for placement, _ in coarser)
    return in_elements and blocks in possible


def fitted(
    shape: Sequence[int], placements: Sequence[AxisPlacement], sizes: Sequence[int]
) -> MeshPlacements:
    """Simplify placements that always fit: plain chunks without halos."""
    plain = canonical(shape, placements, sizes)
    assert plain is not None, f"{placements} on {tuple(shape)}"
    return plain


ELSEWHERE = (0,)  # the shape of the local tensor of a rank whose stage does not have the value


def is_here(placements: Sequence[AxisPlacement], coordinates: Sequence[int]) -> bool:
    """Return whether a rank has a shard of a value: none where it is on another stage."""
    stages = ((stage_of(m), c) for m, c in zip(placements, coordinates, strict=True))
    return all(stage is None or stage.coordinate == c for stage, c in stages)


def local_shape(
    shape: Sequence[int],
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> tuple[int, ...]:
    """Return the shape of one rank's local tensor: (0,) where another stage has the value."""
    if not is_here(placements, coordinates):
        return ELSEWHERE
    out = list(shape)
    strided: set[int] = set()
    for placement, n, c in zip(placements, sizes, coordinates, strict=True):
        cut = split(placement)
        if cut is None:
            continue
        dim, unit = cut
        if not is_plain(placement):
            strided.add(dim)
            continue
        _, mine = chunk(out[dim], unit, n, c)
        # an empty chunk has no neighbours
        out[dim] = mine + sum(halo(placement)) if mine else 0
    for dim in strided:
        out[dim] = math.prod(factors(shape[dim], dim, placements, sizes, coordinates))
    return tuple(out)


def factors(
    size: int,
    dim: int,
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    coordinates: Sequence[int],
    outers: Sequence[int] = (),
) -> list[int]:
    """Factor the local size of a dim that strided shards view as blocks.

    Args:
        size: of the dim.
        dim: the dim.
        placements: the placements of the tensor.
        sizes: of the mesh.
        coordinates: of the rank.
        outers: the numbers of blocks. By default those that the placements have.
    """
    outers = outers or levels(dim, placements) or [1]
    found = [outers[0]]
    length = size
    for i, outer in enumerate(outers):
        if size % outer == 0:
            length = size // outer
        for placement, n, c in zip(placements, sizes, coordinates, strict=True):
            if shards(placement, dim) and block_count(placement) == outer:
                length = chunk(length, dim_and_unit(placement)[1], n, c)[1]
        finer = outers[i + 1] if i + 1 < len(outers) else size
        # a chunk is one block of uneven ones
        block = length if size % max(finer, 1) else size // max(finer, 1)
        found.append(length // block if block else min(length, 1))
    return found


def stride_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """List the dims of a tensor from the slowest to the fastest in memory."""
    dims = range(len(shape))
    slowest_first = lambda d: (stride[d] != 0, -stride[d], d)
    return tuple(sorted(dims, key=slowest_first))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether strides cover memory without gaps or overlaps."""
    order = stride_order(shape, stride)
    dense = dense_strides(shape, order)
    dims = zip(shape, stride, dense, strict=True)
    return all(n == 1 or s == t for n, s, t in dims)


def can_view(shape: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether a strided tensor can be viewed as another shape without a copy."""
    if 0 in shape:
        return True
    runs: list[int] = []  # the sizes of the contiguous runs, the outermost first
    step = None
    dims = [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
    for n, s in reversed(dims):
        if s == step:
            runs[0] *= n
        else:
            runs.insert(0, n)
        step = n * s
    sizes = [n for n in new if n != 1]
    for n in reversed(sizes):
        run = runs.pop()
        if run % n:
            return False
        if run > n:
            runs.append(run // n)
    return True


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for a given order of dims in memory."""
    out = [1] * len(shape)
    step = 1
    for d in reversed(order):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)
