"""The rule tables, one kind of op per file, and the look-up over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops.placement import AFTER
from ...ops.prims import PRIMS
from ..rule_api import registry
from ..rule_api.strategy import Rule
from . import (
    attention,
    batch,
    constants,
    conv,
    index,
    matmul,
    norm,
    pointwise,
    pool,
    reduction,
    shard_map,  # noqa: F401  it fills rows of PRIMS
    view,
)

RULES: dict[object, Rule] = {
    **reduction.TABLE,
    **view.TABLE,
    **matmul.TABLE,
    **norm.TABLE,
    **conv.TABLE,
    **pool.TABLE,
    **attention.TABLE,
    **index.TABLE,
    **batch.TABLE,
}
SIZES = view.SIZES  # op -> which argument is the shape of the result
# op -> what a rank passes instead of the global arguments
LOCAL_ARGS = {
    **norm.LOCAL_ARGS,
    **conv.LOCAL_ARGS,
    **view.LOCAL_ARGS,
    **batch.LOCAL_ARGS,
}
DECIDED_BY_FIRST = {
    *index.ADDS_TO_FIRST,
    *conv.DECIDED_BY_FIRST,
    AFTER,
}  # ops that a rank runs if it has some of their first input
# op -> how a rank computes it, where that is not the op itself
LOWER = {
    **index.LOWER,
    **conv.LOWER,
    **pool.LOWER,
    **reduction.LOWER,
}
REARRANGES = {*view.REARRANGES, AFTER}
AS_VIEW = view.AS_VIEW

# what torch writes for itself -> the op of the same arguments that a user knows, whose
# registered rule it takes
PUBLIC = {
    torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default,
    torch.ops.aten._unsafe_index.Tensor: torch.ops.aten.index.Tensor,
    torch.ops.aten._unsafe_index_put.default: torch.ops.aten.index_put.default,
}

fill_value, fill_fits, LIKE = constants.fill_value, constants.fits, constants.LIKE


def find(target: object) -> Rule | None:
    """The rule of an op, the user's first; None for a fallback."""
    mine = registry.find(target) or registry.find(PUBLIC.get(target))
    return (
        mine
        or RULES.get(target)
        or (pointwise.pointwise if pointwise.is_pointwise(target) else None)
    )


def lowering(target: object) -> Callable[..., Any] | None:
    """How a rank computes an op; None where that is the op itself."""
    return PRIMS[target].lower if target in PRIMS else LOWER.get(target)
