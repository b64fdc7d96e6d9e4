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
from .lookups import bag_shards, bags, indexing, reads, writes

RULES: dict[object, Rule] = {
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
}
VIEWS = view.VIEWS
SIZES = view.SIZES  # op -> the position of the argument with the result's shape
# op -> the function that makes local arguments of global ones
LOCAL_ARGS = {**norm.LOCAL_ARGS, **conv.LOCAL_ARGS, **view.LOCAL_ARGS, **batch.LOCAL_ARGS}
DECIDED_BY_FIRST = {
    *writes.ADDS_TO_FIRST,
    *conv.DECIDED_BY_FIRST,
    AFTER,
}  # ops that a rank runs if its shard of their first input is not empty
RUN_EMPTY = bag_shards.RUN_EMPTY
# op -> the local computation, if it is not the op itself
LOWER = {
    **reads.LOWER,
    **indexing.LOWER,
    **writes.LOWER,
    **bag_shards.LOWER,
    **view.LOWER,
    **conv.LOWER,
    **pool.LOWER,
    **reduction.LOWER,
}
# op -> how a rank computes its shard, where that depends on where the shard is
BY_PLACE = random.BY_PLACE
REARRANGES = {*view.REARRANGES, AFTER}
AS_VIEW = view.AS_VIEW

# an internal op of torch -> the public op of the same arguments, whose registered rule it takes
PUBLIC: dict[object, object] = {
    torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default,
    torch.ops.aten._unsafe_index.Tensor: torch.ops.aten.index.Tensor,
    torch.ops.aten._unsafe_index_put.default: torch.ops.aten.index_put.default,
}

# Ops of which a strategy for a chunk of a dim is one for any elements of it. The others read
# where a shard is, or neighbours.
STRIDED = {*reduction.TABLE, *matmul.TABLE, *norm.TABLE, *attention.TABLE, *view.TABLE, AFTER} - {
    *reduction.LOWER,
    *view.IN_ONE_RUN,
}

# ops whose rules read neither where their arguments come from nor who reads the result
OF_SIZES = {
    *reduction.TABLE,
    *matmul.TABLE,
    *norm.TABLE,
    *attention.TABLE,
    *view.TABLE,
    *conv.TABLE,
    *pool.TABLE,
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
    bag_shards,
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


def find(target: object) -> Rule | None:
    """The rule of an op, the user's first. None means fallback."""
    mine = registry.find(target) or registry.find(PUBLIC.get(target))
    return (
        mine
        or RULES.get(target)
        or (pointwise.pointwise if pointwise.is_pointwise(target) else None)
        or BY_NAME.get(name_of(target))
    )


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
    if registry.find(target) or registry.find(PUBLIC.get(target)):
        return False
    is_product = name_of(target) in BY_NAME
    return target in OF_SIZES or is_product or pointwise.is_pointwise(target)


def takes_strided(call: OpCall, choice: Choice) -> bool:
    """Whether an op may run on strided shards by a strategy of our own rule."""
    target = call.target
    if registry.find(target) or registry.find(PUBLIC.get(target)):
        return False
    is_product = name_of(target) in BY_NAME
    if target in STRIDED or is_product or pointwise.is_pointwise(target):
        return True
    cut = layout.split(choice[0][0]) if choice[0] else None
    if target in reads.TABLE:
        return cut is None or cut[0] not in reads.looked_up_dims(call)
    if target in indexing.TABLE:
        return cut is None or cut[0] not in indexing.indexed_dims(call)
    if target in writes.TABLE:
        return cut is None or cut[0] not in writes.written_dims(call)
    return False


def lowering(target: object) -> Callable[..., Any] | None:
    """How a rank computes an op; None where that is the op itself."""
    return PRIMS[target].lower if target in PRIMS else LOWER.get(target)
