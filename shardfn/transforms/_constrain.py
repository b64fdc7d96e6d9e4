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
        PlacementError: more dims named than the tensor has; a leaf that is not a `P` or None; an axis named twice, or axes of one
            dim in another order than the mesh's.
        TreeError: placements that are no prefix of x.

    Source: jax.lax.with_sharding_constraint.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.constrain(torch.ones(2), P("dp"))
        tensor([1., 1.])
    """
    return pinned(x, placements, "constrain")


def pinned(x: Any, spec: Any, what: str, path: str = "") -> Any:
    """A tree, each tensor of it pinned as a prefix tree says; `what` and `path` are for errors."""
    if spec is None:
        return x
    if isinstance(spec, P):
        named.check_placed(what, path, spec.parts)
        return _tree.tree_map(lambda leaf: _pin(leaf, spec, what, path), x)
    if isinstance(spec, dict) and isinstance(x, dict) and set(spec) == set(x):
        made = {key: pinned(x[key], spec[key], what, f"{path}[{key!r}]") for key in x}
        return made if type(x) is dict else type(x)(made)
    if _is_row(spec) and _is_row(x) and len(spec) == len(x):
        rows = [pinned(a, s, what, f"{path}[{i}]") for i, (a, s) in enumerate(zip(x, spec, strict=True))]
        return type(x)(*rows) if hasattr(x, "_fields") else type(x)(rows)
    refuse_prefix(what, path, _said(spec), _said(x))
    return x


def _is_row(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _said(tree: Any) -> str:
    """What a tree is, for an error."""
    if isinstance(tree, torch.Tensor):
        return "a tensor"
    if isinstance(tree, dict):
        return "a dict with the keys " + ", ".join([repr(key) for key in tree])
    if _is_row(tree):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"


@_compat.constant_in_graph
def refuse_prefix(what: str, path: str, placements: str, tree: str) -> None:
    """Say that placements do not fit a tree.

    Raises:
        TreeError: placements of another structure.
        PlacementError: a leaf that is no placement of a constraint.
    """
    where = f"{what}, {path}" if path else what
    fix = "P('axis', None), or a tree of them that is a prefix of the value's tree"
    got = f"the placements are {placements}, the value is {tree}"
    kind = TreeError if placements.startswith(("a dict", "a list", "a tuple")) else PlacementError
    raise kind(problem(where, got, needed="a P, or a tree of them", fix=fix), fix=fix)


def _pin(x: Any, spec: P, what: str, path: str) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    named.check_dims(what, path, spec.parts, tuple(x.shape))
    return prims.redistribute(x, text_of(spec, x.dim())) if _compat.is_tracing() else x



def text_of(spec: P, rank: int) -> str:
    """A spec as the prim's text: axis names for each dim."""
    parts = [*spec.parts, *[None] * (rank - len(spec.parts))]
    return ";".join("" if p is None else p if isinstance(p, str) else ",".join(p) for p in parts) or ";"

