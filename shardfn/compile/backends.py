"""The two backends: Inductor, and `aten`, which runs the graph as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _compat, higher_order

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # takes the inputs, empties the list


def aten(graph: torch.fx.GraphModule) -> Runner:
    """Run the graph op by op; starts at once."""

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            values = list(inputs)
            inputs.clear()
            return graph(*values)

    return run


def inductor(graph: torch.fx.GraphModule) -> Runner:
    """Compile the graph: C++ on CPU, Triton on CUDA."""
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return _compat.inductor(higher_order.unfold(graph), fakes)


BACKENDS: dict[str, Callable[[torch.fx.GraphModule], Runner]] = {"aten": aten, "inductor": inductor}


def donate(graph: torch.fx.GraphModule, pairs: dict[int, int]) -> Any:
    """The graph with outputs written into the memory of donated inputs.

    Args:
        graph: a local graph.
        pairs: output position -> input position (among the placeholders) of a donated input of the same layout.
    """
    holders, (output,) = graph.graph.find_nodes(op="placeholder"), graph.graph.find_nodes(op="output")
    results = list(output.args[0])
    with graph.graph.inserting_before(output):
        for out, into in pairs.items():
            written = graph.graph.call_function(torch.ops.aten.copy_.default, (holders[into], results[out]))
            written.meta["val"] = holders[into].meta["val"]
            results[out] = written
    output.args = (results,)
    graph.recompile()
    return graph
