"""How placements shard a tensor: local sizes, offsets, strides, and the equality of placements.

Chunks follow torch.chunk (full ones, then one remainder, then empty ones), as DTensor's do. Two
axes on one dim shard in mesh order: the first axis shards the dim, the next one each chunk.

A strided shard views its dim as blocks of equal size and holds a chunk of each block. Axes that
view one dim as different numbers of blocks shard different factors of it, in any order. Blocks
that are the chunks of other axes may be uneven: a rank then holds a chunk of its one block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ..types import Mark, Marks


def split(mark: Mark) -> tuple[int, int] | None:
    """A Shard as (dim, unit), or None for a placement that shards nothing."""
    if isinstance(mark, str):
        return None
    return mark[:2] if isinstance(mark, tuple) else (mark, 1)


def cut_of(mark: Mark) -> tuple[int, int]:
    """(dim, unit) of a Shard placement."""
    found = split(mark)
    assert found is not None, f"{mark} shards nothing"
    return found


def joined(dim: int, unit: int, halo: tuple[int, int] = (0, 0), outer: int = 1) -> Mark:
    """The placement of a dim, a unit, and a halo or a number of blocks."""
    if outer > 1:
        assert not any(halo), "a strided shard has no halo"
        return (dim, unit, outer)
    if any(halo):
        return (dim, unit, *halo)
    return dim if unit == 1 else (dim, unit)


def outer_of(mark: Mark) -> int:
    """The number of equal blocks of the dim, of each of which a rank holds a chunk: 1 for a
    shard that is not strided.
    """
    return mark[2] if isinstance(mark, tuple) and len(mark) == 3 else 1


def is_plain(mark: Mark) -> bool:
    """Whether a placement is not a strided shard."""
    return outer_of(mark) == 1


def halo(mark: Mark) -> tuple[int, int]:
    """The numbers of halo elements from the previous and from the next neighbour."""
    return mark[2:] if isinstance(mark, tuple) and len(mark) == 4 else (0, 0)


def without_halo(mark: Mark) -> Mark:
    """The same sharding without a halo."""
    return joined(*cut_of(mark)) if any(halo(mark)) else mark


def halo_share(shape: Sequence[int], mark: Mark) -> float:
    """The number of halo elements for each element of the dim."""
    width = sum(halo(mark))
    if not width:
        return 0.0
    dim, _ = cut_of(mark)
    return width / max(shape[dim], 1)


def scaled(mark: Mark, unit: int, outer: int = 1) -> Mark:
    """The same placement with its unit and its number of blocks multiplied."""
    cut = split(mark)
    if cut is None:
        return mark
    dim, own_unit = cut
    return joined(dim, own_unit * unit, halo(mark), outer_of(mark) * outer)


def full_chunk(size: int, unit: int, n: int) -> int:
    """The size of a full chunk: ceil(units / n) units."""
    units = size // unit
    return -(-units // n) * unit


def chunk(size: int, unit: int, n: int, coordinate: int) -> tuple[int, int]:
    """(offset, size) of one rank's chunk."""
    full = full_chunk(size, unit, n)
    start = min(coordinate * full, size)
    return start, min(full, size - start)


def grain(
    size: int, dim: int, marks: Sequence[Mark], sizes: Sequence[int], outer: int = 1
) -> tuple[int, bool]:
    """The size of which every chunk of a block of a dim is a multiple, after the axes that view
    the dim as so many blocks have sharded it, and whether all chunks have that size.
    """
    length = -(-size // outer)
    even = size % outer == 0
    for mark, n in zip(marks, sizes, strict=False):
        cut = split(mark)
        if cut is None or cut[0] != dim or outer_of(mark) != outer or n == 1:
            continue
        if even and (length // cut[1]) % n == 0:
            length //= n
        else:
            length = cut[1]
            even = False
    return length, even


def shards(mark: Mark, dim: int) -> bool:
    cut = split(mark)
    return cut is not None and cut[0] == dim


def canonical(
    shape: Sequence[int], marks: Sequence[Mark], sizes: Sequence[int], later: Sequence[int] = ()
) -> Marks | None:
    """The same sharding in the simplest placements, or None if a unit does not fit the chunks
    that it shards.

    A halo must fit into its neighbours' chunks, and no other axis may shard its dim. Axes that
    view a dim as different numbers of blocks must shard different factors of it.

    Args:
        shape: global.
        marks: the placements on the first axes.
        sizes: of these axes.
        later: the sizes of axes whose placements are still open.
    """
    out: list[Mark] = []
    for mark, n in zip(marks, sizes, strict=True):
        simplest = _simplest(shape, out, mark, n, sizes)
        if simplest is None:
            return None
        out.append(simplest)
    strided = {cut_of(m)[0] for m in out if not is_plain(m)}
    is_product = all(_is_product(shape[d], d, out, sizes, later) for d in strided)
    return tuple(out) if is_product else None


def _simplest(
    shape: Sequence[int], out: list[Mark], mark: Mark, n: int, sizes: Sequence[int]
) -> Mark | None:
    """The placement on one more axis, or None if it does not fit those before it."""
    cut = split(mark)
    if cut is None:
        return mark
    if n == 1 and not is_plain(mark):
        return cut[0]
    dim, unit = cut
    outer = outer_of(mark)
    is_uneven = shape[dim] % outer > 0
    if (outer > 1 and shape[dim] == 0) or (is_uneven and unit > 1):
        return None
    length, even = grain(shape[dim], dim, out, sizes, outer)
    if length % unit or max(halo(mark)) > full_chunk(length, unit, n):
        return None
    has_halo = any(any(halo(m)) for m in (*out, mark))
    if has_halo and any(shards(m, dim) for m in out):
        return None
    if even and (length // unit) % n == 0:
        unit = 1
    return joined(dim, unit, halo(mark), outer)


def agree(marks: Sequence[Mark], others: Sequence[Mark], sizes: Sequence[int]) -> bool:
    """Whether placements give each rank the same: on an axis of one rank all do."""
    rows = zip(marks, others, sizes, strict=True)
    return all(n == 1 or mark == other for mark, other, n in rows)


def levels(dim: int, marks: Sequence[Mark]) -> list[int]:
    """The numbers of blocks as which the axes that shard a dim view it, the fewest first."""
    return sorted({outer_of(m) for m in marks if shards(m, dim)})


def _is_product(
    size: int, dim: int, marks: Sequence[Mark], sizes: Sequence[int], later: Sequence[int]
) -> bool:
    """Whether axes with different numbers of blocks shard different factors of a dim: the
    chunks of one consist of blocks of the next. Uneven blocks are the chunks themselves.
    """
    outers = [1, *(outer for outer in levels(dim, marks) if outer > 1)]
    for outer, finer in itertools.pairwise(outers):
        length, _ = grain(size, dim, marks, sizes, outer)
        if size % finer:
            if not _are_chunks(finer, dim, marks, sizes, later):
                return False
        elif finer % outer or length % (size // finer):
            return False
    return True


def _are_chunks(
    blocks: int, dim: int, marks: Sequence[Mark], sizes: Sequence[int], later: Sequence[int]
) -> bool:
    """Whether so many blocks are the chunks of axes that view the dim as fewer ones, or may be
    once later axes shard it too.
    """
    coarser = [
        (mark, n)
        for mark, n in zip(marks, sizes, strict=True)
        if shards(mark, dim) and outer_of(mark) < blocks
    ]
    chunks = math.prod(n for _, n in coarser)
    possible = {chunks}
    for n in later:
        possible |= {n * found for found in possible}
    in_elements = all(cut_of(mark)[1] == 1 for mark, _ in coarser)
    return in_elements and blocks in possible


def fitted(shape: Sequence[int], marks: Sequence[Mark], sizes: Sequence[int]) -> Marks:
    """`canonical` of placements that always fit: in plain chunks, without halos."""
    plain = canonical(shape, marks, sizes)
    assert plain is not None, f"{marks} on {tuple(shape)}"
    return plain


def local_shape(
    shape: Sequence[int], marks: Sequence[Mark], sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[int, ...]:
    """The shape of one rank's local tensor."""
    out = list(shape)
    strided: set[int] = set()
    for mark, n, c in zip(marks, sizes, coordinates, strict=True):
        cut = split(mark)
        if cut is None:
            continue
        dim, unit = cut
        if not is_plain(mark):
            strided.add(dim)
            continue
        _, mine = chunk(out[dim], unit, n, c)
        # an empty chunk has no neighbours
        out[dim] = mine + sum(halo(mark)) if mine else 0
    for dim in strided:
        out[dim] = math.prod(factors(shape[dim], dim, marks, sizes, coordinates))
    return tuple(out)


def factors(
    size: int,
    dim: int,
    marks: Sequence[Mark],
    sizes: Sequence[int],
    coordinates: Sequence[int],
    outers: Sequence[int] = (),
) -> list[int]:
    """The factors of the local size of a dim: the number of blocks that no axis shards, and for
    each number of blocks the local length, in blocks of the next.

    Args:
        size: of the dim.
        dim: the dim.
        marks: the placements of the tensor.
        sizes: of the mesh.
        coordinates: of the rank.
        outers: the numbers of blocks. By default those that the placements have.
    """
    outers = outers or levels(dim, marks) or [1]
    found = [outers[0]]
    length = size
    for i, outer in enumerate(outers):
        if size % outer == 0:
            length = size // outer
        for mark, n, c in zip(marks, sizes, coordinates, strict=True):
            if shards(mark, dim) and outer_of(mark) == outer:
                length = chunk(length, cut_of(mark)[1], n, c)[1]
        finer = outers[i + 1] if i + 1 < len(outers) else size
        # a chunk is one block of uneven ones
        block = length if size % max(finer, 1) else size // max(finer, 1)
        found.append(length // block if block else min(length, 1))
    return found


def stride_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dims of a tensor from the slowest to the fastest in memory. Expanded dims, with
    stride 0, come first.
    """
    dims = range(len(shape))
    slowest_first = lambda d: (stride[d] != 0, -stride[d], d)
    return tuple(sorted(dims, key=slowest_first))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides cover memory without gaps or overlaps."""
    order = stride_order(shape, stride)
    dense = dense_strides(shape, order)
    dims = zip(shape, stride, dense, strict=True)
    return all(n == 1 or s == t for n, s, t in dims)


def can_view(shape: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a tensor of these strides can be viewed as another shape of as many elements:
    none of its dims crosses a gap.
    """
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
    """Dense strides in a given order of dims."""
    out = [1] * len(shape)
    step = 1
    for d in reversed(order):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)
