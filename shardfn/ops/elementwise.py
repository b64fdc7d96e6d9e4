"""`Elementwise`: ops that work element by element, as one op of a Program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from .. import _compat

aten = torch.ops.aten
POINTWISE = torch.Tag.pointwise
RANDOM = torch.Tag.nondeterministic_seeded
# Ops that torch does not tag as pointwise: a cast, and a number.
UNTAGGED = {aten._to_copy.default, aten.scalar_tensor.default}


@attrs.frozen(eq=False, repr=False)
class Elementwise:
    """A repeated block of elementwise ops, such as the step of an optimizer for one kind of
    parameter. It takes tensors that broadcast, and returns a list of tensors.

    A Program calls it once for each copy. A rank's program has its ops.

    Args:
        graph: functional ATen, of fake tensors.
        name: in printed programs.
    """

    graph: torch.fx.Graph
    name: str
    tags = (POINTWISE,)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        module = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        return torch.fx.Interpreter(module).run(*tensors)

    def __repr__(self) -> str:
        return self.name

    @property
    def __name__(self) -> str:
        return self.name

    def traced(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add a call to the active make_fx trace, which knows the inputs."""
        results: Any = self.graph.output_node().args[0]
        layouts = [node.meta["val"] for node in results]
        meta = {**results[0].meta, "val": layouts}
        return _compat.call_traced(self, meta, tuple(inputs), range(len(layouts)))

    def values(
        self, mode: _compat.FakeTensorMode, inputs: Sequence[torch.Tensor]
    ) -> dict[torch.fx.Node, torch.Tensor]:
        """Compute the fake value of each op for some fake inputs."""
        feed = iter(inputs)
        values: dict[torch.fx.Node, torch.Tensor] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "call_function":
                fakes = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _compat.result_of(mode, node.target, *fakes)
        return values


def is_elementwise(graph: torch.fx.Graph) -> bool:
    """Return whether each op of a graph works element by element on its inputs, and returns what no
    input is.
    """
    inputs = set(graph.find_nodes(op="placeholder"))
    results: Any = graph.output_node().args[0]
    calls = [node for node in graph.nodes if node not in inputs and node.op != "output"]
    return all(map(_is_elementwise, calls)) and inputs.isdisjoint(results)


def _is_elementwise(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or RANDOM in tags:
        return False
    if node.target is aten.scalar_tensor.default:
        return not value.dim()
    return POINTWISE in tags or node.target in UNTAGGED
