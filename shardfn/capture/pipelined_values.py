"""Values of a pipeline in a call that autograd follows: the derivative of the value is known, since
the pipeline returns the gradients, and the gradients have no derivative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import _compat
from . import aten_trace
from .control_flow.flat_tensors import is_float


@_compat.constant_in_graph
def is_followed() -> bool:
    """Whether autograd follows the call that is captured, and is to read derivatives."""
    return aten_trace.known_derivatives() is not None


@_compat.keep_in_graph
def with_known_derivative(
    value: torch.Tensor,
    others: list[torch.Tensor],
    gradients: list[torch.Tensor],
    parameters: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return value, others and gradients. Dynamo traces all of them as one call, and `replayed`
    gives them their derivatives. Each is a new tensor, which `of_trees` tells from the one before.
    """
    return [x.view_as(x) for x in (value, *others, *gradients)]


def replayed(
    value: torch.Tensor,
    others: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return value, others and gradients when Dynamo's graph is replayed. Where autograd follows
    the call, the derivative of the value is read from the gradients.

    Args:
        value: of a pipeline.
        others: its further results.
        gradients: of the value, for each parameter.
        parameters: the tensors that the pipeline differentiates.
    """
    results = [value, *others, *gradients]
    known = aten_trace.known_derivatives()
    if known is None or _compat.level() != 1 or not _compat.derivative_levels():
        return results
    known.lost += _other_leaves(results, parameters)
    first, *rest = [x.detach() for x in results]
    floating = [x for x in rest if is_float(x)]
    once = _Once.apply(len(floating), *floating, *parameters) if parameters else floating
    known.once += [x.grad_fn for x in once if x.grad_fn is not None]
    feed = iter(once)
    rest = [next(feed) if is_float(x) else x for x in rest]
    read = [x.detach() for x in rest[len(others) :]]  # the backward saves results alone
    return [_Value.apply(first, *read, *parameters), *rest]


class _Value(torch.autograd.Function):
    """The value of a pipeline, whose gradients are known: (value, gradients, parameters)."""

    @staticmethod
    def forward(value: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        gradients = inputs[1 : 1 + len(inputs) // 2]
        ctx.save_for_backward(*gradients)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        gradients = ctx.saved_tensors
        scaled = [(cotangent * x).to(x.dtype) for x in gradients]
        return None, *(None for _ in gradients), *scaled


class _Once(torch.autograd.Function):
    """Results that depend on parameters, and have no derivative: (count, results, parameters)."""

    @staticmethod
    def forward(count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        return tuple(None for _ in range(ctx.count))


def _other_leaves(
    results: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Iterator[Any]:
    """The leaves of autograd's graph that results depend on in another way than through
    parameters.
    """
    ends = {_edge(x) for x in parameters if x.requires_grad}
    queue = [_edge(x) for x in results if x.requires_grad]
    seen = set(queue) | ends
    for fn, _ in queue:
        if hasattr(fn, "variable"):
            yield fn.variable
        new = [edge for edge in fn.next_functions if edge[0] is not None and edge not in seen]
        seen.update(new)
        queue += new


def _edge(x: torch.Tensor) -> tuple[Any, int]:
    node, number = torch.autograd.graph.get_gradient_edge(x)[:2]
    return node, number
