"""load: a checkpoint as a tree, on any mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ... import _compat
from ..._compat.distributed.checkpoint_plans import Chunk
from ...accepted import accept
from ...errors import CheckpointError
from ...jobs.beside import checkpointing
from ...world import current_world
from . import agreed, folders, manifest
from .contents import is_stateful, listed, named, rebuilt, shape_of, state_names
from .files import Files
from .targets import device_of, empty, placed_leaves, refilled, refuse_without_values


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
    """Read a checkpoint, on the mesh and with the placements of the caller.

    They need not be those that it was saved with, nor the number of ranks. Each rank reads the
    bytes that it holds.

    Args:
        path: the folder that `save` wrote to, or that of one step.
        like: a pytree of the same structure: DTensors, tensors, `ShapeDtype`s (global shape,
            dtype), constants, and objects with `load_state_dict`, which take their state.
        mesh: a DeviceMesh; may be left out where the leaves are DTensors or plain tensors.
        placements: a prefix tree of placements over `like`. None keeps the placements of a
            DTensor and loads another leaf as a plain tensor.
        step: the number of a step; by default the newest that is complete.
        strict: False leaves out leaves of the checkpoint that `like` does not have.

    Returns:
        The tree, in memory of its own. Constants are those of the checkpoint.

    Raises:
        CheckpointError: no such step; leaves that are missing, extra, or of another shape or
            dtype, all at once; a damaged file; a newer format.
        TreeError, PlacementError: placements that do not fit.
        FakeValueError: in a world with numerics=False.

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
    stored = manifest.read("load", folder)
    _check(folder, leaves, stored, strict)
    targets = {
        name: empty(x.shape, x.dtype, device_of(leaves.get(name)), placed.get(name))
        for name, x in stored.tensors.items()
        if name in leaves or _is_of_state(name, leaves, stored)
    }
    _read(folder, targets, stored)
    return _filled(like, leaves, targets, stored.constants)


def _folder(path: str, step: int | None) -> str:
    """The folder of a step.

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
        fix = "the folder that sf.save wrote to"
        raise CheckpointError.of("load", *lines, fix=fix)
    return folder


def _is_of_state(name: str, leaves: Mapping[str, Any], stored: manifest.Manifest) -> bool:
    """Whether a tensor belongs to the state of an object in the tree."""
    owners = (leaf for leaf in leaves if name.startswith(leaf + "."))
    return any("state" in stored.constants.get(owner, {}) for owner in owners)


def _check(folder: str, leaves: Mapping[str, Any], stored: manifest.Manifest, strict: bool) -> None:
    """Check that a checkpoint holds the leaves of a tree.

    Raises:
        CheckpointError: it does not; all mismatches.
    """
    has = {**stored.tensors, **stored.constants}
    in_states = {
        name for x in stored.constants.values() if "state" in x for name in state_names(x["state"])
    }
    wrong = [f"{name}: in the tree, not in the checkpoint" for name in leaves if name not in has]
    if strict:
        wrong += [
            f"{name}: in the checkpoint, not in the tree"
            for name in has
            if name not in leaves and name not in in_states
        ]
    for name, leaf in leaves.items():
        wrong += _difference(name, leaf, stored) if name in has else []
    if wrong:
        fix = "the tree that was saved; strict=False leaves out what it does not have"
        raise CheckpointError.of("load", f"{folder} holds another tree", *listed(wrong), fix=fix)


def _difference(name: str, leaf: Any, stored: manifest.Manifest) -> list[str]:
    """How a leaf differs from what the checkpoint has under its name."""
    wanted = shape_of(leaf)
    has = stored.tensors.get(name)
    if wanted is None and has is None:
        is_state = "state" in stored.constants[name]
        is_same = is_state == is_stateful(leaf)
        kinds = ("an object's state", "a constant")
        return [] if is_same else [f"{name}: {kinds[not is_state]}, and the tree has {leaf!r}"]
    if wanted is None or has is None:
        return [
            f"{name}: a {'constant' if has is None else 'tensor'} in the checkpoint, "
            f"a {'constant' if wanted is None else 'tensor'} in the tree"
        ]
    if (has.shape, has.dtype) == wanted:
        return []
    return [
        f"{name}: {has.dtype} {has.shape} in the checkpoint, {wanted[1]} {wanted[0]} in the tree"
    ]


def _read(folder: str, targets: dict[str, torch.Tensor], stored: manifest.Manifest) -> None:
    opened = Files("load", folder)

    def block(chunk: Chunk, slices: tuple[slice, ...]) -> torch.Tensor:
        dtype = stored.tensors[chunk.name].dtype
        file = manifest.file_of(chunk.part)
        return opened.block(file, manifest.key_of(chunk), slices, dtype)

    chunks = {name: stored.tensors[name].chunks for name in targets}
    with checkpointing(current_world(), "load"):
        agreed.read("load", targets, chunks, block)


def _filled(
    like: Any,
    leaves: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
) -> Any:
    """The tree with what was read. Objects take their states last, when all is there."""
    out = {}
    for name, leaf in leaves.items():
        if name in tensors:
            out[name] = tensors[name]
        elif is_stateful(leaf):
            leaf.load_state_dict(rebuilt(constants[name]["state"], tensors))
            out[name] = leaf
        else:
            out[name] = constants[name]["value"]
    return refilled(like, out)
