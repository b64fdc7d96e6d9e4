"""The reason why a call is captured again: the closest earlier signature, and the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import _compat, _tree
from ..capture import name_of, tensor_type
from ..mesh import axes_of
from ..partition import layout
from ..partition.rule_api import registry
from ..placement import marks_of
from .arguments import Placed

FIRST = "this is the first call: no program exists yet"
KNOWN = "a program for these arguments already exists: no retrace"
SHOWN = 8  # differences that are printed


def retrace(name: str, entries: Sequence[Any], key: list[Any], placed: Placed, mesh: Any) -> str:
    """Find the closest earlier signature of a function, and say where a call differs from it.

    Args:
        name: of the function.
        entries: the earlier signatures.
        key: of the call.
        placed: its arguments.
        mesh: of the transform, or the current one.
    """
    if not entries:
        return f"{name}: {FIRST}"
    ordered = sorted(entries, key=_is_for_one_size)
    found = [list(_differences(entry, key, placed, mesh)) for entry in ordered]
    closest = min(found, key=len)
    count = f"{len(entries)} earlier signature{'s' if len(entries) > 1 else ''}"
    more = [f"  ... {len(closest) - SHOWN} more"] if len(closest) > SHOWN else []
    lines = [f"{name}: a new signature; the closest of {count} differs in"]
    return "\n".join([*lines, *(f"  {line}" for line in closest[:SHOWN]), *more])


def _differences(entry: Any, key: list[Any], placed: Placed, mesh: Any) -> Iterator[str]:
    """Describe each difference of a call from an earlier one, a line each."""
    if entry.treedef != placed.treedef:
        yield _trees(entry, placed)
    else:
        rows = zip(placed.paths, key, entry.key, strict=True)
        for path, now, before in rows:
            if now != before:
                yield f"{path}: {_text(now)}, was {_text(before)}"
        yield from _sizes(entry, placed)
    yield from _followed(entry, placed)
    states = zip(_compat.SETTINGS, placed.state, entry.state, strict=True)
    for name, now, before in states:
        if now != before and (now or before):
            yield f"{name}: {now}, was {before}"
    if entry.reads is not None and not entry.reads.same():
        for path, before, now in entry.reads.changed():
            is_same = now is before
            text = "its names, keys or layout" if is_same else f"{_said(now)}, was {_said(before)}"
            yield f"closed-over {name_of(path)}: {text}"
    yield from _surroundings(entry, placed.world, mesh)


def _is_for_one_size(entry: Any) -> bool:
    """Return whether a function was captured for the sizes of one call alone."""
    return entry.template is None or not entry.template.sizes.ranges


def _sizes(entry: Any, placed: Placed) -> Iterator[str]:
    """Describe how a call's sizes differ from those that the function was captured for."""
    if entry.fixed and placed.dynamic:
        yield (
            "sizes are constants, because the function cannot be captured with symbolic sizes: "
            f"{entry.fixed}"
        )
    if _is_for_one_size(entry):
        return
    leaves: list[Any] = [None] * len(placed.paths)
    for i, aval in zip(placed.tensors, placed.avals, strict=True):
        leaves[i] = aval
    if not entry.template.takes(leaves):
        return
    needs = entry.template.misfit(leaves)
    if needs is None:
        yield "only sizes differ: shardfn partitions again without a new capture"
    else:
        yield f"shardfn captures again, because the captured function needs {needs}"


def _followed(entry: Any, placed: Placed) -> Iterator[str]:
    """Describe the arguments that autograd follows in only one of two calls."""
    tensors = range(len(entry.paths)) if entry.tensors is None else entry.tensors
    flags = entry.followed or (False,) * len(tensors)
    before = {entry.paths[i] for i, flag in zip(tensors, flags, strict=False) if flag}
    now = {placed.paths[i] for i in placed.followed}
    yield from (
        f"{path}: autograd records it in this call, but did not before"
        for path in placed.paths
        if path in now - before
    )
    yield from (
        f"{path}: autograd does not record it in this call, but did before"
        for path in entry.paths
        if path in before - now
    )


def _trees(entry: Any, placed: Placed) -> str:
    """Describe the difference of two argument trees."""
    new = [p for p in placed.paths if p not in entry.paths]
    gone = [p for p in entry.paths if p not in placed.paths]
    said = [("also", new), ("without", gone)]
    lists = [f"{word} {', '.join(paths[:4])}" for word, paths in said if paths]
    now, before = (_tree.containers(t.treedef) for t in (placed, entry))
    containers = f"{now}, was {before}"
    return f"the arguments: {'; '.join(lists) or containers}"


def _surroundings(entry: Any, world: Any, mesh: Any) -> Iterator[str]:
    """Describe how the world, the mesh or the sharding rules of two calls differ."""
    if entry.world is not world:
        now, before = (f"{w.kind}, of {w.size}" for w in (world, entry.world))
        yield f"the world: {now}, was {before}"
    elif entry.mesh is not mesh:
        now, before = (_mesh(m) for m in (mesh, entry.mesh))
        yield f"the mesh: {now}, was {before}{', another object' * (now == before)}"
    if entry.rules != registry.active():
        yield "the set of rules registered by sf.rule has changed"


def _mesh(mesh: Any) -> str:
    return "none" if mesh is None else str(axes_of(mesh))


def _text(signature: Any) -> str:
    """Print one leaf of a signature: a tensor's metadata and placements, or a constant."""
    meta = getattr(signature, "tensor_meta", None)
    if meta is not None:
        axes = axes_of(signature.mesh)
        marks = marks_of(list(signature.placements), meta.shape, axes)
        return f"{tensor_type(meta.shape, meta.dtype, marks, axes.names)} on {axes}"
    if not any(isinstance(part, torch.Size) for part in signature):
        return _constant(signature)
    shape, stride, dtype, device = signature[-4:]
    dense = layout.dense_strides(shape, range(len(shape)))
    laid = "" if tuple(stride) == dense else f" of strides {tuple(stride)}"
    at = "" if device.type == "cpu" else f" on {device}"
    return f"{tensor_type(shape, dtype)}{laid}{at}"


def _constant(key: Any) -> str:
    if len(key) != 2:
        return _said(key)
    kind, value = key
    if kind is float:
        return repr(float.fromhex(value))
    return _said(getattr(value, "held", value))


def _said(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return tensor_type(x.shape, x.dtype)
    text = repr(x)
    return text if len(text) < 80 else f"{text[:77]}..."
