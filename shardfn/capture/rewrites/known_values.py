"""Ops whose result size depends on values, where the values are known during the capture: a mask
of constants selects the elements at constant indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _compat

aten = torch.ops.aten


def _of_known(op: Any) -> Callable[..., Any]:
    """The results of an op of known values, as constants."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        values = _compat.known_result(op, args, kwargs)
        if values is None:
            return NotImplemented
        constants = [aten.lift_fresh_copy.default(x) for x in values]
        return tuple(constants) if len(constants) > 1 else constants[0]

    return decomposed


def _by_numbers(op: Any) -> Callable[..., Any]:
    """An op with an index, whose known masks become the indices of their true elements."""

    def decomposed(x: torch.Tensor, indices: list[Any], *args: Any, **kwargs: Any) -> Any:
        numbers = _numbers(indices)
        return NotImplemented if numbers is None else op(x, numbers, *args, **kwargs)

    return decomposed


def _numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    """Indices without known masks; None if there are no such masks."""
    numbers: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and index.dim()
        values = _compat.known_result(aten.nonzero.default, (index,), {}) if is_mask else None
        if values is None:
            numbers.append(index)
        else:
            places = values[0].unbind(1)
            numbers.extend(aten.lift_fresh_copy.default(n.contiguous()) for n in places)
    is_same = all(a is b for a, b in zip(numbers, indices, strict=False))
    return None if is_same and len(numbers) == len(indices) else numbers


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    numbers = _numbers([mask.expand(shape)])
    if numbers is None:
        return NotImplemented
    return aten.index.Tensor(x.expand(shape), numbers) if shape else x.reshape(1)[numbers[0]]


SIZED = (
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
)
INDEXED = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
)
TABLE: dict[Any, Callable[..., Any]] = {
    **{op: _of_known(op) for op in SIZED},
    **{op: _by_numbers(op) for op in INDEXED},
    aten.masked_select.default: _masked_select,
}
