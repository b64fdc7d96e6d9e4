"""The placements of each argument: its own, or those of `in_placements`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from ... import _tree, argnums, tree_pairs
from ..._compat.cuda import numbered, unnumbered
from ...errors import PlacementError, TreeError, call_site
from ...mesh import axes_of, refuse_other
from ...partition import layout
from ...placement import AUTO, check_pending, check_whole, describe, is_spec, marks_of
from ...simulated import is_on_part, placements_on
from ...types import Marks, MeshAxes
from ..options import Request


def marks_of_arguments(
    request: Request,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[int],
    paths: Sequence[str],
    mesh: Any,
) -> tuple[Marks, ...]:
    """The placements of each tensor argument.

    Args:
        request: the request with the `in_placements`.
        args: positional arguments.
        kwargs: keyword arguments.
        tensors: which leaves are tensors.
        paths: of all leaves.
        mesh: of the call.

    Raises:
        TreeError: `in_placements` does not match the arguments.
        PlacementError: placements that do not fit, all listed.
    """
    leaves, axes = _tree.leaves((args, kwargs)), axes_of(mesh)
    specs = _specs(request, args, kwargs, leaves)
    marks: list[Marks] = []
    wrong: list[tuple[str, str]] = []
    for i in tensors:
        try:
            marks.append(_marks(leaves[i], specs[i], mesh, axes))
        except ValueError as error:
            wrong.append((paths[i], str(error)))
    if wrong:
        raise _misfit(request, mesh, wrong)
    return tuple(marks)


def _misfit(request: Request, mesh: Any, wrong: list[tuple[str, str]]) -> PlacementError:
    """The error for placements that do not fit."""
    path, first = wrong[0]
    where, lines = f"{request.name}, argument {path}", [first]
    if len(wrong) > 1:
        where = f"{request.name}, {len(wrong)} arguments"
        lines = ["placements that do not fit", *(f"{p}: {e}" for p, e in wrong)]
    fix = (
        "placements that fit each tensor and the mesh, such as P('axis') or None for the "
        "argument's own"
    )
    source = call_site()
    return PlacementError.of(
        where,
        *lines,
        fix=fix,
        source=source,
        arg_path=path,
        mesh=mesh,
        placements=request.in_placements,
    )


def _specs(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
) -> list[Any]:
    """One placement leaf for each argument leaf. Those of a tuple belong to parameters in their
    order, as arguments do, those of a dict to parameters by name; others keep their own.
    """
    prefix = request.in_placements
    if prefix is None:
        return [None] * len(leaves)
    if isinstance(prefix, list) and not is_spec(prefix):
        prefix = tuple(prefix)
    names = argnums.parameters(argnums.signature_of(request.signature_of))
    own, by_name = _bound(prefix, args, kwargs, names)
    try:
        specs = tree_pairs.broadcast_prefix(own, args, is_spec)
        return specs + tree_pairs.broadcast_prefix((by_name,), (kwargs,), is_spec)
    except ValueError as error:
        lines = ["in_placements does not match the arguments", *_named(names, error.args)]
        fix = "one placement for each leaf, or one P for all leaves of a subtree"
        source = call_site()
        raise TreeError.of(
            request.name, *lines, fix=fix, source=source, placements=prefix
        ) from None


def _bound(
    prefix: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str] | None
) -> tuple[Any, dict[str, Any]]:
    """The placements of the positional arguments, and those of keywords by name."""
    names = names or []
    if isinstance(prefix, dict) and not is_spec(prefix) and prefix.keys() <= {*names, *kwargs}:
        own: Any = tuple(prefix.get(name) for name in names[: len(args)])
        return own, {name: prefix.get(name) for name in kwargs}
    by_name: dict[str, Any] = dict.fromkeys(kwargs)
    if isinstance(prefix, tuple) and not is_spec(prefix) and len(args) < len(prefix) <= len(names):
        rest = zip(names[len(args) :], prefix[len(args) :], strict=False)
        by_name |= {name: spec for name, spec in rest if name in kwargs}
        prefix = prefix[: len(args)]
    return prefix, by_name


def _named(names: list[str] | None, lines: Sequence[str]) -> list[str]:
    """The mismatches with parameter names in place of `[0]`."""
    out = []
    for line in lines:
        start = "the whole tree: " if line.startswith("the whole tree: ") else ""
        text = line.removeprefix(start)
        pattern = r"\[(\d+)\]" if start else r"^\[(\d+)\]"
        out.append(start + re.sub(pattern, lambda found: _parameter(names or [], found), text))
    return out


def _parameter(names: list[str], found: re.Match[str]) -> str:
    """The name of a parameter, by its position in a mismatch."""
    number = int(found[1])
    return names[number] if number < len(names) else found[0]


def _check_device(device: torch.device, device_type: str) -> None:
    """Check that an argument lives on the device of this rank. Raises ValueError if not."""
    if device.type == "meta":
        return
    if device.type != device_type:
        raise ValueError(
            f"it lives on {device}, and the mesh is over {device_type} devices; "
            "move it with x.to(...)"
        )
    if unnumbered(device).index is not None:
        raise ValueError(
            f"it lives on {device}, and this rank's device is {numbered(device_type)}; "
            f"torch.{device_type}.set_device(number) before, or x.to({device_type!r})"
        )


def _marks(x: Any, spec: Any, mesh: Any, axes: MeshAxes) -> Marks:
    """The placements of one argument. Raises ValueError if they do not fit."""
    if isinstance(x, torch.Tensor) and mesh is not None:
        _check_device(x.device, mesh.device_type)
    declared = None if spec is None or spec is AUTO else marks_of(spec, x.shape, axes)
    if not isinstance(x, DTensor):
        check_whole(spec, declared or ())
        return declared or ("R",) * len(axes.names)
    if x.device_mesh != mesh:
        got = f"it lives on another mesh, {axes_of(x.device_mesh)}"
        raise ValueError(f"{got}, and the function's is {axes}")
    own = marks_of(list(x.placements), x.shape, axes)
    check_pending(own, x.dtype)
    if declared is None:
        return own
    if not layout.agree(own, declared, axes.sizes):
        raise ValueError(
            f"it is placed {describe(own, axes)}, in_placements says "
            f"{describe(declared, axes)}; redistribute it outside"
        )
    return declared


def marks_of_closed_over(
    name: str, x: torch.Tensor, node: torch.fx.Node, mesh: Any, axes: MeshAxes
) -> Marks:
    """The placements of a closed-over tensor, the input `node` of the program: a plain one is
    replicated. A DTensor on a part of the mesh is replicated over the other axes. In the code of
    one rank it has one more dim, of each rank's own tensors.

    Raises:
        PlacementError: a DTensor of another mesh.
    """
    if not isinstance(x, DTensor) or mesh is None:
        return ("R",) * len(axes.names)
    if node.meta["val"].dim() > x.dim():
        return marks_of([Shard(0)] * len(axes.names), (mesh.size(),), axes)
    if is_on_part(x, mesh):
        return marks_of(list(placements_on(x, mesh)), x.shape, axes)
    if x.device_mesh != mesh:
        where = f"{name}, a DTensor that it closes over"
        refuse_other(where, x.device_mesh, mesh)
    return marks_of(list(x.placements), x.shape, axes)
