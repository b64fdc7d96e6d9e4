"""constrain: pin a value's placement inside a function."""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat, _tree
from ..capture import named, prims
from ..errors import PlacementError, TreeError, problem
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
        TreeError: placements that are not a prefix of x.

    Source: jax.lax.with_sharding_constraint.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.constrain(torch.ones(2), P("dp"))
        tensor([1., 1.])
    """
    specs, wrong = _tree.pair(placements, x, ("placements", "the values"), "x", is_constraint)
    check_placements("constrain", tuple(wrong), tuple([_unknown(spec) for spec in specs]))
    if not _compat.is_tracing():
        return x
    leaves = _tree.quick_leaves((x,))
    pinned = [leaf if spec is None else _pin(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
    return _tree.refill((x,), iter(pinned))[0]


def is_constraint(x: Any) -> bool:
    """Whether x is a leaf of a tree of constraints."""
    return x is None or isinstance(x, P)


def _unknown(spec: Any) -> str | None:
    return None if is_constraint(spec) else str(spec)


@_compat.constant_in_graph
def check_placements(where: str, wrong: tuple[str, ...], unknown: tuple[str | None, ...]) -> None:
    """Check that placements fit a tree of values.

    Raises:
        TreeError: they are not a prefix of it.
        PlacementError: a leaf that is not a `P` or None.
    """
    strangers = [spec for spec in unknown if spec is not None]
    fix = "P('axis', None)"
    if strangers:
        text = problem(where, *strangers, needed="a P, or a tree of them", fix=fix)
        raise PlacementError(text, fix=fix)
    if wrong:
        fix = "a tree of placements that ends early is a prefix: one P for a whole subtree"
        raise TreeError(problem(where, "placements is not a prefix of the values", *wrong, fix=fix), fix=fix)


def _pin(x: Any, spec: P) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    named.refuse_manual(spec.parts)
    return prims.redistribute(x, text_of(spec, x.dim()))


def text_of(spec: P, rank: int) -> str:
    """A spec as the prim's text: axis names for each dim."""
    parts = [*spec.parts, *[None] * (rank - len(spec.parts))]
    return ";".join("" if p is None else p if isinstance(p, str) else ",".join(p) for p in parts) or ";"

