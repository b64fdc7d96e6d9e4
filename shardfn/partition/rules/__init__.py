"""The rule tables, one kind of op per file, and the look-up over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...collectives import COLLECTIVES
from ...ops.placement import AFTER
from ...ops.prims import PRIMS
from .. import layout
from ..rule_api import registry
from ..rule_api.op import Op
from ..rule_api.strategy import Choice, OpCall, Rule
from . import (
    attention,
    batch,
    constants,
    conv,
    matmul,
    norm,
    pointwise,
    pool,
    random,
    reduction,
    reshape,
    shard_map,  # noqa: F401  it fills rows of PRIMS
    view,
)
from .lookups import bags, indexing, reads, writes

# op -> all that partition knows of it. Ops without a row run on global values.
OPS: dict[object, Op] = {
    **reduction.TABLE,
    **view.TABLE,
    **matmul.TABLE,
    **norm.TABLE,
    **conv.TABLE,
    **pool.TABLE,
    **attention.TABLE,
    **reads.TABLE,
    **indexing.TABLE,
    **writes.TABLE,
    **bags.TABLE,
    **batch.TABLE,
    **random.TABLE,
    **pointwise.TABLE,
    AFTER: Op(decided_by_first=True, rearranges=True, strided=True),
}
NO_ROW = Op()

# an internal op of torch -> the public op of the same arguments, whose registered rule it takes
PUBLIC: dict[object, object] = {
    torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default,
    torch.ops.aten._unsafe_index.Tensor: torch.ops.aten.index.Tensor,
    torch.ops.aten._unsafe_index_put.default: torch.ops.aten.index_put.default,
}

# the files whose tables decide how ops are placed
FILES = (
    attention,
    batch,
    constants,
    conv,
    matmul,
    norm,
    pointwise,
    pool,
    random,
    reduction,
    reshape,
    view,
    bags,
    indexing,
    reads,
    writes,
)

BY_NAME = matmul.BY_NAME
is_pointwise = pointwise.is_pointwise
fill_value, fill_fits, LIKE = constants.fill_value, constants.fits, constants.LIKE


def name_of(target: object) -> str:
    """The name of an op, without its overload."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else ""


def row_of(target: object) -> Op:
    """The row of an op: its own, that of all ops element by element, or that of its name."""
    row = OPS.get(target)
    if row is None and pointwise.is_pointwise(target):
        row = pointwise.ROW
    return row or BY_NAME.get(name_of(target), NO_ROW)


def of_user(target: object) -> Rule | None:
    """The rule that the user has registered for an op."""
    return registry.find(target) or registry.find(PUBLIC.get(target))


def find(target: object) -> Rule | None:
    """The rule of an op, the user's first. None means fallback."""
    return of_user(target) or row_of(target).rule


def contents() -> list[Any]:
    """The rows of all tables of rules: equal as long as none is added, removed or replaced."""
    tables: list[Any] = [PRIMS, COLLECTIVES]
    for names in (globals(), *map(vars, FILES)):
        tables += [x for name, x in names.items() if not name.startswith("__")]
    return [x.copy() for x in tables if isinstance(x, (dict, set))]


def follows_sizes(target: object) -> bool:
    """Whether the strategies of an op follow from the sizes, dtypes and numbers of a call. The
    rules of lookups, and those of a user, may read the graph.
    """
    return of_user(target) is None and row_of(target).of_sizes


def takes_strided(call: OpCall, choice: Choice) -> bool:
    """Whether an op may run on strided shards by a strategy of our own rule."""
    if of_user(call.target) is not None:
        return False
    row = row_of(call.target)
    if row.numbered_dims is None:
        return row.strided
    cut = layout.split(choice[0][0]) if choice[0] else None
    return cut is None or cut[0] not in row.numbered_dims(call)


def lowering(target: object) -> Callable[..., Any] | None:
    """How a rank computes an op; None where that is the op itself."""
    return PRIMS[target].lower if target in PRIMS else row_of(target).lower
