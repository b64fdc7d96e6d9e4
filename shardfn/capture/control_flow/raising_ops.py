"""Ops that raise an error at some values: lookups out of range, divisions of integers by zero,
matrices that cannot be factored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _compat
from ...ops.loops import graph_outputs, inner_nodes
from .. import aten_trace
from .flat_tensors import Body

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


def results_if_raising(
    body: Body, xs: Sequence[torch.Tensor], name: str, again: bool
) -> Sequence[torch.Tensor] | None:
    """Tensors like the results of a body of which an op may raise an error at some values; None if
    no op may.

    Args:
        body: a function of tensors.
        xs: tensors of the shapes and dtypes of its inputs.
        name: the name of the op that runs it, for errors.
        again: whether it computes another body's values again, as a derivative does.
    """
    with _compat.outside_transforms():
        graph, _ = aten_trace.traced(body, xs, name, again)
    if not any(map(_raises, inner_nodes(graph, once=True))):
        return None
    return graph_outputs(graph)


def _raises(node: torch.fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in DIVISIONS:
        return not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    return packet in RAISING
