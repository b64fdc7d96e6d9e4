"""The rule tables, one kind of op per file, and the look-up over them."""

from __future__ import annotations

from ..choice import Rule
from . import attention, conv, factory, index, matmul, norm, pointwise, reduction, view

RULES: dict[object, Rule] = {
    **reduction.TABLE, **view.TABLE, **matmul.TABLE, **norm.TABLE, **conv.TABLE, **attention.TABLE, **index.TABLE,
}  # fmt: skip
SIZES = view.SIZES  # op -> which argument is the shape of the result
LOCAL_ARGS = {**norm.LOCAL_ARGS, **conv.LOCAL_ARGS}  # op -> what a rank passes instead of the global arguments
ADDS_TO_FIRST = index.ADDS_TO_FIRST
LOWER = index.LOWER  # op -> how a rank computes it, where that is not the op itself
REARRANGES = view.REARRANGES
AS_VIEW = view.AS_VIEW

fill_value, fill_fits = factory.fill_value, factory.fits


def find(target: object) -> Rule | None:
    """The rule of an op; None where there is none and the op must be computed whole."""
    return RULES.get(target) or (pointwise.pointwise if pointwise.is_pointwise(target) else None)
