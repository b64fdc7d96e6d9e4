"""Where the forward of a distributed step departs from that of one device: the first module that
returns other values, though it reads the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..._tree import leaves
from ...errors import listed
from .causes import Axis, tolerance
from .shards_of_ranks import LocalValue, local_value, reduced

AGREED = "every module returns the same as on one device: the loss formula or the labels differ"
SLACK = 64  # tolerances of a value, which a forward of many layers may be off


@attrs.frozen(eq=False)
class Call:
    """What a module reads and returns.

    Args:
        module: that is called.
        read: its positional tensors.
        returned: the tensors of its result.
    """

    module: nn.Module
    read: tuple[LocalValue, ...]
    returned: tuple[LocalValue, ...]


def call_of(module: nn.Module, args: Any, result: Any) -> Call:
    """Copy what a module has read and returned."""
    return Call(module, _values(args), _values(result))


def _values(tree: Any) -> tuple[LocalValue, ...]:
    return tuple(local_value(x) for x in leaves(tree) if isinstance(x, (torch.Tensor, DTensor)))


def departure(
    alone: dict[str, Call], ranks: Sequence[dict[str, Call]], axes: Sequence[Axis], eps: float
) -> str | None:
    """Name the first module at which the forward of ranks departs.

    Args:
        alone: the calls of one device by path of the module, in the order in which they end.
        ranks: those of each rank.
        axes: the groups of ranks, over which a value may be left to be summed.
        eps: of the narrowest dtype, where losses are computed in 16 bits; else 0.

    Returns:
        A sentence: the module, or AGREED; None where some cannot be compared, and no other departs.
    """
    is_known = bool(alone)
    for path, call in alone.items():
        calls = [each.get(path) for each in ranks]
        if any(each is None for each in calls):
            is_known = False
            continue
        where = f"{path} ({type(call.module).__name__})" if path else type(call.module).__name__
        reads = _departed(call.read, [x.read for x in calls if x is not None], axes, eps)
        if reads:
            return f"the first module whose input differs is {where}, on {listed(reads)}"
        returns = _departed(call.returned, [x.returned for x in calls if x is not None], axes, eps)
        is_known &= returns is not None
        if returns and reads is not None:
            return (
                f"the first module whose output differs is {where}, on {listed(returns)}; its "
                "input equals that of one device"
            )
    return AGREED if is_known else None


def _departed(
    alone: Sequence[LocalValue],
    ranks: Sequence[Sequence[LocalValue]],
    axes: Sequence[Axis],
    eps: float,
) -> tuple[int, ...] | None:
    """List the ranks with other values; None where they cannot be compared."""
    wrong: set[int] = set()
    if any(len(each) != len(alone) for each in ranks):
        return None
    for i, expected in enumerate(alone):
        values = [x for x in reduced([each[i] for each in ranks]) if x is not None]
        found = _others(expected.value, values, axes, eps)
        if found is None:
            return None
        wrong |= found
    return tuple(sorted(wrong))


def _others(
    expected: torch.Tensor, values: Sequence[LocalValue], axes: Sequence[Axis], eps: float
) -> set[int] | None:
    """The ranks whose tensor is no part of the expected one; None where none can be."""
    if not expected.numel() or any(not x.value.numel() for x in values):
        return set()
    close = [_is_part(expected, x, eps) for x in values]
    if any(x is None for x in close):
        return None
    wrong = {rank for rank, is_part in enumerate(close) if not is_part}
    for axis in axes if expected.is_floating_point() else ():
        groups = [[values[r].value for r in group] for group in axis.groups]
        if any(len({x.shape for x in group}) > 1 for group in groups):
            continue
        sums = [LocalValue(torch.stack(group).sum(0)) for group in groups]
        if wrong and all(_is_part(expected, x, eps) for x in sums):
            return set()
    return wrong


def _is_part(expected: torch.Tensor, x: LocalValue, eps: float) -> bool | None:
    """Whether a rank's tensor is a part of the expected one; None if none has its shape."""
    bound = SLACK * max(tolerance(expected.dtype, x.value.dtype), eps)
    bound *= float(expected.abs().max()) if expected.is_floating_point() else 0.0
    elements = x.elements()
    if elements is not None:
        if tuple(expected.shape) != x.shape:
            return None
        parts = iter([expected.reshape(-1)[elements]])
    else:
        parts = _blocks(expected, x.value.shape)
    found = None
    for part in parts:
        found = bool(((part.double() - x.value.double()).abs() <= bound).all())
        if found:
            break
    return found


def _blocks(whole: torch.Tensor, shape: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the parts of a tensor that have a shape: along each dim a chunk, or each n-th slice."""
    if whole.dim() != len(shape):
        return
    for dim, (n, m) in enumerate(zip(whole.shape, shape, strict=True)):
        if n < m:
            return
        if n > m:
            starts = sorted({*range(0, n - m + 1, m), n - m})
            chunks = [whole.narrow(dim, start, m) for start in starts]
            step = -(-n // m)
            slices = [torch.arange(n)[i::step] for i in range(step)]
            chunks += [whole.index_select(dim, i) for i in slices if len(i) == m]
            for chunk in chunks:
                yield from _blocks(chunk, shape)
            return
    yield whole
