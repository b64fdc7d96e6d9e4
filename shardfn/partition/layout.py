"""How placements shard a tensor: local sizes, offsets, strides, and the equality of placements.

Chunks follow torch.chunk (full ones, then one remainder, then empty ones), as DTensor's do. Two
axes on one dim shard in mesh order: the first axis shards the dim, the next one each chunk.
"""

from __future__ import annotations

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


def joined(dim: int, unit: int, halo: tuple[int, int] = (0, 0)) -> Mark:
    """The placement of a dim, a unit and a halo."""
    if any(halo):
        return (dim, unit, *halo)
    return dim if unit == 1 else (dim, unit)


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


def scaled(mark: Mark, unit: int) -> Mark:
    """The same placement with its unit multiplied."""
    cut = split(mark)
    if cut is None:
        return mark
    dim, own_unit = cut
    return joined(dim, own_unit * unit, halo(mark))


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
    size: int, dim: int, marks: Sequence[Mark], sizes: Sequence[int]
) -> tuple[int, bool]:
    """The size of which every chunk of a dim is a multiple, after these axes have sharded it,
    and whether all chunks have that size.
    """
    length = size
    even = True
    for mark, n in zip(marks, sizes, strict=False):
        cut = split(mark)
        if cut is None or cut[0] != dim:
            continue
        if even and (length // cut[1]) % n == 0:
            length //= n
        else:
            length = cut[1]
            even = False
    return length, even


def _shards(mark: Mark, dim: int) -> bool:
    cut = split(mark)
    return cut is not None and cut[0] == dim


def canonical(
    shape: Sequence[int], marks: Sequence[Mark], sizes: Sequence[int]
) -> Marks | None:
    """The same sharding in the simplest placements, or None if a unit does not fit the chunks
    that it shards.

    A halo must fit into its neighbours' chunks, and no other axis may shard its dim.
    """
    out: list[Mark] = []
    for mark, n in zip(marks, sizes, strict=True):
        cut = split(mark)
        if cut is not None:
            dim, unit = cut
            length, even = grain(shape[dim], dim, out, sizes)
            if length % unit or max(halo(mark)) > full_chunk(length, unit, n):
                return None
            has_halo = any(any(halo(m)) for m in (*out, mark))
            if has_halo and any(_shards(m, dim) for m in out):
                return None
            if even and (length // unit) % n == 0:
                unit = 1
            mark = joined(dim, unit, halo(mark))
        out.append(mark)
    return tuple(out)


def fitted(
    shape: Sequence[int], marks: Sequence[Mark], sizes: Sequence[int]
) -> Marks:
    """`canonical` of placements that always fit: in plain chunks, without halos."""
    plain = canonical(shape, marks, sizes)
    assert plain is not None, f"{marks} on {tuple(shape)}"
    return plain


def local_shape(
    shape: Sequence[int],
    marks: Sequence[Mark],
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> tuple[int, ...]:
    """The shape of one rank's local tensor."""
    out = list(shape)
    for mark, n, c in zip(marks, sizes, coordinates, strict=True):
        cut = split(mark)
        if cut is not None:
            dim, unit = cut
            _, mine = chunk(out[dim], unit, n, c)
            # an empty chunk has no neighbours
            out[dim] = mine + sum(halo(mark)) if mine else 0
    return tuple(out)


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


def can_view(
    shape: Sequence[int], stride: Sequence[int], new: Sequence[int]
) -> bool:
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
