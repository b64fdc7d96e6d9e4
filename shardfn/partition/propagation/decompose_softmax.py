"""Ops that capture does not decompose, for speed. Propagation decomposes them if the dim that
they work along is sharded.

Then only their reductions are sent: for a softmax, one maximum and one sum for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _compat
from .. import layout
from ..plan import Slot
from ..rule_api.strategy import OpCall

aten = torch.ops.aten

ALONG = {
    aten._softmax.default: 1,
    aten._softmax_backward_data.default: 2,
}  # op -> the position of its dim argument


def works_along_sharded_dim(
    call: OpCall, held: Sequence[Sequence[Slot]], sizes: Sequence[int]
) -> bool:
    """Return whether a softmax works along a dim on which some input is sharded in all its
    slots.

    Args:
        call: the op.
        held: the slots of each input.
        sizes: the sizes of the mesh.
    """
    if call.target not in ALONG or not call.ins[0].dim():
        return False
    dim = call.args[ALONG[call.target]] % call.ins[0].dim()
    cuts = lambda slot: any(
        n > 1 and (layout.split(m) or (None,))[0] == dim
        for m, n in zip(slot.placements, sizes, strict=True)
    )
    return any(slots and all(map(cuts, slots)) for slots in held)


def decomposed(call: OpCall, node: torch.fx.Node) -> torch.fx.Graph:
    """Trace the decomposition of an op into smaller ops, with the op's metadata."""

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        feed = iter(tensors)
        args, kwargs = torch.fx.node.map_arg((call.args, call.kwargs), lambda n: next(feed))
        return call.target(*args, **kwargs)

    graph = _compat.trace_aten(
        whole, call.ins, {call.target: _compat.core_decompositions()[call.target]}
    ).graph
    keys = "source", "module", "phase", "custom"
    about = {key: node.meta[key] for key in keys if key in node.meta}
    for inner in graph.nodes:
        inner.meta.update(about)
    return graph
