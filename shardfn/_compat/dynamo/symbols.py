"""Fake tensors whose sizes are symbols, for code that is compiled for many sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..settings import of_fakes
from ..strides import have_other_strides
from ..tracing import FakeTensorMode
from .sizes import Noted, Sizes, conditions_of


class Symbols:
    """Symbols for some sizes, in a mode of their own.

    Args:
        hints: an example of each size, 2 or more.
    """

    def __init__(self, hints: Sequence[int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        with of_fakes():
            self.env = ShapeEnv()
            self.mode = FakeTensorMode(shape_env=self.env)
        self.sizes: list[Any] = []
        for k, hint in enumerate(hints):
            source = ConstantSource(f"size_{k}")
            symbol = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            size = self.env.create_symintnode(symbol, hint=hint, source=source)
            self.sizes.append(size)

    def empty(
        self, like: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any]
    ) -> torch.Tensor:
        """Make a fake tensor of these sizes, with the dtype and device of another."""
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)

    def conditions(self, inputs: Sequence[torch.Tensor]) -> Sizes:
        """Collect the size conditions under which code compiled for these inputs is right."""
        made: dict[int, Any] = {id(x): x for x in inputs}
        return conditions_of(self.env, inputs, Noted(made, {}))


class Sized(torch.fx.Interpreter):
    """Runs a graph with other arguments of its nodes.

    Args:
        graph: the graph.
        given: for a node, its arguments, of values.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, given: Callable[[torch.fx.Node], tuple[Any, Any]]
    ) -> None:
        super().__init__(graph)
        self.given = given

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node of the graph.

        Raises:
            ValueError: a trace gives it other strides than its op has.
        """
        result = super().run_node(n)
        if have_other_strides(result, n.meta.get("val")):
            raise ValueError(f"the decomposition of {n} returns other strides than the op")
        return result

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.given(n)
        return self.map_nodes_to_values((args, kwargs), n)
