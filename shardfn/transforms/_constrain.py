"""constrain: pin a value's placement inside a function."""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat, _tree
from ..capture import named, prims
from ..errors import PlacementError, problem
from ..placements import P


def constrain(x: Any, placements: Any) -> Any:
    """Pin the placement of a value inside a sharded function; identity in value.

    Args:
        x: a tensor, or a pytree of tensors.
        placements: a prefix tree of `P` leaves; None leaves a value free.

    Returns:
        x. Its gradient is pinned likewise.

    Raises:
        PlacementError: more dims named than the tensor has; a leaf that is not a `P` or None.

    Source: jax.lax.with_sharding_constraint.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.constrain(torch.ones(2), P("dp"))
        tensor([1., 1.])
    """
    if not _compat.is_tracing():
        return x
    return _pinned(x, placements)


def _pinned(x: Any, spec: Any) -> Any:
    if spec is None:
        return x
    if isinstance(spec, P):
        return _tree.tree_map(lambda leaf: _pin(leaf, spec), x)
    if isinstance(spec, dict):
        return {key: _pinned(x[key], spec[key]) for key in x}
    if isinstance(spec, (list, tuple)):
        return type(x)([_pinned(a, s) for a, s in zip(x, spec, strict=True)])
    raise PlacementError(problem("constrain", f"{spec!r}", needed="a P, or a tree of them", fix="P('axis', None)"))


def _pin(x: Any, spec: P) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    named.refuse_manual(spec.parts)
    return prims.redistribute(x, text_of(spec, x.dim()))


def text_of(spec: P, rank: int) -> str:
    """A spec as the prim's text: axis names for each dim."""
    parts = [*spec.parts, *[None] * (rank - len(spec.parts))]
    return ";".join("" if p is None else p if isinstance(p, str) else ",".join(p) for p in parts) or ";"

