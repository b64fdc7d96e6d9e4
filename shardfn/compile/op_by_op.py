"""`op_by_op`: the rewrite of a graph that runs op by op. A view runs as a reshape, which copies
where memory has other strides than torch's fake kernel predicted.

Of two operands with different orders of strides, fake kernels follow one and kernels the other
(torch 2.13: copysign, floor_divide, and others). A view that capture has found possible is then
not possible when it runs.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..ops.loops import Loop
from ..schedule import copied

aten = torch.ops.aten
RUN_AS = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


def run_as(target: Any) -> Any:
    """Return the op that runs in place of another: reshape for view."""
    return RUN_AS.get(target, target)


class WrittenComplex(complex):
    """A complex number whose text is Python: that of a plain one may be (1+nanj)."""

    def __repr__(self) -> str:
        return f"complex(float('{self.real}'), float('{self.imag}'))"


def _written(x: Any) -> Any:
    return WrittenComplex(x) if type(x) is complex else x


def op_by_op(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Replace views by reshapes in a graph, in place, and in copies of the graphs of its loops.
    The generated code can write all its complex numbers.

    Returns:
        The graph.
    """
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            inner = tuple(op_by_op(copied(x)) for x in node.target.graphs)
            node.target = attrs.evolve(node.target, graphs=inner)
        else:
            node.target = run_as(node.target)
            node.args = tuple(map(_written, node.args))
    return graph
