"""The results of a program: DTensors of local tensors, in the tree that the function returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...capture import Captured
from ...partition import Plan
from ...simulated import SimulatedDTensor
from ...types import TENSOR
from .local_tensors import spec_of
from .placed import Placed

# of local results, and of spare DTensors that they may be put into
Maker = Callable[..., list[Any]]


def maker(placed: Placed, captured: Captured, partition: Plan) -> Maker | None:
    """A function from local results to the results of a call. None if they are the same."""
    if placed.mesh is None:
        return None
    count = captured.program.out_leaves.count(TENSOR)
    (output,) = captured.program.graph.graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.args[0][:count]]
    slots = partition.outs[:count]
    unreduced = {slot.number for slot, _ in partition.unreduced}
    pairs = zip(slots, values, strict=True)
    specs = [spec_of(placed.mesh, slot.marks, value) for slot, value in pairs]
    specs = [
        _compat.unreduced_spec(spec) if slot.number in unreduced else spec
        for spec, slot in zip(specs, slots, strict=True)
    ]
    kind = SimulatedDTensor if placed.is_simulated else DTensor
    make = functools.partial(_compat.dtensors, kind=kind)
    places = _places(placed, specs)

    def made(outs: Any, spares: list[DTensor] | None = None) -> list[Any]:
        if spares is None:
            return make(outs, specs)
        return _compat.calls.placed_again(outs, specs, spares, places, make)

    return made


def _places(placed: Placed, specs: list[Any]) -> tuple[int, ...]:
    """For each result, the donated DTensor that has its shape, strides and dtype, among the
    donated; -1 without one.
    """
    avals = dict(zip(placed.tensors, placed.avals, strict=True))
    rows = [avals[i] for i in placed.donated]
    free: dict[Any, list[int]] = {}
    for k, x in reversed([*enumerate(rows)]):
        key = tuple(x.shape), tuple(x.stride), x.dtype
        free.setdefault(key, []).append(k)
    metas = [spec.tensor_meta for spec in specs]
    keys = [(tuple(x.shape), tuple(x.stride), x.dtype) for x in metas]
    return tuple(free[key].pop() if free.get(key) else -1 for key in keys)


def in_tree(captured: Captured) -> Callable[[list[Any]], Any]:
    """A function from the results of a call to the tree that it returns."""
    tree = captured.program.out_tree
    constants = captured.program.out_leaves
    unflatten = _tree.unflatten
    if all(c is TENSOR for c in constants):
        return lambda outs: unflatten(tree, outs)
    return lambda outs: unflatten(tree, _filled(constants, outs))


def _filled(constants: tuple[Any, ...], outs: list[Any]) -> list[Any]:
    feed = iter(outs)
    return [next(feed) if c is TENSOR else c for c in constants]
