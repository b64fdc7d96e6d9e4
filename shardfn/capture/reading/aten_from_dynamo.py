"""Dynamo's graph of a function, replayed under make_fx: a graph of ATen ops."""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat, _tree
from ...ops import higher_order
from ...random import ambient
from ..aten_trace import functional_graph, lifted_constants
from ..closure import closed_over_tensors
from ..closure.closed_over_inputs import (
    closed_over_inputs,
    fake_of_closed_over,
    refuse_closed_over_classes,
)
from ..inputs import Inputs
from ..refusals import tensor_subclasses
from ..replay import Replay
from ..result_tree import Result
from ..rewrites import sparse_borders
from ..shard_map import axis_names as named


class _Flat:
    """A function that Dynamo has read, as a function of flat tensors, the random state last.

    Args:
        python: Dynamo's graph.
        inputs: of the capture.
        outside: the tensors that the function closes over.
    """

    def __init__(
        self, python: torch.fx.GraphModule, inputs: Inputs, outside: closed_over_tensors.ClosedOver
    ) -> None:
        self.python, self.inputs = python, inputs
        self.positional = inputs.positional
        self.entering = (*inputs.tensors, *outside.tensors)
        self.result: Result | None = None
        self.ends: set[int] = set()  # the leaves that a gradient of a result reaches
        self.calls = 0  # random calls

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.entering, values[:-1], strict=True)
        source = ambient.Traced(values[-1])
        with ambient.drawing_from(source):
            known = {id(x): v for x, v in pairs}
            out = _replayed(self.python, self.positional, known)
        out = _tree.map_held(sparse_borders.split_held, out)
        _tree.learn(out)
        tensor_subclasses.refuse_results(out, self.inputs.name)
        tensor_subclasses.refuse_unheld_tensors(out, self.inputs.name)
        self.result, self.calls = Result.of(out), source.calls
        leaves = list(filter(_tree.is_tensor, _tree.leaves(out)))
        self.ends = closed_over_tensors.leaves_reached(leaves)
        return leaves


def flatten(
    python: torch.fx.GraphModule, inputs: Inputs, mode: _compat.FakeTensorMode
) -> tuple[torch.fx.GraphModule, closed_over_tensors.ClosedOver, Result]:
    """Replay Dynamo's graph under make_fx. Returns the ATen graph, the closed-over tensors and the
    results.
    """
    name = inputs.name
    outside = closed_over_inputs(python, inputs.tensors, inputs.positional)
    refuse_closed_over_classes(outside.tensors, name)
    stand_ins = [fake_of_closed_over(x, mode) for x in outside.tensors]
    state = mode.from_tensor(ambient.PLACEHOLDER_STATE.to(named.device()))
    flat = _Flat(python, inputs, outside)
    every = [*inputs.tensors, *stand_ins, state]
    graph = functional_graph(flat, every, name, inputs.tensor_paths)
    higher_order.bind_graphs(graph)
    outside = outside.drawing(flat.calls)
    if not flat.calls:
        _drop_last_input(graph)
    constants = lifted_constants(graph, mode, name)
    tensor_subclasses.refuse_fakes([*outside.tensors, *constants], name)
    assert flat.result is not None
    return graph, outside.traced(stand_ins, flat.ends, constants), flat.result


def _drop_last_input(module: torch.fx.GraphModule) -> None:
    """Remove the last input of a graph, which no random call reads. Loops that draw nothing get
    zeros, until they are trimmed.
    """
    holder = module.graph.find_nodes(op="placeholder")[-1]
    if holder.users:
        value = holder.meta["val"]
        like = {"dtype": value.dtype, "device": value.device}
        with module.graph.inserting_after(holder):
            zeros = module.graph.call_function(
                torch.ops.aten.full.default, (list(value.shape), 0), like
            )
        zeros.meta["val"] = value
        holder.replace_all_uses_with(zeros)
    module.graph.erase_node(holder)
    module.recompile()


def _replayed(
    python: torch.fx.GraphModule, positional: Any, values: dict[int, torch.Tensor]
) -> Any:
    """Replay Dynamo's graph, with values for the tensors of these ids."""

    def valued(tree: Any) -> Any:
        return _tree.map_held(lambda x: values.get(id(x), x), tree)

    entering = _compat.codegen_of(python.graph).process_inputs(*valued(positional))
    _compat.forget_values(x for x in _tree.leaves(entering) if isinstance(x, torch.Tensor))
    outputs = Replay(python).run(*map(valued, entering), enable_io_processing=False)
    out, _ = _compat.python_results(python, outputs)
    return out
