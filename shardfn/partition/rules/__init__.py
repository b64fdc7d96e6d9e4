"""The tables of sharding rules, one kind of op per file, and the look-up of the rule of an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...collectives import COLLECTIVES
from ...ops.higher_order import HigherOrder
from ...ops.placement import AFTER
from ...ops.prims import PRIMS
from ...types import MeshAxes, MeshPlacements
from .. import layout
from ..plan import Apply, Slot, Step
from ..rule_api import registry
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, Rule
from . import (
    conv,
    cumulative,
    fills,
    flip,
    linalg_fft_images,
    matmul,
    norm,
    pointwise,
    pool,
    random,
    reduction,
    shard_map,  # noqa: F401  it fills rows of PRIMS
    view,
)
from .attention import flex
from .attention import strategies as attention
from .lookups import bags, gather_scatter, index, index_put

# the families of ops with a table each
FAMILIES = (
    reduction,
    cumulative,
    flip,
    view,
    matmul,
    norm,
    conv,
    pool,
    attention,
    gather_scatter,
    index,
    index_put,
    bags,
    linalg_fft_images,
    random,
    pointwise,
)
# op -> all that partition knows of it. Ops without a row run on global values.
OPS: dict[object, Op] = {
    **{op: row for family in FAMILIES for op, row in family.TABLE.items()},
    AFTER: Op(decided_by_first=True, rearranges=True, strided=True),
}
NO_ROW = Op()

# an internal op of torch -> the public op of the same arguments, whose registered rule it takes
PUBLIC: dict[object, object] = {
    torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default,
    torch.ops.aten._unsafe_index.Tensor: torch.ops.aten.index.Tensor,
    torch.ops.aten._unsafe_index_put.default: torch.ops.aten.index_put.default,
}

BY_NAME = matmul.BY_NAME
is_pointwise = pointwise.is_pointwise
fill_value, fill_fits, LIKE = fills.fill_value, fills.fits, fills.LIKE


def name_of(target: object) -> str:
    """Return the name of an op, without its overload."""
    if isinstance(target, HigherOrder):
        return target.__name__
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else ""


def row_of(target: object) -> Op:
    """Look up the record of an op in the rule tables."""
    if isinstance(target, HigherOrder) and target.__name__ == flex.NAME:
        return flex.row_of(target)
    row = OPS.get(target)
    if row is None and pointwise.is_pointwise(target):
        row = pointwise.row_of(target)
    return row or BY_NAME.get(name_of(target), NO_ROW)


def of_user(target: object) -> Rule | None:
    """Return the rule that the user registered for an op."""
    return registry.find(target) or registry.find(PUBLIC.get(target))


def find(target: object) -> Rule | None:
    """Return the sharding rule of an op, the user's first; None means fallback."""
    return of_user(target) or row_of(target).rule


def contents() -> list[Any]:
    """Copy all rule tables, to see whether a row was added, removed or replaced."""
    tables: list[Any] = [PRIMS, COLLECTIVES]
    for names in (globals(), *map(vars, (*FAMILIES, fills))):
        tables += [x for name, x in names.items() if not name.startswith("__")]
    return [x.copy() for x in tables if isinstance(x, (dict, set))]


def follows_sizes(target: object) -> bool:
    """Return whether an op's strategies depend on sizes, dtypes and numbers alone."""
    return of_user(target) is None and row_of(target).of_sizes


def takes_strided(call: OpCall, choice: Choice) -> bool:
    """Return whether an op may run on strided shards by a strategy."""
    if of_user(call.target) is not None:
        return False
    row = row_of(call.target)
    if row.strided_by is not None:
        return row.strided_by(call, choice)
    if row.numbered_dims is None:
        return row.strided
    cut = layout.split(choice[0][0]) if choice[0] else None
    return cut is None or cut[0] not in row.numbered_dims(call)


def fits(call: OpCall, ins: Sequence[MeshPlacements]) -> bool:
    """Return whether an op can run with some placements of its inputs on several axes."""
    row = row_of(call.target)
    return row.fits is None or of_user(call.target) is not None or row.fits(call, ins)


def steps_of(step: Apply, axes: MeshAxes, slot: Callable[..., Slot]) -> Sequence[Step]:
    """Write the step of an op as several, if ranks communicate inside of it."""
    target = step.node.target
    row = row_of(target)
    if row.in_steps is None or step.local is not None or of_user(target) is not None:
        return [step]
    return row.in_steps(step, axes, slot)


def lowering(target: object) -> Callable[..., Any] | None:
    """Return how a rank computes an op; None if it runs the op itself."""
    return PRIMS[target].lower if target in PRIMS else row_of(target).lower
