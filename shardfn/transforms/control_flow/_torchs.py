"""torch's own loops and branches inside a captured function: read as ours, which differentiate,
batch, draw random numbers and carry shards.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat, _tree
from ...capture.rewrites import python_substitutes
from ._cond_while import cond, while_loop
from ._scan import map, scan


@_compat.read_by_dynamo
def torchs_cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    """torch.cond, by `cond`."""
    return cond(pred, true_fn, false_fn, *operands)


@_compat.read_by_dynamo
def torchs_while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Sequence[Any]
) -> Any:
    """torch's while_loop, by `while_loop`. Its functions take the carries one by one."""
    return while_loop(
        lambda carry: cond_fn(*carry), lambda carry: tuple(body_fn(*carry)), tuple(carried_inputs)
    )


@_compat.read_by_dynamo
def torchs_map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    """torch's map, by `map`."""
    return map(lambda x: f(x, *args), xs)


@_compat.read_by_dynamo
def torchs_scan(
    combine_fn: Callable[..., Any],
    init: Any,
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
    length: int | None = None,
) -> Any:
    """torch's scan, by `scan`. It has a length from torch 2.15 on."""
    columns = _tree.tensors(xs)
    if not columns:
        return (init, []) if length is None else scan(combine_fn, init, xs, length=length)
    dim %= columns[0].dim()
    if dim:
        xs = _moved(xs, dim, 0)
    carry, ys = scan(combine_fn, init, xs, length=length, reverse=reverse)
    return carry, _moved(ys, 0, dim) if dim else ys


def _moved(tree: Any, source: int, to: int) -> Any:
    """A tree with a dim of its tensors moved. A tensor without the second dim stays as it is."""
    moved = [torch.movedim(x, source, to) if to < x.dim() else x for x in _tree.tensors(tree)]
    return _tree.with_tensors(tree, moved)


python_substitutes.TABLE.update(
    {
        torch.cond: torchs_cond,
        _compat.torch_while_loop: torchs_while_loop,
        _compat.torch_map: torchs_map,
        _compat.torch_scan: torchs_scan,
    }
)
