"""Replay Dynamo's graph under make_fx, and annotate nodes with facts that only Dynamo's graph
has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import ShardError
from ..ops import placement
from ..random import earlier_draws
from . import annotations as sources
from . import pipelined_values, transform_levels
from .aten_trace import note_derivative
from .control_flow import bodies, control_flow_ops
from .dynamo_nodes import BACKWARD, name_of
from .refusals.derived_tangents import refuse_derived
from .refusals.sparse_gradients import refuse_sparse_gradient
from .rewrites import inner_gradients
from .rewrites.custom_op_gradients import refuse_dropped
from .rewrites.einsum_batches import EINSUMS, einsum
from .rewrites.substitutes_under_transforms import ATTENTION, attention


class Replay(torch.fx.Interpreter):
    """The interpreter that replays Dynamo's graph under make_fx. Annotates the nodes of each grad
    call's backward, and the gradients of one call.
    """

    def __init__(self, graph: torch.fx.GraphModule, depth: int = 0) -> None:
        super().__init__(graph)
        self.nesting = transform_levels.Nesting(depth)
        self.spans = inner_gradients.Spans(graph.graph)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.nesting.left_on_error():
            return super().run(*args, **kwargs)

    def run_node(self, node: torch.fx.Node) -> Any:
        self.env[node] = self._result(node)
        self.spans.after(node, self.env)
        return self.env[node]

    def _result(self, node: torch.fx.Node) -> Any:
        if node.target is placement.align:
            node.meta["custom"] = {**node.meta.get("custom", {}), "gradients": node.name}
        if name_of(node) in BACKWARD:
            node.meta["custom"] = {**node.meta.get("custom", {}), "phase": "backward"}
            outputs, primals, *_ = self.fetch_args_kwargs_from_env(node)[0]
            inside = sources.call_annotations(node.meta["custom"])
            if sources.OUTERMOST in inside:
                note_derivative(outputs, primals)
            sources.follow_backward(
                (x.grad_fn for x in outputs if isinstance(x, torch.Tensor)), inside
            )
        try:
            if node.op in ("call_function", "call_method"):
                given = self.fetch_args_kwargs_from_env(node)
                refuse_derived(node, *given)
                refuse_sparse_gradient(node, *given)
                refuse_dropped(node, *given)
                if name_of(node) == "roll" and not _rolled(*given).dim():
                    return _rolled(*given).clone()  # vmap would roll the samples (torch 2.15)
            return super().run_node(node)
        except ShardError:
            self.extra_traceback = False  # the error has the full text
            raise

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "_name", None) == "wrap":
            return bodies.replay_body(functools.partial(Replay, depth=self.nesting.depth), *args)
        if (name := getattr(target, "__name__", "")) in transform_levels.NAMES:
            return self.nesting.call(target, name, args, kwargs)
        if name == "_unpack_dual":
            return _with_value_dtype(*super().call_function(target, args, kwargs))
        if target is inner_gradients.gradients:
            return inner_gradients.take_gradients(*args)
        if target is pipelined_values.with_known_derivative:
            return pipelined_values.replayed(*args)
        if target in control_flow_ops.REPLAYED:
            return control_flow_ops.REPLAYED[target](Replay, *args, **kwargs)
        if target in earlier_draws.REPLAYED:
            return earlier_draws.REPLAYED[target](*args)
        if target in EINSUMS:
            return einsum(*args, **kwargs)
        if target is ATTENTION and self.spans.are_differentiated:
            return attention(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _rolled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The tensor that a call of roll gets."""
    return args[0] if args else kwargs["input"]


def _with_value_dtype(
    value: torch.Tensor, tangent: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A value and its tangent in the value's dtype. A Python number may raise a tangent's dtype
    (torch 2.13).
    """
    if tangent is None or tangent.dtype == value.dtype:
        return value, tangent
    return value, tangent.to(value.dtype)
