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

Maker = Callable[[list[Any]], list[Any]]


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
    return lambda outs: make(outs, specs)


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
