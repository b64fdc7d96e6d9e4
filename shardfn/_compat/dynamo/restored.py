"""Modules that are called with other tensors than their own, as torch.func.functional_call does:
their dicts are changed and restored while Dynamo reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_changed(asked: Callable[..., Any], effects: Any, variable: Any) -> bool:
    """Dynamo's check whether a variable has changed, without dicts that were restored."""
    return asked(effects, variable) and not _is_restored(variable)


def _is_restored(variable: Any) -> bool:
    """Whether a dict that existed before has its own items again, in their order."""
    from torch._dynamo.variables.base import ValueMutationExisting

    held = getattr(variable, "_base_vt", None) or variable
    before, now = (
        getattr(held, "original_items", None),
        getattr(held, "items", None),
    )
    if not isinstance(before, dict) or not isinstance(now, dict):
        return False
    keys = [key.vt for key in now]
    return (
        isinstance(held.mutation_type, ValueMutationExisting)
        and len(keys) == len(before)
        and all(a is b for a, b in zip(before, keys, strict=True))
        and not any(held.is_new_item(before[k.vt], x) for k, x in now.items())
    )
