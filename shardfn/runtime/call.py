"""Stage 5: the call path. Between two calls of one signature it is a look-up, a run, and a wrapping of results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat, _tree
from ..mesh import all_coordinates, current_mesh
from ..types import TENSOR
from ..world import World, current_world
from . import cache
from .door import reader, spec_of
from .request import Request
from .simulated import DonatedTensor, SimulatedTensor, UnreadTensor
from .simulator import simulate
from .stages import Compiled, argument_of, trace

log = logging.getLogger("shardfn")
KEPT_SIGNATURES = 64


def call(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a transformed function on arguments, staging it first if their signature is new."""
    leaves, treedef = _tree.flatten((args, kwargs))
    key = [x._spec if type(x) is DTensor else _signature(x) for x in leaves]
    world, mesh = current_world(), request.mesh or current_mesh()
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor))
    if not grad:
        for entry in cache.entries(request):
            if entry.key == key and entry.treedef == treedef and entry.world is world and entry.mesh is mesh:
                return entry.run(leaves)
    return _stage(request, args, kwargs, key, mesh).run(leaves)


def _signature(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x)


def _stage(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any], mesh: Any) -> Entry:
    traced = trace(request, args, kwargs)
    entries = cache.entries(request)
    if entries:
        log.info("%s: staged anew: %s", request.name, _why(key, entries[0].key, traced.placed.paths))
    compiled = traced.lower().compile()
    entry = ready(compiled, _tree.leaves((args, kwargs)), key, mesh)
    entries.insert(0, entry)
    del entries[KEPT_SIGNATURES:]
    return entry


def _why(key: list[Any], before: list[Any], paths: tuple[str, ...]) -> str:
    changed = [p for p, a, b in zip(paths, key, before, strict=False) if a != b]
    return f"another signature of {', '.join(changed[:4])}" if changed else "another tree, mesh or world"


@attrs.frozen(eq=False)
class Entry:
    """One signature, ready to be called."""

    key: list[Any]
    treedef: Any
    world: World
    mesh: Any
    execute: Callable[[list[Any]], list[Any]]  # all leaves -> local results
    wrap: Callable[[list[Any]], Any]  # local results -> the result tree
    donate: Callable[[list[Any], list[Any]], list[Any]] | None  # takes the arguments away from the caller

    def run(self, leaves: list[Any]) -> Any:
        outs = self.execute(leaves)
        if self.donate is not None:
            outs = self.donate(leaves, outs)
        return self.wrap(outs)


def ready(compiled: Compiled, leaves: list[Any], key: list[Any], mesh: Any) -> Entry:
    """Everything about a call that its signature decides, decided."""
    placed = compiled.lowered.traced.placed
    return Entry(
        key=key,
        treedef=placed.treedef,
        world=placed.world,
        mesh=mesh,
        execute=_executor(compiled, leaves),
        wrap=_wrapper(compiled),
        donate=_donor(compiled),
    )


def _executor(compiled: Compiled, leaves: list[Any]) -> Callable[[list[Any]], list[Any]]:
    traced = compiled.lowered.traced
    placed, closed = traced.placed, traced.captured.closed_over
    if placed.mesh is not None and placed.world.kind == "simulated":
        return _simulated(compiled, leaves)
    if placed.mesh is not None and placed.world.kind == "fake":
        return _unread(compiled)
    run = compiled.run
    assert run is not None
    coords = _coordinate_tensors(placed)
    if len(placed.tensors) == len(leaves) and not closed and all(type(x) is DTensor for x in leaves):
        return lambda leaves: run([*coords, *[x._local_tensor for x in leaves]])
    readers = [(i, reader(leaves[i], m, placed)) for i, m in zip(placed.tensors, placed.marks, strict=True)]
    return lambda leaves: run([*coords, *[read(leaves[i]) for i, read in readers], *closed])


def _coordinate_tensors(placed: Any) -> list[torch.Tensor]:
    coordinate = placed.mesh.get_coordinate() if placed.mesh is not None else ()
    return [torch.tensor(c, device=placed.mesh.device_type) for c in coordinate]


def _simulated(compiled: Compiled, leaves: list[Any]) -> Callable[[list[Any]], list[Any]]:
    traced = compiled.lowered.traced
    placed, closed = traced.placed, traced.captured.closed_over
    everyone = all_coordinates(placed.axes)
    programs = [compiled.lowered.programs[c] for c in everyone]
    readers = [(i, reader(leaves[i], m, placed)) for i, m in zip(placed.tensors, placed.marks, strict=True)]

    def execute(leaves: list[Any]) -> list[Any]:
        columns = [read(leaves[i]) for i, read in readers]
        inputs = [[*(column[r] for column in columns), *closed] for r in range(len(everyone))]
        results = simulate(programs, inputs, everyone)
        return [SimulatedTensor(shards, placed.world.rank) for shards in zip(*results, strict=True)]

    return execute


def _unread(compiled: Compiled) -> Callable[[list[Any]], list[Any]]:
    """A world without values: the results' shapes are known, and nothing runs."""
    (output,) = compiled.lowered.program.graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.args[0]]
    return lambda leaves: [UnreadTensor(v) for v in values]


def _wrapper(compiled: Compiled) -> Callable[[list[Any]], Any]:
    traced = compiled.lowered.traced
    placed, program = traced.placed, traced.program
    tree, constants = program.out_tree, program.out_leaves
    if placed.mesh is None:
        return lambda outs: _tree.unflatten(tree, _filled(constants, outs))
    (output,) = program.graph.graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.args[0]]
    specs = [spec_of(placed.mesh, slot.marks, v) for slot, v in zip(compiled.lowered.plan.outs, values, strict=True)]
    make, unflatten = _compat.dtensor, _tree.unflatten
    if all(c is TENSOR for c in constants):
        return lambda outs: unflatten(tree, [make(x, s) for x, s in zip(outs, specs, strict=True)])
    return lambda outs: unflatten(tree, _filled(constants, [make(x, s) for x, s in zip(outs, specs, strict=True)]))


def _filled(constants: tuple[Any, ...], outs: list[Any]) -> list[Any]:
    feed = iter(outs)
    return [next(feed) if c is TENSOR else c for c in constants]


def _donor(compiled: Compiled) -> Callable[[list[Any], list[Any]], list[Any]] | None:
    """Take donated arguments away: whoever uses one afterwards learns which call took it."""
    placed, request = compiled.lowered.traced.placed, compiled.lowered.traced.request
    taken = [i for i in placed.tensors if argument_of(placed, i) in request.donate_argnums]
    if not taken:
        return None

    def donate(leaves: list[Any], outs: list[Any]) -> list[Any]:
        mine = {id(leaves[i]) for i in taken}
        outs = [x.detach() if id(x) in mine else x for x in outs]  # a result in a donated tensor's memory
        for i in taken:
            x = leaves[i]
            if isinstance(x, DTensor):
                x._local_tensor = DonatedTensor(x._local_tensor, request.name)
                x._spec = _compat.dtensor_spec(x.device_mesh, x.placements, x.shape, x.stride(), x.dtype)
            else:
                torch.utils.swap_tensors(x, DonatedTensor(x, request.name))
        return outs

    return donate
