"""constrain: a sharding constraint on a value inside a function.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat, _tree, tree_pairs
from ...capture.shard_map import axis_names
from ...errors import PlacementError, TreeError
from ...ops import placement
from ...ops.text_formats import KEEP, STAGE_AXIS, print_spec
from ...placement import AUTO, P, Stage
from .._paired import kind


def constrain(x: Any, placements: Any) -> Any:
    """Constrain the placement of a value inside a sharded function. `constrain` does not change the
    value of x.

    Args:
        x: a tensor, or a pytree of tensors.
        placements: a prefix tree over x, whose leaves are `P`, `Stage`, or None for no constraint.
            A `Stage` puts a value on a stage of the pipeline axis, and does not constrain its
            sharding on other axes.

    Returns:
        x. `constrain` also constrains the gradient of x to the same placements.

    Raises:
        PlacementError: a placement names more dims than the tensor has, names an axis twice, or
            names the axes of one dim in another order than the mesh. A leaf that is not a `P`, a
            `Stage` or None also raises a PlacementError. On a mesh with several axes, a `Stage`
            also raises a PlacementError if no placement of an argument, a result or another
            constraint names the pipeline axis, as `P(pp=0)` does.
        TreeError: placements is not a prefix tree of x.

    Source: jax.lax.with_sharding_constraint.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.constrain(torch.ones(2), P("dp"))
        tensor([1., 1.])
    """
    return pinned(x, placements, "constrain")


def pinned(x: Any, placements: Any, what: str) -> Any:
    """A tree, with each tensor constrained by a prefix tree of placements. `what` is for
    errors.
    """
    specs, wrong = tree_pairs.pair(placements, x, ("placements", "the values"), "", is_constraint)
    return pinned_leaves((x,), _tree.quick_paths(x, ""), specs, wrong, what)[0]


def pinned_leaves(
    x: tuple[Any, ...], paths: list[str], specs: list[Any], wrong: list[str], what: str
) -> Any:
    """A tuple of trees, with each tensor constrained by the placement of its leaf. `wrong` are the
    mismatches of placements and trees.
    """
    check_placements(what, tuple(wrong), tuple([_unknown(spec) for spec in specs]))
    leaves = _tree.quick_leaves(x)
    rows = [(leaf, spec, path) for leaf, spec, path in zip(leaves, specs, paths, strict=True)]
    for leaf, spec, path in rows:
        if isinstance(spec, Stage):
            axis_names.check_stage(what, path, spec.coordinate, spec.chunk)
        elif spec is not None:
            axis_names.check_placed(what, path, spec.parts, _stages(spec))
            if isinstance(leaf, torch.Tensor):
                axis_names.check_dims(what, path, spec.parts, kind(leaf)[0])
    if not _compat.is_tracing():
        return x
    filled = [leaf if spec is None else _pin(leaf, spec) for leaf, spec, _ in rows]
    return _tree.refill(x, filled)


def is_constraint(x: Any) -> bool:
    """Return whether x is a placement or None, and so a leaf of a tree of constraints."""
    return x is None or isinstance(x, (P, Stage))


def _unknown(spec: Any) -> str | None:
    return None if is_constraint(spec) else str(spec)


@_compat.constant_in_graph
def check_placements(where: str, wrong: tuple[str, ...], unknown: tuple[str | None, ...]) -> None:
    """Check that placements fit a tree of values.

    Raises:
        TreeError: they are not a prefix of the tree.
        PlacementError: a leaf that is not a `P` or None.
    """
    strangers = [spec for spec in unknown if spec is not None]
    fix = "give P('axis', None), or a prefix tree of P over the value's tree"
    if wrong:
        got = "the placements do not match the values"
        raise TreeError.of(where, got, *wrong, needed="a P, or a tree of them", fix=fix)
    if repr(AUTO) in strangers:
        got = (
            "sf.auto is only for in_placements of the outermost sf.shard, which chooses placements"
        )
        raise PlacementError.of(where, got, needed="a P, or a tree of them", fix=fix)
    if strangers:
        raise PlacementError.of(where, *strangers, needed="a P, or a tree of them", fix=fix)


def _pin(x: Any, spec: P | Stage) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(spec, Stage):
        text = print_spec([(KEEP,)] * x.dim(), [(STAGE_AXIS, _mark(spec.coordinate, spec.chunk))])
    else:
        text = text_of(spec, x.dim())
    return placement.redistribute(x, text)


def text_of(spec: P, rank: int) -> str:
    """Print a P as the text that the constraint prim takes: the axis names of each tensor dim, and
    the stages.
    """
    parts = [*spec.parts, *[None] * (rank - len(spec.parts))]
    dims = [() if p is None else (p,) if isinstance(p, str) else p for p in parts]
    return print_spec(dims, [(axis, _mark(k, chunk)) for axis, k, chunk in _stages(spec)])


def _mark(coordinate: Any, chunk: int) -> str:
    return f"@{coordinate}.{chunk}" if chunk else f"@{coordinate}"


def _stages(spec: P) -> tuple[tuple[str, Any, int], ...]:
    """The axis, the coordinate and the chunk of each stage of a P, as constants."""
    return tuple(
        [
            (axis, stage.coordinate, stage.chunk) if isinstance(stage, Stage) else (axis, stage, 0)
            for axis, stage in spec.stages.items()
        ]
    )
