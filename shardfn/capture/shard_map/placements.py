"""The placements of a shard_map: how its manual axes shard each value, while a function is
traced.

Dynamo runs these functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from ... import _compat
from ...errors import PlacementError, TreeError
from ...mesh import axes_of
from ...placement import P, check_order, marks_of, names_of
from ...types import MEAN, MeshAxes
from .axis_names import current_scope, suggest_name

SUMS = ("sum", MEAN)  # the Partial placements of a result
PLACED = {"S": Shard, "R": Replicate, "P": Partial}  # the form in which Dynamo passes placements


@_compat.constant_in_graph
def shard_texts(
    where: str,
    what: str,
    axes: tuple[Any, ...],
    paths: tuple[str, ...],
    shapes: tuple[Any, ...],
    specs: tuple[Any, ...],
    wrong: tuple[str, ...],
) -> Any:
    """How the manual axes shard each value, as text for the prims.

    Args:
        where: the name of the shard_map in errors.
        what: in_placements or out_placements.
        axes: ((name, size), ...), the manual ones.
        paths: of the leaves.
        shapes: of the leaves; None for a leaf that is not a tensor.
        specs: of each leaf: None, ("names", parts), ("placements", ...), ("stages", text).
        wrong: mismatches found before.

    Returns:
        For each leaf (text, axes over which it is Partial, number of ranks that it is a mean
        over, or 0). The text "dp:2=0,tp:4=" says that dp, of 2 ranks, shards dim 0.

    Raises:
        TreeError: placements that do not match the tree.
        PlacementError: names every leaf that does not fit.
    """
    if wrong:
        fix = "give one placement for each leaf, or one P for all leaves of a subtree"
        raise TreeError.of(
            f"{where}, {what}", "the placements do not match the tree", *wrong, fix=fix
        )
    found = []
    lines = []
    for path, shape, spec in zip(paths, shapes, specs, strict=True):
        try:
            found.append(("", "", 0) if shape is None else _shard_text(what, axes, shape, spec))
        except ValueError as error:
            lines.append(f"{path}: {error}")
    if lines:
        fix = "use sizes divisible by the number of ranks, and placements that fit each tensor"
        raise PlacementError.of(
            f"{where}, {what}",
            *lines,
            needed="equal shards on all ranks",
            fix=fix,
            arg_path=lines[0].split(":")[0],
        )
    return tuple(found)


def _shard_text(
    what: str, axes: Sequence[Any], shape: Sequence[int], spec: Any
) -> tuple[str, str, int]:
    """How the manual axes shard one leaf, as text. Raises ValueError if it does not fit."""
    placements = _placements_by_axis(axes, shape, spec)
    _check_placements(what, axes, shape, placements)
    rows = [(name, n, placement) for (name, n), placement in zip(axes, placements, strict=True)]
    texts = [
        f"{name}:{n}={placement if isinstance(placement, int) else ''}"
        for name, n, placement in rows
    ]
    partial = [name for name, _, placement in rows if placement in SUMS]
    means = [n for _, n, placement in rows if placement == MEAN]
    return ",".join(texts), ",".join(partial), math.prod(means) if means else 0


def _check_placements(
    what: str, axes: Sequence[Any], shape: Sequence[int], placements: Sequence[Any]
) -> None:
    """Check that the axes divide the dims that they shard, and that only results are Partial.

    Raises:
        ValueError: a placement does not fit.
    """
    local_shape = list(shape)
    is_argument = what == "in_placements"
    for (name, n), placement in zip(axes, placements, strict=True):
        if isinstance(placement, int) and is_argument:
            _check_divides(name, n, placement, shape, local_shape)
            local_shape[placement] //= n
        elif placement in SUMS and is_argument:
            why = "only a result can be Partial"
            raise ValueError(f"Partial({placement!r}) over {name}; {why}")
        elif isinstance(placement, str) and placement not in ("R", *SUMS):
            why = "only a sum or a mean can be Partial"
            raise ValueError(f"Partial({placement!r}) over {name}; {why}")


def _check_divides(
    name: str, n: int, dim: int, shape: Sequence[int], local_shape: Sequence[int]
) -> None:
    """Check that an axis of n ranks divides a dim, which other axes may shard too.

    Raises:
        ValueError: it does not. Says by how much to pad the dim.
    """
    local = local_shape[dim]
    size = shape[dim]
    if not local % n:
        return
    text = f"size {local}" if local == size else f"size {size}, {local} of it on a rank"
    more = (n - local % n) * (size // local)
    raise ValueError(
        f"dim {dim} has {text}, which axis {name} cannot shard into {n} equal "
        f"chunks; pad it by {more}"
    )


def _placements_by_axis(axes: Sequence[Any], shape: Sequence[int], spec: Any) -> Sequence[Any]:
    """A placement for each manual axis. Raises ValueError for any other axis."""
    manual = MeshAxes(tuple(n for n, _ in axes), tuple(n for _, n in axes))
    if spec is None:
        return ["R"] * len(axes)
    kind, parts = spec
    if kind == "stages":
        raise ValueError(f"{parts} is on a pipeline stage, but in shard_map every rank has a value")
    if kind == "names":
        _check_axis_names(P(*parts), manual)
        check_order(P(*parts), manual.names)
        return marks_of(P(*parts), shape, manual)
    strange = [rest[0] for k, *rest in parts if k == "?"]
    if strange:
        raise ValueError(f"{strange[0]} is not a placement that shard_map supports")
    mesh_axes = axes_of(current_scope().mesh)
    placements = [PLACED[k](*rest) for k, *rest in parts]
    every = marks_of(placements, shape, mesh_axes)
    by_axis = dict(zip(mesh_axes.names, every, strict=True))
    others = [n for n, m in by_axis.items() if n not in manual.names and m != "R"]
    if others:
        raise ValueError(f"the value is placed on axis {others[0]!r}, which is not in axis_names")
    return [by_axis[n] for n in manual.names]


def _check_axis_names(spec: P, manual: MeshAxes) -> None:
    """Check that a placement names manual axes only.

    Raises:
        ValueError: names the first other axis.
    """
    mesh_axes = axes_of(current_scope().mesh)
    names = [n for part in names_of(spec) for n in part]
    others = [n for n in names if n in mesh_axes.names and n not in manual.names]
    if others:
        why = (
            "already belongs to an enclosing shard_map"
            if others[0] in current_scope().manual
            else "is not in the axis_names of this shard_map"
        )
        raise ValueError(f"{spec} names axis {others[0]!r}, which {why}")
    unknown = [n for n in names if n not in mesh_axes.names]
    if unknown:
        raise ValueError(
            f"{spec} names axis {unknown[0]!r}; the mesh has {mesh_axes}; "
            f"{suggest_name(unknown[0], manual.names)}"
        )
