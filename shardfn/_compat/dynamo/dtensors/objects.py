"""Meshes and process groups that Dynamo meets: what a function may ask of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...tracing import neutral
from .calls import DTensors, mesh_variable, read_ours


def _held(owner: Any) -> Any:
    """Return the mesh or group behind a Dynamo variable."""
    held = getattr(owner, "value", None)
    return getattr(held, "real_obj", held)


def _is_known(held: Any) -> bool:
    return isinstance(held, DeviceMesh | dist.ProcessGroup)


def _ours(dtensors: DTensors, held: Any) -> Mapping[str, Callable[..., Any]]:
    """Return our replacements of the methods of a mesh or a group."""
    if isinstance(held, DeviceMesh):
        return dtensors.of_meshes
    return dtensors.of_groups if isinstance(held, dist.ProcessGroup) else {}


def method_called(
    dtensors: DTensors,
    call: Callable[..., Any],
    owner: Any,
    tx: Any,
    name: str,
    args: Any,
    kwargs: Any,
) -> Any:
    """Patch Dynamo's call of a method of a mesh or group, which may ask for the rank."""
    held = _held(owner)
    if isinstance(held, DeviceMesh) and name == "_flatten":
        given = [x.as_python_constant() for x in (*args, *kwargs.values())]
        return mesh_variable(tx, dtensors.flattened(held, *given))
    ours = _ours(dtensors, held)
    if name not in ours:
        return call(owner, tx, name, args, kwargs)
    return read_ours(tx, ours[name], [owner, *args], kwargs)


def attribute_read(
    dtensors: DTensors, read: Callable[..., Any], owner: Any, tx: Any, name: str
) -> Any:
    """Patch Dynamo's read of an attribute of a mesh or group, of which Dynamo knows only some."""
    from torch._dynamo.variables.misc import GetAttrVariable

    held = _held(owner)
    if name in _ours(dtensors, held):
        return GetAttrVariable(owner, name)
    if isinstance(held, DeviceMesh) and name == "mesh":
        with neutral():
            rows = held.mesh
        return read_ours(tx, torch.tensor, [rows.tolist()], _options(tx, rows.dtype))
    return read(owner, tx, name)


def _options(tx: Any, dtype: torch.dtype) -> dict[str, Any]:
    from torch._dynamo.variables.base import VariableTracker

    build = VariableTracker.build
    return {"dtype": build(tx, dtype), "device": build(tx, torch.device("cpu"))}


def has_attribute(_: DTensors, asked: Callable[..., Any], owner: Any, tx: Any, name: str) -> Any:
    """Patch hasattr of a mesh or group, which Dynamo would ask of its stand-in."""
    from torch._dynamo.variables.base import VariableTracker

    held = _held(owner)
    if _is_known(held):
        return VariableTracker.build(tx, hasattr(held, name))
    return asked(owner, tx, name)


def text_of(_: DTensors, read: Callable[..., Any], owner: Any, tx: Any) -> Any:
    """Patch repr of a mesh or group, which Dynamo would take from its stand-in."""
    from torch._dynamo.variables.base import VariableTracker

    held = _held(owner)
    if _is_known(held):
        return VariableTracker.build(tx, repr(held))
    return read(owner, tx)


def str_of(dtensors: DTensors, call: Callable[..., Any], builtin: Any, tx: Any, x: Any) -> Any:
    """Patch str() in Dynamo, for a mesh or a group."""
    return text_of(dtensors, lambda owner, tx: call(builtin, tx, owner), x.realize(), tx)


def context_entered(dtensors: DTensors, enter: Callable[..., Any], tx: Any, *args: Any) -> Any:
    """Patch Dynamo's `with` statement, which may enter a mesh."""
    if isinstance(_held(tx.stack[-1]), DeviceMesh):
        in_mesh = dtensors.functions[DeviceMesh.__enter__]
        tx.push(read_ours(tx, in_mesh, [tx.pop()], {}))
    return enter(tx, *args)
