"""Per-rank code: functions whose ordinary tensors differ between ranks, and whose DTensors are
global.

Dynamo reads this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...capture.dtensors import placement_checks, wrapper_subclasses
from ...capture.shard_map import axis_names
from ...ops import placement
from ...ops import shard_map as prims
from ...ops.text_formats import parse_placed_list, print_axes, print_shards, print_spec
from ...runtime import Around, Followed, Request
from ...runtime.options import Differentiated
from ..derivatives._outside import differentiated
from . import _submesh_dtensors
from ._outside import entering, leaving


@attrs.define(eq=False, repr=False, slots=False)
class OnRanks:
    """A function as the code of each rank of a mesh, as one of global tensors.

    Each local tensor enters and leaves as a shard of a global tensor that has one more dim in
    front, of one element for each rank.
    """

    name: str
    held: tuple[Callable[..., Any]]  # the function; bare, torch 2.11 cannot read it
    mesh: Any
    placed: tuple[str, ...]  # for each leaf: the text of a DTensor, or nothing
    # whether the function returns its value, and gradients
    has_gradients: bool = False

    @_compat.read_by_dynamo
    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """The result, and for each leaf of it a text: empty for no DTensor, else a space, and the
        placements if it is Partial; of a DTensor on a part of the mesh those of the part. Beside
        both the gradients, if there are any.
        """
        axes = axis_names.enter_mesh(self.name, self.mesh, None)
        rows = zip(_tree.quick_leaves((args, kwargs)), self.placed, strict=True)
        leaves = [_entering(x, text, axes) for x, text in rows]
        args, kwargs = _tree.refill((args, kwargs), leaves)
        value = self.held[0](*args, **kwargs)
        gradients = []
        if self.has_gradients:
            value, gradients = value
        out = (value,)
        found = _tree.quick_leaves(out)
        kinds = tuple([_said(x) for x in found])
        (result,) = _tree.refill(out, [_leaving(x, axes) for x in found])
        gradients = [_leaving(x, axes) for x in gradients]
        axis_names.unbind_last(len(axes))
        if self.has_gradients:
            return (result, kinds), gradients
        return result, kinds


def on_ranks(
    asks: Request,
    mesh: Any,
    placed: tuple[str, ...],
    *,
    has_own_sizes: bool,
    layouts: tuple[Any, ...],
) -> Request:
    """A request as one for the code of each rank of a mesh."""
    fn = OnRanks(asks.name, (asks.fn,), mesh, placed).inline
    around = Around(entering, leaving)
    options = {"fn": fn, "mesh": mesh, "needs_mesh": True, "around": around}
    options |= {"rank": (), "has_own_sizes": has_own_sizes, "layouts": layouts}
    # where ranks have programs of their own, each would have another derivative
    gradients = None if has_own_sizes else _with_gradients(asks.fn)
    made = attrs.evolve(asks, **options, structure=None, differentiated=gradients)
    made.store.kin = asks.store.kin
    made.store.kin.update((asks.store, made.store))
    return made


def _with_gradients(fn: Callable[..., Any]) -> Differentiated:
    """The maker of the function with its gradients from `inline`: those of fn, on each rank."""

    def made(inline: Any, followed: Followed) -> Callable[..., Any]:
        each = inline.__self__
        own = differentiated(fn, followed, _each_ranks_own)
        code = OnRanks(each.name, (own,), each.mesh, each.placed, has_gradients=True)
        return code.inline

    return made


@_compat.read_by_dynamo
def _each_ranks_own(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor that the code closes over: the gradient of each rank is its own."""
    names = [name for name, _ in placement_checks.mesh_axes_here()]
    own = prims.vary(x, print_axes(names))
    return placement.forbid_writes(own, placement.CLOSED_OVER)


@_compat.read_by_dynamo
def _entering(x: Any, text: str, axes: Any) -> Any:
    """An argument as the code of one rank sees it."""
    if not isinstance(x, torch.Tensor):
        return x
    names = wrapper_subclasses.inner_tensor_names(x)
    if names and text:
        texts = parse_placed_list(text)
        own = [placement.placed(getattr(x, k), t) for k, t in zip(names, texts, strict=True)]
        return _compat.closed(wrapper_subclasses.spec_with_shape(x, tuple(x.shape)), own)
    if text:
        rows = _submesh_dtensors.rows_of_part(text, axes)
        if rows:
            return _submesh_dtensors.entering(x, rows, axes)
        return placement.placed(x, text)
    if names:
        shell = wrapper_subclasses.spec_with_shape(x, tuple(x.shape)[1:])
        own = [_entering(getattr(x, name), text, axes) for name in names]
        return _compat.closed(shell, own)
    shards = print_shards([(name, n, 0) for name, n in axes])
    x = prims.to_local(x, shards).squeeze(0)
    return placement.forbid_writes(x, placement.ARGUMENT)


@_compat.read_by_dynamo
def _said(x: Any) -> str:
    """The text of a result."""
    if not isinstance(x, DTensor):
        return ""
    return _submesh_dtensors.said(x) or f" {x._partial}"


@_compat.read_by_dynamo
def _leaving(x: Any, axes: Any) -> Any:
    """A result as a global tensor."""
    if not isinstance(x, torch.Tensor):
        return x
    is_placed = isinstance(x, DTensor)
    x = _submesh_dtensors.leaving(x) if is_placed else x
    if is_placed and isinstance(x, DTensor):
        return placement.per_rank_result(x)
    if names := wrapper_subclasses.inner_tensor_names(x):
        count = math.prod([n for _, n in axes])
        shell = wrapper_subclasses.spec_with_shape(x, (count, *tuple(x.shape)))
        every = [_leaving(getattr(x, name), axes) for name in names]
        return _compat.closed(shell, every)
    shards = print_shards([(name, n, 0) for name, n in axes])
    x = prims.from_local(x.unsqueeze(0), shards, where=prims.RESULT)
    names = [name for name, _ in axes]
    return placement.redistribute(x, print_spec([names] + [[]] * (x.dim() - 1)))
