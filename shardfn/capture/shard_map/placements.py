"""Placements inside a function that is read: over which axes they may be, and how the manual axes
of a shard_map shard each value.

Dynamo runs these functions as they are, on constants, so that errors come out as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from ... import _compat
from ...errors import PlacementError, TreeError, problem
from ...mesh import axes_of
from ...placements import P, check_axes, marks_of, names_of
from ...types import MEAN, MeshAxes
from .axis_names import current_scope, near

SUMS = ("sum", MEAN)  # what a result may be a term of
PLACED = {
    "S": Shard,
    "R": Replicate,
    "P": Partial,
}  # how Dynamo hands placements on


@_compat.constant_in_graph
def check_placed(what: str, path: str, parts: tuple[Any, ...]) -> None:
    """Check the axes that a value is placed on inside a program: that they are axes, each once,
    in mesh order, and not manual.

    Raises:
        PlacementError: naming the axes.
    """
    where, mesh = f"{what}, {path}" if path else what, current_scope().mesh
    try:
        every = [name for names in names_of(P(*parts)) for name in names]
        check_axes(P(*parts), axes_of(mesh).names if mesh is not None else None)
    except ValueError as error:
        fix = "each axis once, by its name; axes on one dim in mesh order"
        raise PlacementError(
            problem(where, str(error), fix=fix), placements=P(*parts), fix=fix
        ) from None
    wrong = [name for name in every if name in current_scope().manual]
    if wrong:
        fix = "leave it to in_placements and out_placements, or to axis_names without it"
        said = f"{P(*parts)} names {', '.join(wrong)}, which is manual in the shard_map around it"
        raise PlacementError(problem(where, said, fix=fix), fix=fix)


@_compat.constant_in_graph
def check_dims(
    what: str, path: str, parts: tuple[Any, ...], shape: tuple[int, ...]
) -> None:
    """Check that a placement has no more parts than a tensor has dims, where partition will not
    see it.

    Raises:
        PlacementError: it has.
    """
    is_seen = current_scope().mesh is not None and any(
        part is not None for part in parts[len(shape) :]
    )
    if len(parts) > len(shape) and not is_seen:
        where, fix = (
            f"{what}, {path}" if path else what,
            f"P with at most {len(shape)} entries",
        )
        got = (
            f"{P(*parts)} names dim {len(parts) - 1} of a tensor with {len(shape)} dims, "
            f"shape {shape}"
        )
        raise PlacementError(
            problem(where, got, fix=fix),
            placements=P(*parts),
            dim=len(parts) - 1,
            fix=fix,
        )


@_compat.constant_in_graph
def cuts(
    where: str,
    what: str,
    axes: tuple[Any, ...],
    paths: tuple[str, ...],
    shapes: tuple[Any, ...],
    specs: tuple[Any, ...],
    wrong: tuple[str, ...],
) -> Any:
    """How the manual axes cut each value, in words for the prims.

    Args:
        where: how errors call the shard_map.
        what: in_placements or out_placements.
        axes: ((name, size), ...), the manual ones.
        paths: of the leaves.
        shapes: of the leaves; None for what is no tensor.
        specs: of each leaf: None, ("names", parts) or ("placements", ...).
        wrong: what does not fit already.

    Returns:
        For each leaf (text, axes over which it is a term of a sum, how many ranks it is a mean
        over, or 0): "dp:2=0,tp:4=" says that dp, of 2 ranks, cuts dim 0.

    Raises:
        TreeError: placements that are no prefix.
        PlacementError: every leaf that does not fit.
    """
    if wrong:
        fix = "a tree of placements that ends early is a prefix: one P for a whole subtree"
        raise TreeError(
            problem(
                f"{where}, {what}", "it is no prefix of the tree", *wrong, fix=fix
            ),
            fix=fix,
        )
    found, lines = [], []
    for path, shape, spec in zip(paths, shapes, specs, strict=True):
        try:
            found.append(
                ("", "", 0) if shape is None else _cut(what, axes, shape, spec)
            )
        except ValueError as error:
            lines.append(f"{path}: {error}")
    if lines:
        fix = "sizes that the ranks divide, and placements that fit each tensor"
        text = problem(
            f"{where}, {what}", *lines, needed="equal pieces on all ranks", fix=fix
        )
        raise PlacementError(text, arg_path=lines[0].split(":")[0], fix=fix)
    return tuple(found)


def _cut(
    what: str, axes: Sequence[Any], shape: Sequence[int], spec: Any
) -> tuple[str, str, int]:
    """One leaf, as `cuts` returns it; ValueError says what does not fit."""
    marks, left = _marks(axes, shape, spec), list(shape)
    for (name, n), mark in zip(axes, marks, strict=True):
        if isinstance(mark, int) and what == "in_placements":
            if left[mark] % n:
                size = (
                    f"size {left[mark]}"
                    if left[mark] == shape[mark]
                    else f"size {shape[mark]}, {left[mark]} of it on a rank"
                )
                more = (n - left[mark] % n) * (shape[mark] // left[mark])
                raise ValueError(
                    f"dim {mark} has {size}, which axis {name} cannot cut in {n} equal "
                    f"pieces; pad it by {more}"
                )
            left[mark] //= n
        elif (
            isinstance(mark, str)
            and mark != "R"
            and (what == "in_placements" or mark not in SUMS)
        ):
            why = (
                "only a result can be pending"
                if mark in SUMS
                else "only a sum or a mean can be pending"
            )
            raise ValueError(f"Partial({mark!r}) over {name}; {why}")
    said = [
        f"{name}:{n}={mark if isinstance(mark, int) else ''}"
        for (name, n), mark in zip(axes, marks, strict=True)
    ]
    pending = [
        name for (name, _), mark in zip(axes, marks, strict=True) if mark in SUMS
    ]
    means = [n for (_, n), mark in zip(axes, marks, strict=True) if mark == MEAN]
    return ",".join(said), ",".join(pending), math.prod(means) if means else 0


def _marks(axes: Sequence[Any], shape: Sequence[int], spec: Any) -> Sequence[Any]:
    """A mark for each manual axis."""
    manual = MeshAxes(tuple(n for n, _ in axes), tuple(n for _, n in axes))
    if spec is None:
        return ["R"] * len(axes)
    kind, said = spec
    whole = axes_of(current_scope().mesh)
    if kind == "names":
        named = [n for names in names_of(P(*said)) for n in names]
        other = [n for n in named if n in whole.names and n not in manual.names]
        if other:
            why = (
                "is manual already, in a shard_map around it"
                if other[0] in current_scope().manual
                else "is none of its axis_names"
            )
            raise ValueError(f"{P(*said)} names axis {other[0]!r}, which {why}")
        unknown = [n for n in named if n not in whole.names]
        if unknown:
            raise ValueError(
                f"{P(*said)} names axis {unknown[0]!r}; the mesh has {whole}; "
                f"{near(unknown[0], manual.names)}"
            )
        return marks_of(P(*said), shape, manual)
    every = dict(
        zip(
            whole.names,
            marks_of([PLACED[k](*rest) for k, *rest in said], shape, whole),
            strict=True,
        )
    )
    other = [n for n, m in every.items() if n not in manual.names and m != "R"]
    if other:
        raise ValueError(
            f"it is placed on axis {other[0]!r}, which is none of its axis_names"
        )
    return [every[n] for n in manual.names]
