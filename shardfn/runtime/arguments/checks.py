"""Checks of a call's arguments: their number, their classes, and gradients that would be lost."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ... import _compat, _tree, argnums, tree_pairs
from ...capture.closure.closed_over import lost_tangent
from ...capture.dtensors.checks import needs_ranks
from ...capture.dtensors.flattened import home_of
from ...capture.refusals.leaks import LeakedTensor, leaked
from ...errors import ShardError, TreeError, call_site
from ...mesh import current_mesh, mesh_of_world
from ...simulated import DonatedTensor, SimulatedTensor, UnreadTensor, used_after_donation
from ...types import CONSTANTS, ShapeDtype
from ..options import Request

SHOWN = 4  # paths in an error
WITH_VALUES = (
    "sf.init(module_fn, mesh, placements, key) or module.to_empty(device=...), which make them; "
    "trace and lower need none"
)


def check_call(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Check the arguments against the signature, as Python does. Returns which are static and
    which are donated.
    """
    signature = argnums.signature_of(request.signature_of)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        source, fix = call_site(), f"the arguments of {signature}"
        raise TreeError.of(request.name, str(error), fix=fix, source=source) from None
    static = argnums.of_call(
        request.name, "static_argnums", request.static_argnums, args, kwargs, signature
    )
    donated = argnums.of_call(
        request.name, "donate_argnums", request.donate_argnums, args, kwargs, signature
    )
    argnums.refuse_static(request.name, static, donated, args)
    return static, donated


def refuse_classes(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], static: Sequence[int]
) -> None:
    """Refuse containers of user classes that are registered as pytrees but unknown to Dynamo.

    Raises:
        TreeError: names each.
    """
    roots, every = _roots(request, args, kwargs), (*args, *kwargs.values())
    rows = enumerate(zip(roots, every, strict=True))
    given = [(root, x) for i, (root, x) in rows if i not in static]
    wrong = [(path, kind) for root, x in given for path, kind in tree_pairs.classes(x, root)]
    if wrong:
        source, fix = (call_site(), "a dict, list, tuple or NamedTuple of its tensors")
        lines = [f"{path} is a {kind}" for path, kind in wrong]
        needed = "dict, OrderedDict, defaultdict, list, tuple, NamedTuple or deque"
        raise TreeError.of(
            request.name, *lines, needed=needed, fix=fix, source=source, arg_path=wrong[0][0]
        )


def check_leaves(request: Request, leaves: list[Any], paths: list[str], static: set[int]) -> None:
    for i, (x, path) in enumerate(zip(leaves, paths, strict=True)):
        where = f"{request.name}, argument {path}"
        if isinstance(x, DonatedTensor) or (
            isinstance(x, DTensor) and isinstance(_compat.local_tensor(x), DonatedTensor)
        ):
            raise used_after_donation(getattr(x, "call", None) or _compat.local_tensor(x).call)
        if isinstance(x, torch.Tensor):
            if isinstance(x, LeakedTensor) or _compat.is_fake(x):
                raise leaked(where)
            _refuse_foreign(where, path, x)
            if isinstance(x, (SimulatedTensor, UnreadTensor)):
                raise _of_each_rank(request, where, path, x, leaves)
            if request.differentiated is None:
                refuse_lost_gradient(where, path, x)
            refuse_lost_tangent(where, x)
        elif (
            not isinstance(x, (*CONSTANTS, ShapeDtype, DeviceMesh))
            and not _is_function(x)
            and i not in static
        ) or _is_numpys(x):
            fix, source = _instead(x, path), call_site()
            module = "numpy." if type(x).__module__ == "numpy" else ""
            got, needed = f"a {module}{type(x).__name__}", "a tensor or a constant"
            raise TreeError.of(where, got, needed=needed, fix=fix, source=source, arg_path=path)


def check_holders(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a tensor that holds others if its gradient would be lost."""
    given = (*args, *kwargs.values())
    for root, arg in zip(_roots(request, args, kwargs), given, strict=True):
        for way, x in _tree.holders(arg):
            path = root + way
            where = f"{request.name}, argument {path}"
            refuse_lost_gradient(where, path, x)
            refuse_lost_tangent(where, x)


def _roots(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The path of each argument."""
    marks = (0,) * len(args), dict.fromkeys(kwargs, 0)
    return _tree.argument_paths(request.signature_of, *marks)


def refuse_lost_gradient(where: str, path: str, x: torch.Tensor) -> None:
    """Refuse an argument whose gradient would be lost.

    Raises:
        ShardError: saying how to differentiate.
    """
    if x.requires_grad and torch.is_grad_enabled():
        fix = (
            "differentiate inside with shardfn's grad, and pass x.detach(), or call it under "
            "torch.no_grad()"
        )
        got, source = ("it requires grad, and autograd would not see through the call", call_site())
        raise ShardError.of(where, got, fix=fix, source=source, arg_path=path)


def refuse_lost_tangent(where: str, x: torch.Tensor) -> None:
    """Refuse an argument whose tangent would be lost.

    Raises:
        ShardError: saying how to take tangents.
    """
    if _compat.in_dual_level() and _compat.has_tangent(x):
        raise lost_tangent(where)


def refuse_without_values(
    name: str, values: Sequence[Any], paths_of: Callable[[], Sequence[str]]
) -> None:
    """Refuse to run on tensors of the meta device and on ShapeDtypes. `trace` and `lower` take
    them.

    Args:
        name: of the function.
        values: arguments, or what the function closes over.
        paths_of: returns the path of each.

    Raises:
        TreeError: names each.
    """
    shapes = [i for i, x in enumerate(values) if isinstance(x, ShapeDtype)]
    lacking = shapes or [i for i, x in enumerate(values) if _is_on_meta(x)]
    if not lacking:
        return
    paths = paths_of()
    wrong = [paths[i] for i in lacking]
    more = [f"{len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    names = ", ".join([*wrong[:SHOWN], *more])
    raise TreeError.of(
        name,
        f"{'ShapeDtypes' if shapes else 'on the meta device'}, without values: {names}",
        needed="tensors with values, to run",
        fix=WITH_VALUES,
        source=call_site(),
        arg_path=wrong[0],
    )


def _is_on_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def _is_numpys(x: Any) -> bool:
    """Whether x is numpy's str or bytes, which Dynamo takes for an array."""
    return isinstance(x, (str, bytes)) and type(x).__module__ == "numpy"


def _of_each_rank(
    request: Request, where: str, path: str, x: torch.Tensor, leaves: list[Any]
) -> ShardError:
    """The error for each rank's own tensor, which only the code of one rank takes."""
    meshes = [request.mesh, *(y.device_mesh for y in leaves if isinstance(y, DTensor))]
    mesh = next((m for m in (*meshes, current_mesh()) if m is not None), None)
    mesh = mesh_of_world(x.device.type) if mesh is None else mesh
    count = len(x.shards) if isinstance(x, SimulatedTensor) else mesh.size()
    if request.may_be_of_ranks and count == home_of(mesh).size():
        error = needs_ranks(where, mesh)
        error.is_for_good = False
        return error
    fix = "sf.from_local(x, mesh, placements), a DTensor; or sf.jit, for code of one rank"
    got = f"a {type(x).__name__}, the local tensors of {count} ranks"
    needed = "a global tensor or a DTensor"
    return TreeError.of(where, got, needed=needed, fix=fix, arg_path=path)


def _refuse_foreign(where: str, path: str, x: torch.Tensor) -> None:
    """Refuse a tensor subclass, since its result would be a plain tensor."""
    if not _compat.is_foreign(x) or isinstance(x, DTensor):
        return
    fix, source = f"{path}.as_subclass(torch.Tensor)", call_site()
    got = f"a {type(x).__name__}, a subclass of torch.Tensor"
    raise TreeError.of(
        where, got, needed="a plain tensor or a DTensor", fix=fix, source=source, arg_path=path
    )


def _is_function(x: Any) -> bool:
    """Whether x is code. An object with `__call__` is not, since it may change between calls."""
    known = isinstance(
        x,
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type),
    )
    return known or (
        callable(x)
        and (hasattr(x, "__wrapped__") or (type(x).__module__ or "").startswith("torch._ops"))
    )


def _instead(x: Any, path: str) -> str:
    """A suggestion of what to pass instead of an object."""
    kind = type(x).__name__
    if isinstance(x, torch.nn.Module):
        if any(isinstance(p, DTensor) for p in x.parameters()):
            return "a function that closes over the module; or static_argnums of jit"
        return (
            "fn, params, buffers = sf.functionalize(module), and its params and buffers as "
            "arguments"
        )
    if path == "self":
        bound = "the transform of the bound method, which is read when it is captured"
        return f"{bound}; static_argnums=0 of jit or shard; or {kind} a NamedTuple"
    if isinstance(x, (slice, range, set, frozenset, type(...))):
        return f"static_argnums of jit or shard; or close over the {kind}"
    if type(x).__module__ == "numpy":
        return "torch.as_tensor(x); or x.item() for a constant"
    return (
        "torch.as_tensor(x) for arrays; a dict, list, tuple or NamedTuple for a class that "
        "holds tensors"
    )
