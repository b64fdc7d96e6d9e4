"""The dims over which a loop runs: dims next to each other are one where all that the loop reads
and writes lies so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import attrs
import torch
from torch.fx import Node

from ...ops.nodes import args_of
from ...ops.random_bits import strides_of
from . import op_kinds

# strides of a value between whose elements the next dim cannot be merged with the one before
Breaks = frozenset[int]
INDEXED = {"_unsafe_index", "embedding", "index"}
PLACES = {"arange", "iota"}  # ops whose elements differ, though they read none


@attrs.frozen
class Loop:
    """The dims of a loop.

    Args:
        shape: of the value over which it runs.
        kept: dims that are left of it, merged.
        reduced: dims over which it adds, merged.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]
    reduced: tuple[int, ...] = ()


def plain(results: int, elements: int) -> Loop:
    """A loop over elements, which it adds up to fewer results."""
    every = elements // max(results, 1)
    reduced = (every,) if every != 1 else ()
    return Loop((elements,), (results,) if results != 1 else (), reduced)


def loop_over(x: torch.Tensor, breaks: Breaks, dims: Collection[int] = ()) -> Loop:
    """The loop over the elements of a value, in the order of its memory.

    Args:
        x: a value.
        breaks: strides at which dims are not merged.
        dims: over which the loop adds.
    """
    order = _order(x)
    strides = _dense(x)
    kept: list[int] = []
    reduced: list[int] = []
    last = None
    for d in order:
        into = reduced if d in dims else kept
        is_next = last is not None and (last in dims) == (d in dims) and strides[last] not in breaks
        if is_next:
            into[-1] *= x.shape[d]
        else:
            into.append(x.shape[d])
        last = d
    return Loop(tuple(x.shape), tuple(kept), tuple(reduced))


def breaks_of(node: Node, out: torch.Tensor, inner: Breaks = frozenset()) -> Breaks:
    """The strides of a result at which a loop cannot merge dims, as it reads a value.

    Args:
        node: that is read.
        out: the result.
        inner: such strides of the value, where that is computed in the loop.
    """
    strides = _dense(out)
    read = _broadcast(node.meta["val"], out)
    found = set()
    for d, e in itertools.pairwise(_order(out)):
        is_merged = read is not None and read[d] == read[e] * out.shape[e]
        if not is_merged or (read is not None and read[d] in inner):
            found.add(strides[d])
    return frozenset(found)


def moved_breaks(node: Node | None, out: torch.Tensor) -> Breaks:
    """The strides of a result at which a loop cannot merge dims, as an op reads elements at other
    places: around the dims of indices, else all.
    """
    strides = _dense(out)
    pairs = itertools.pairwise(_order(out))
    own = "" if node is None else op_kinds.name(node)
    if node is None or own not in INDEXED:
        return frozenset(strides[d] for d, _ in pairs)
    given = args_of(node)[1]
    indices = list(given) if isinstance(given, (list, tuple)) else [given]
    first = next((k for k, x in enumerate(indices) if x is not None), 0)
    count = max((x.meta["val"].ndim for x in indices if x is not None), default=0)
    edges = {first, first + count}
    return frozenset(strides[d] for d, e in pairs if edges & set(range(d + 1, e + 1)))


def written(x: torch.Tensor, joined: torch.Tensor) -> Breaks:
    """The strides of a part at which a loop cannot merge dims, as it writes it into a joined
    value.
    """
    if x.ndim != joined.ndim:
        return frozenset()
    strides, outer = _dense(x), _dense(joined)
    pairs = itertools.pairwise(_order(x))
    return frozenset(strides[d] for d, e in pairs if outer[d] != outer[e] * x.shape[e])


def looped(node: Node) -> torch.Tensor | None:
    """The value over whose elements the loop of an op runs."""
    is_sum = op_kinds.name(node) in op_kinds.REDUCTIONS
    value = (node.all_input_nodes[0] if is_sum and node.all_input_nodes else node).meta["val"]
    if isinstance(value, (tuple, list)):
        value = next((x for x in value if isinstance(x, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def of_places(node: Node) -> Breaks | None:
    """The breaks of an op that reads no elements; None if all its elements are alike."""
    is_other = op_kinds.name(node) in PLACES or op_kinds.is_random(node)
    return frozenset() if is_other else None


def fits(a: Loop, b: Loop) -> bool:
    """Whether the second loop may follow the first inside of one loop: both are alike, or the
    first one adds nothing and runs over all that the other one does.
    """
    if a.kept == b.kept and a.reduced == b.reduced:
        return True
    return not a.reduced and a.kept == b.kept + b.reduced


def is_reshaped(a: Loop, b: Loop) -> bool:
    """Whether two loops without sums, of which one has a single dim, run over one shape."""
    is_plain = not (a.reduced or b.reduced)
    is_single = len(a.kept) == 1 or len(b.kept) == 1
    is_equal = math.prod(a.kept) == math.prod(b.kept) and a.shape == b.shape
    return is_plain and is_single and is_equal


def _order(x: torch.Tensor) -> list[int]:
    """The dims of more than one element, in the order of memory."""
    strides = _dense(x)
    long = [d for d, size in enumerate(x.shape) if size != 1]
    return sorted(long, key=lambda d: -strides[d])


def _dense(x: torch.Tensor) -> Sequence[int]:
    """The strides of a value, without gaps."""
    strides = x.stride()
    pairs = sorted((n, size) for n, size in zip(strides, x.shape, strict=True) if size != 1)
    step = 1
    for stride, size in pairs:
        if stride != step:
            return strides_of(x.shape)
        step *= size
    return strides


def _broadcast(x: torch.Tensor, out: torch.Tensor) -> list[int] | None:
    """The strides with which a value is read at the places of a result."""
    missing = out.ndim - x.ndim
    if missing < 0:
        return None
    shape = [1] * missing + list(x.shape)
    strides = [0] * missing + list(x.stride())
    pairs = list(zip(shape, out.shape, strict=True))
    if any(a not in (1, b) for a, b in pairs):
        return None
    return [0 if a == 1 else n for n, (a, _) in zip(strides, pairs, strict=True)]
