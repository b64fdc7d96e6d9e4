"""Stage 5: the call path. Between two calls of one signature it is a look-up, a run, and a wrapping of results."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat, _tree
from ..capture.leaks import leaked
from ..mesh import current_mesh
from ..partition import registered
from ..world import World, current_world
from .door import checked
from .request import Request
from .stages import trace

log = logging.getLogger("shardfn")
KEPT_SIGNATURES = 64
REQUIRES_GRAD = operator.attrgetter("requires_grad")


def call(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a transformed function on arguments, staging it first if their signature is new."""
    leaves, treedef = _tree.flatten((args, kwargs))
    key = [x._spec if type(x) is DTensor else _signature(x) for x in leaves]
    world, mesh, rules = current_world(), request.mesh or current_mesh(), registered.active()
    for entry in request.entries:
        if entry.key == key and entry.treedef == treedef and entry.world is world and entry.mesh is mesh and entry.rules == rules:
            if torch.is_grad_enabled() and any(map(REQUIRES_GRAD, entry.tensors_of(leaves))):
                break
            entry.key[:] = key  # equal specs become the same ones, which compare at once the next time
            return entry.run(leaves)
    out = _stage(request, args, kwargs, key, mesh).run(leaves)
    if any(isinstance(x, torch.Tensor) and _compat.is_fake(x) for x in _tree.leaves(out)):
        raise leaked(f"{request.name}, its result")
    return out


def _signature(x: Any) -> Any:
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return x.shape, x.stride(), x.dtype, x.device
    return (kind, x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (kind, x)


def _stage(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any], mesh: Any) -> Entry:
    traced = trace(request, args, kwargs)
    entries = request.entries
    if entries:
        log.info("%s: staged anew: %s", request.name, _why(key, entries[0].key, traced.placed.paths))
    compiled = traced.lower().compile()
    placed = traced.placed
    some = None if len(placed.tensors) == placed.treedef.num_leaves else placed.tensors
    entry = Entry(key, placed.treedef, placed.world, mesh, registered.active(), some, checked(compiled.run, request, placed))
    entries.insert(0, entry)
    del entries[KEPT_SIGNATURES:]
    return entry


def _why(key: list[Any], before: list[Any], paths: tuple[str, ...]) -> str:
    changed = [p for p, a, b in zip(paths, key, before, strict=False) if a != b]
    return f"another signature of {', '.join(changed[:4])}" if changed else "another tree, mesh, world or rule"


@attrs.frozen(eq=False)
class Entry:
    """One signature, ready to be called."""

    key: list[Any]
    treedef: Any
    world: World
    mesh: Any
    rules: tuple[registered.Registered, ...]  # that the program was partitioned by
    tensors: tuple[int, ...] | None  # which leaves are tensors; None for all
    run: Callable[[list[Any]], Any]

    def tensors_of(self, leaves: list[Any]) -> list[Any]:
        """The leaves that are tensors."""
        return leaves if self.tensors is None else [leaves[i] for i in self.tensors]
