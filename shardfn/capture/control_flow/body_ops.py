"""What the ops of a body may do: draw random numbers, or raise an error at some values, such as
lookups out of range, divisions of integers by zero, and matrices that cannot be factored.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ... import _compat
from ...ops.loops import graph_outputs, inner_nodes
from ...random import ambient
from .. import aten_trace
from .flat_tensors import Body, body_with_random_state

aten = torch.ops.aten

DIVISIONS = (aten.div, aten.floor_divide, aten.fmod, aten.remainder)
RAISING = (
    aten._assert_async,
    aten._embedding_bag,
    aten._embedding_bag_forward_only,
    aten._linalg_check_errors,
    aten._linalg_eigh,
    aten._linalg_svd,
    aten.bernoulli,
    aten.cholesky_inverse,
    aten.embedding,
    aten.gather,
    aten.index,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.index_put,
    aten.index_reduce,
    aten.index_select,
    aten.linalg_eig,
    aten.linalg_lstsq,
    aten.multinomial,
    aten.nll_loss2d_forward,
    aten.nll_loss_forward,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.take,
)


@attrs.frozen(eq=False)
class BodyOps:
    """What the ops of a body may do."""

    draw: bool  # random numbers, of no state of the body's own
    may_raise: bool
    results: Sequence[torch.Tensor]  # tensors of the shapes and dtypes of its results


def ops_of(body: Body, xs: Sequence[torch.Tensor], name: str) -> BodyOps:
    """What the ops of a body may do.

    Args:
        body: a function of tensors.
        xs: tensors of the shapes and dtypes of its inputs.
        name: the name of the op that runs it, for errors.
    """
    drawing = body_with_random_state(body)
    with _compat.outside_transforms():
        graph, _ = aten_trace.traced(drawing, [*xs, ambient.PLACEHOLDER_STATE], name)
    state = graph.find_nodes(op="placeholder")[len(xs)]
    may_raise = any(map(_raises, inner_nodes(graph, once=True)))
    return BodyOps(bool(state.users), may_raise, graph_outputs(graph))


def _raises(node: torch.fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in DIVISIONS:
        return not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    return packet in RAISING
