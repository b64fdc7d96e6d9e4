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
from ..capture.strided import refuse_unstrided
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
    try:
        key = [x._spec if type(x) is DTensor else _signature(x) for x in leaves]
    except (RuntimeError, NotImplementedError):  # of a tensor that has no strides
        refuse_unstrided(request.name, leaves, _tree.argument_paths(request.signature_of, args, kwargs))
        raise
    world, mesh, rules = current_world(), request.mesh or current_mesh(), registered.active()
    for entry in request.entries:
        if entry.key == key and entry.treedef == treedef and entry.world is world and entry.mesh is mesh and entry.rules == rules:
            if torch.is_grad_enabled() and any(map(REQUIRES_GRAD, entry.watched(leaves))):
                break
            if _compat.in_dual_level():
                break
            entry.key[:] = key  # equal specs become the same ones, which compare at once the next time
            return entry.run(leaves)
    with _compat.staging():
        entry = _staged_meanwhile(request, leaves, treedef, key, mesh) or _stage(request, args, kwargs, key, mesh)
    return entry.run(leaves)


def _staged_meanwhile(request: Request, leaves: list[Any], treedef: Any, key: list[Any], mesh: Any) -> Entry | None:
    """What another thread has staged for this signature while this one waited for its turn."""
    if _compat.in_dual_level():
        return None
    world, rules, follows = current_world(), registered.active(), torch.is_grad_enabled()
    for entry in list(request.entries):
        same = entry.treedef == treedef and entry.key == key and entry.rules == rules
        if same and entry.world is world and entry.mesh is mesh:
            return None if follows and any(map(REQUIRES_GRAD, entry.watched(leaves))) else entry
    return None


def _signature(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x)


def _stage(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any], mesh: Any) -> Entry:
    traced = trace(request, args, kwargs)
    entries = request.entries
    if entries:
        log.info("%s: staged anew: %s", request.name, _why(key, entries[0].key, traced.placed.paths))
    compiled = traced.lower().compile()
    placed = traced.placed
    some = None if len(placed.tensors) == placed.treedef.num_leaves else placed.tensors
    run, suspects = checked(compiled.run, request, placed), list(traced.captured.outside.suspects())
    entry = Entry(key, placed.treedef, placed.world, mesh, registered.active(), some, suspects, run)
    entries[:] = [entry, *entries[: KEPT_SIGNATURES - 1]]  # at once: other threads read it
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
    suspects: list[torch.Tensor]  # closed over, and not to require grad
    run: Callable[[list[Any]], Any]

    def watched(self, leaves: list[Any]) -> list[Any]:
        """The tensors whose gradients would be lost: arguments, and what the function closes over."""
        tensors = leaves if self.tensors is None else [leaves[i] for i in self.tensors]
        return tensors + self.suspects if self.suspects else tensors
