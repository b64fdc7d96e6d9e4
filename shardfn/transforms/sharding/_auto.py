"""sf.auto: let shard choose the placements of arguments, and remember the choice by signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree, argnums, tree_pairs
from ...byte_sizes import SIZE_FIX, bytes_of
from ...capture import constant_key
from ...errors import PlacementError, ShardError, call_site
from ...hardware import H100, Hardware
from ...mesh import axes_of, current_mesh
from ...partition import layout
from ...partition.rule_api import registry
from ...placement import AUTO, is_spec, marks_of, spec_of
from ...runtime import Request, trace
from ...runtime.arguments import as_given, specs_of
from ...runtime.stages.choosing import chosen
from ...stage_log import stage
from ...types import MeshPlacements, ShapeDtype, stage_of

KNOWN = 64  # choices that a function remembers; the oldest is dropped first


@attrs.frozen(eq=False)
class Resolved:
    """The placements that were chosen for calls of one signature.

    Args:
        mesh: of the calls.
        specs: of all leaves of the arguments; None of those that are not free.
        marks: the same as placements.
        fn: the function with these placements.
    """

    mesh: Any
    specs: tuple[Any, ...]
    marks: tuple[MeshPlacements | None, ...]
    fn: Any

    def suits(self, leaves: Sequence[Any]) -> bool:
        """Return whether every DTensor of a call already has the remembered placements."""
        rows = zip(leaves, self.marks, strict=False)
        return all(
            marks is None or not isinstance(x, DTensor) or self.has(x, marks) for x, marks in rows
        )

    def has(self, x: DTensor, marks: MeshPlacements) -> bool:
        """Return whether one DTensor has these placements on this mesh."""
        if x.device_mesh != self.mesh:
            return False
        axes = axes_of(self.mesh)
        return layout.agree(marks_of(list(x.placements), x.shape, axes), marks, axes.sizes)


def is_auto(placements: Any) -> bool:
    """Return whether a tree of placements contains sf.auto."""
    if placements is AUTO:
        return True
    return any(x is AUTO for _, x in _tree.named_leaves(placements, is_spec))


def resolved(sharded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of a call with placements in place of sf.auto: those that were chosen for
    this signature before, or the cheapest.

    Args:
        sharded: a function under `shard` whose `in_placements` has sf.auto.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    mesh = sharded.arguments["mesh"] or current_mesh()
    leaves, treedef = _tree.flatten((args, kwargs))
    key = id(mesh), treedef, [*map(_kind, leaves)], registry.active()
    known = sharded.__dict__.setdefault("_chosen", [])
    found = _known(known, key, leaves)
    if found is not None:
        return found.fn
    with _compat.staging():
        found = _known(known, key, leaves)  # another thread may have chosen
        if found is None:
            limit = sharded.arguments["memory"]
            found = choose(sharded, args, kwargs, limit)
            known.append((key, found))
            del known[:-KNOWN]
    return found.fn


def _known(
    known: Sequence[tuple[Any, Resolved]], key: Any, leaves: Sequence[Any]
) -> Resolved | None:
    """The earlier choice for a signature. A DTensor keeps its placement, so it has to fit."""
    rows = (found for other, found in list(known) if other == key)
    return next((found for found in rows if found.suits(leaves)), None)


def choose(
    sharded: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: int | None,
    hardware: Hardware = H100,
) -> Resolved:
    """Choose placements for a call.

    Raises:
        PlacementError: sf.auto stands for no tensor; nothing fits in the memory.
    """
    request: Request = sharded.request
    traced = trace(request, args, kwargs)
    placed = traced.placed
    arguments = as_given(request, args, kwargs)
    asked = specs_of(request, arguments)
    leaves = arguments.leaves
    _refuse_no_tensor(request.name, placed.paths, asked, leaves)
    _refuse_stages(request.name, placed)
    free = {i for i, spec in enumerate(asked) if spec is AUTO}
    is_free = [i in free and not isinstance(leaves[i], DTensor) for i in placed.tensors]
    with stage("choose", request.name):
        found = chosen(traced, is_free, limit, hardware)
    marks: list[MeshPlacements | None] = [None] * len(asked)
    specs = [None if spec is AUTO else spec for spec in asked]
    for i, now in zip(placed.tensors, found.marks, strict=True):
        if i in free:
            marks[i] = now
            specs[i] = spec_of(now, len(leaves[i].shape), placed.axes)
    parameters = argnums.all_parameters(arguments.signature)
    chosen_args, chosen_kwargs = _tree.unflatten(arguments.treedef, specs)
    fn = sharded.placed_so(tree_pairs.bound(parameters, chosen_args, chosen_kwargs, {}))
    return Resolved(placed.mesh, tuple(specs), tuple(marks), fn)


def _kind(x: Any) -> Any:
    """Key a leaf by what sf.auto's choice depends on: shape, dtype, placements."""
    if isinstance(x, (torch.Tensor, ShapeDtype)):
        return tuple(x.shape), x.dtype, bool(getattr(x, "requires_grad", False))
    return constant_key(x)


def _refuse_no_tensor(
    name: str, paths: Sequence[str], asked: Sequence[Any], leaves: Sequence[Any]
) -> None:
    """Refuse sf.auto where it stands for no tensor."""
    kinds = (torch.Tensor, ShapeDtype)
    rows = [i for i, spec in enumerate(asked) if spec is AUTO]
    if any(isinstance(leaves[i], kinds) for i in rows):
        return
    constants = [f"{paths[i]} is a {type(leaves[i]).__name__}" for i in rows]
    raise PlacementError.of(
        f"{name}, in_placements",
        "sf.auto is given for an argument without tensors, so nothing can be chosen",
        *constants,
        needed="sf.auto for an argument with tensors",
        fix="None for arguments without tensors",
        source=call_site(),
    )


def _refuse_stages(name: str, placed: Any) -> None:
    """Refuse sf.auto beside placements on stages."""
    rows = zip(placed.tensors, placed.marks, strict=True)
    on_stages = [placed.paths[i] for i, marks in rows if any(map(stage_of, marks))]
    if on_stages:
        raise PlacementError.of(
            f"{name}, in_placements",
            f"sf.auto does not choose pipeline stages, but {on_stages[0]} is on a stage",
            needed="placements for all arguments of a pipeline",
            fix="P() or P('dp') for the batch; sf.plan(..., pipelines=) compares schedules",
            source=call_site(),
        )


def checked_memory(where: str, memory: Any, in_placements: Any) -> int | None:
    """A limit of memory, in bytes.

    Raises:
        ShardError: it is not a number of bytes, or nothing is to be chosen under it.
    """
    if memory is None:
        return None
    try:
        limit = bytes_of(memory)
    except ValueError as error:
        raise ShardError.of(
            f"{where}, memory", str(error), fix=SIZE_FIX, arg_path="memory"
        ) from None
    if not is_auto(in_placements):
        raise ShardError.of(
            f"{where}, memory",
            "in_placements has no sf.auto, so shardfn chooses no placements under the memory limit",
            fix="use in_placements=sf.auto; or leave out memory= and read lowered.memory",
            arg_path="memory",
        )
    return limit
