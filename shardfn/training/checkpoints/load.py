"""`load`: read a checkpoint as a tree, on any mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from ... import _compat
from ..._compat.distributed.checkpoint_files import Items
from ...accepted import accept
from ...errors import CheckpointError
from ...jobs.beside import checkpointing
from ...world import current_world
from . import agreed, folders
from .contents import CONSTANTS, is_away, is_stateful, listed, named, names_in, replaced, shape_of
from .targets import device_of, empty, placed_leaves, refilled, refuse_without_values

Tensor = tuple[tuple[int, ...], torch.dtype]  # global shape and dtype


@_compat.outside_only
def load(
    path: str | os.PathLike[str],
    like: Any,
    mesh: Any = None,
    placements: Any = None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Any:
    """Read a checkpoint, on any mesh and with any placements.

    The mesh, the placements and the number of ranks may differ from those with which the checkpoint
    was saved. Each rank reads only the bytes of its own shards.

    Args:
        path: the folder that `save` wrote to, or the folder of one step.
        like: a pytree with the structure of the result. The leaves of `like` may be DTensors,
            tensors, `ShapeDtype`s (global shape, dtype), constants, and objects with
            `load_state_dict`, whose state is restored.
        mesh: a DeviceMesh, which may be omitted if all leaves of `like` are DTensors or ordinary
            tensors.
        placements: a prefix tree of placements over `like`. With the placement None, a DTensor
            keeps its placements, and any other leaf is loaded as an ordinary tensor.
        step: the number of the step to read; by default, the newest complete step.
        strict: whether to raise an error if the checkpoint has leaves that `like` does not have.

    Returns:
        A tree with the structure of `like`, in newly allocated memory. `load` also replaces the
        constants of `like` by those in the checkpoint.

    Raises:
        CheckpointError: the step does not exist; leaves are missing, extra, or of another shape or
            dtype (the error lists all of them); a file is damaged, or its format is newer.
        TreeError, PlacementError: the placements do not fit the tree or the mesh.
        FakeValueError: the simulated world computes no values (`numerics=False`).

    Source: torch.distributed.checkpoint.load; orbax.checkpoint.

    Example:
        >>> import tempfile, torch, shardfn as sf
        >>> with sf.fake_world(4), tempfile.TemporaryDirectory() as folder:
        ...     rows = sf.make_mesh((4,), ("dp",))
        ...     x = sf.distribute(torch.arange(6.0), rows, sf.P("dp"))
        ...     _ = sf.save(folder, {"x": x})
        ...     both = sf.make_mesh((2, 2), ("dp", "tp"))
        ...     sf.full(sf.load(folder, {"x": x}, both, sf.P(("dp", "tp"))))
        {'x': tensor([0., 1., 2., 3., 4., 5.])}
    """
    accept("load", path=path, step=step, strict=strict)
    refuse_without_values("load")
    placed = placed_leaves("load", like, mesh, placements)
    leaves = named("load", like)
    folder = _folder(os.path.abspath(os.fspath(path)), step)
    items = Items(folder)
    stored = items.shapes()
    constants = [name for name in leaves if name in stored and stored[name] is None]
    values = {name: items.value(name) for name in constants}
    states = {name: names_in(name, values[name]) for name in values if is_stateful(leaves[name])}
    _check(folder, leaves, stored, values, states, strict)
    targets: dict[str, torch.Tensor] = {}
    for name in [*leaves, *chain(*states.values())]:
        if (tensor := stored[name]) is not None:
            device = device_of(leaves.get(name))
            targets[name] = empty(*tensor, device, placed.get(name))
    with checkpointing(current_world(), "load"):
        agreed.read("load", targets, items.metadata, items.fill)
    return _filled(like, leaves, targets, values)


def _folder(path: str, step: int | None) -> str:
    """Resolve the folder of a step, or of the newest one.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    if step is None and folders.is_complete(path):
        return path
    found = folders.steps(path)
    number = step if step is not None else max(found, default=None)
    folder = None if number is None else folders.complete(path, number)
    if folder is None:
        here = f"complete steps: {', '.join(map(str, found))}" if found else ""
        what = "no checkpoint" if step is None else f"no complete step {step}"
        lines = [f"{path} holds {what}", *filter(None, [here])]
        fix = "give the folder that sf.save wrote to"
        raise CheckpointError.of("load", *lines, fix=fix)
    return folder


def _check(
    folder: str,
    leaves: Mapping[str, Any],
    stored: Mapping[str, Tensor | None],
    values: Mapping[str, Any],
    states: Mapping[str, list[str]],
    strict: bool,
) -> None:
    """Check that a checkpoint holds the leaves of a tree.

    Raises:
        CheckpointError: it does not; all mismatches.
    """
    in_states = [*chain(*states.values())]
    missing = [name for name in leaves if name not in stored]
    missing += [name for name in in_states if stored.get(name) is None]
    wrong = [f"{name}: in the given tree, but not in the checkpoint" for name in missing]
    if strict:
        extra = stored.keys() - leaves.keys() - set(in_states)
        wrong += [
            f"{name}: in the checkpoint, but not in the given tree"
            for name in stored
            if name in extra
        ]
    for name, leaf in leaves.items():
        wrong += _difference(name, leaf, stored[name], values.get(name)) if name in stored else []
    if wrong:
        fix = (
            "pass the tree that was saved; strict=False ignores entries that the tree does not have"
        )
        raise CheckpointError.of("load", f"{folder} holds another tree", *listed(wrong), fix=fix)


def _difference(name: str, leaf: Any, has: Tensor | None, value: Any) -> list[str]:
    """Describe how a leaf differs from what the checkpoint has under its name."""
    wanted = shape_of(leaf)
    if wanted is None and has is None:
        is_state = not isinstance(value, CONSTANTS)
        kinds = ("a constant", "an object's state")
        is_same = is_state == is_stateful(leaf)
        return [] if is_same else [f"{name}: {kinds[is_state]}, and the tree has {leaf!r}"]
    if wanted is None or has is None:
        kinds = ("a tensor", "a constant")
        return [f"{name}: {kinds[not has]} in the checkpoint, {kinds[not wanted]} in the tree"]
    if has == wanted:
        return []
    return [f"{name}: {has[1]} {has[0]} in the checkpoint, {wanted[1]} {wanted[0]} in the tree"]


def _filled(
    like: Any,
    leaves: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
) -> Any:
    """Rebuild the tree with the loaded values. Objects load their states last."""
    out = {}
    for name, leaf in leaves.items():
        out[name] = tensors[name] if name in tensors else values[name]
        if is_stateful(leaf):
            state = replaced(name, values[name], lambda n, x: tensors[n] if is_away(x) else x)
            leaf.load_state_dict(state)
            out[name] = leaf
    return refilled(like, out)
