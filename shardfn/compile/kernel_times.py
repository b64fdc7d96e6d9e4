"""`kernel_seconds`: the time of the ops of a graph as Inductor's fused kernels.

A fused kernel reads each of its inputs once and writes the values that others read. It does no
arithmetic that takes longer than that. Products, attention, sorts and scatters run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from ..hardware import Hardware
from ..inspect.memory import PACK
from ..inspect.timeline.clock import Prices
from ..partition.planner import op_cost
from .kernels import Kernel, Kernels

aten = torch.ops.aten
# Their parts are written to the right place by the kernels that compute them.
GATHERS_PARTS = {aten.cat.default, aten.stack.default, PACK}


def prices_as_run(backend: str) -> Prices | None:
    """Return the prices of ops as a backend runs them: None for one that runs each as a kernel."""
    return kernel_seconds if backend == "inductor" else None


def kernel_seconds(graph: Graph, hardware: Hardware) -> dict[Node, float]:
    """Return the seconds of each op. Those of a fused kernel stand at its first op; the others of
    it take none.

    Args:
        graph: of one rank, without those of its loops.
        hardware: the model.

    Source: the kernels are those whose memory `memory_as_run` counts.
    """
    model = Kernels(graph)
    seconds = dict.fromkeys(graph.nodes, 0.0)
    for kernel in model.kernels:
        first = kernel.nodes[0]
        if kernel.loop:
            moved = _read_bytes(model, kernel) + _written_bytes(model, kernel)
            seconds[first] = hardware.compute(0.0, moved, torch.float32)
        elif first.target in GATHERS_PARTS:
            moved = 2 * sum(map(_nbytes, _parts_to_copy(model, first)))
            seconds[first] = hardware.compute(0.0, moved, torch.float32) if moved else 0.0
        else:
            seconds[first] = op_cost.seconds(first, hardware)
    return seconds


def _read_bytes(model: Kernels, kernel: Kernel) -> float:
    """Return the bytes that a fused kernel reads: of each stored value, the views that it needs."""
    views = dict.fromkeys(x for node in kernel.nodes for x in _stored_inputs(model, node))
    read: dict[Node, int] = {}
    for view in views:
        base = model.base[view]
        if model.kernel.get(base) is not kernel:
            read[base] = read.get(base, 0) + _nbytes(view)
    return sum(min(nbytes, _nbytes(base)) for base, nbytes in read.items())


def _written_bytes(model: Kernels, kernel: Kernel) -> float:
    """Return the bytes that a fused kernel writes: the values that other kernels read, and results
    of the graph.
    """
    results = {model.base[x] for x in model.results if x is not None}
    is_read = lambda x: any(reader is not kernel for reader in model.readers.get(x, ()))
    written = {model.base[x] for x in kernel.nodes}
    return sum(_nbytes(x) for x in written if x in results or is_read(x))


def _stored_inputs(model: Kernels, node: Node) -> Iterator[Node]:
    """Yield the stored values, or views of them, that an op reads, also through elementwise values
    that it computes itself.
    """
    queue = [node]
    seen = set[Node]()
    while queue:
        for x in queue.pop().all_input_nodes:
            if model.base[x] not in model.formulas:
                yield x
            elif model.base[x] not in seen:
                seen.add(model.base[x])
                queue.append(model.base[x])


def _parts_to_copy(model: Kernels, node: Node) -> list[Node]:
    """Return the parts of a concatenation that no fused kernel writes to their place."""
    is_written_there = lambda x: model.base[x] in model.kernel and model.kernel[model.base[x]].loop
    return [x for x in node.all_input_nodes if not is_written_there(x)]


def _nbytes(node: Node) -> int:
    return op_cost.nbytes(node.meta.get("val"))
