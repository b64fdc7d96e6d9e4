"""Ops that torch reads values for under torch.func: Dynamo reads ours instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..tracing import (
    carries_tangent,
    derivative_levels,
    inside_transform,
    is_differentiated,
    level,
    level_of,
)


class UnderTransforms(NamedTuple):
    """Functions of ours that Dynamo reads under torch.func.

    Args:
        table: for a function of torch, or the name of a method, ours.
        always: those that are read without torch.func too.
        in_place: of a function of ours, the form that writes to its first argument.
        put_by_mask: (x, the first dim of the mask, the mask, values) -> x with the values.
        write_selected: (x, mask, values) -> x, of values `y[mask]`, whose number is not known.
        attention: the function of the table that is read where torch's op has no derivative.
        is_recorded: whether the outermost transform is a derivative for torch's autograd.
    """

    table: dict[Any, Callable[..., Any]]
    always: tuple[Any, ...]
    in_place: Callable[..., Any]
    put_by_mask: Callable[..., Any]
    write_selected: Callable[..., Any]
    attention: Any
    is_recorded: bool = False


def function_called(
    given: UnderTransforms, call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of a torch function that would read values under torch.func."""
    ours = _ours(given, function.value)
    if ours is None or (function.value is given.attention and _has_rule(given, args, kwargs)):
        return call(function, tx, args, kwargs)
    return _built(tx, ours).call_function(tx, [*args], kwargs)


def method_called(
    given: UnderTransforms, call: Callable[..., Any], x: Any, tx: Any, name: str, args: Any, kw: Any
) -> Any:
    """Patch Dynamo's call of a tensor method that would read values under torch.func."""
    if ours := _ours(given, name):
        return _built(tx, ours).call_function(tx, [x, *args], kw)
    if name.endswith("_") and (ours := _ours(given, name[:-1])):
        return _built(tx, given.in_place).call_function(tx, [_built(tx, ours), x, *args], kw)
    return call(x, tx, name, args, kw)


def written(
    given: UnderTransforms, put: Callable[..., Any], x: Any, tx: Any, key: Any, value: Any
) -> Any:
    """Patch Dynamo's `x[mask] = value`, with full dims before the mask."""
    from torch._dynamo.variables import ListVariable, SliceVariable, TupleVariable

    is_tuple = isinstance(key, TupleVariable) and not isinstance(key, ListVariable)
    *lead, mask = [*key.items] if is_tuple and key.items else [key]
    are_whole = all(isinstance(item, SliceVariable) and _is_whole(item) for item in lead)
    is_mask = mask.is_tensor() and mask.dtype == torch.bool and mask.ndim
    if not (inside_transform() and is_mask and are_whole):
        return put(x, tx, key, value)
    if value.is_tensor() and not value.valid_size():
        if not lead:
            _built(tx, given.write_selected).call_function(tx, [x, mask, value], {})
            return _built(tx, None)
        return put(x, tx, key, value)
    ours = [_built(tx, len(lead)), mask, value]
    _built(tx, given.in_place).call_function(tx, [_built(tx, given.put_by_mask), x, *ours], {})
    return _built(tx, None)


def _ours(given: UnderTransforms, called: Any) -> Callable[..., Any] | None:
    if getattr(called, "__hash__", None) is None or called not in given.table:
        return None
    return given.table[called] if called in given.always or inside_transform() else None


def _has_rule(given: UnderTransforms, args: Any, kwargs: Any) -> bool:
    """Check whether torch's own op of attention has the derivative that is asked for: the first, in
    reverse mode, and of a mask if torch sees that it is differentiated.
    """
    if derivative_levels() - given.is_recorded > 1:
        return False
    tensors = [_example(x) for x in (*args, *kwargs.values()) if x.is_tensor()]
    if any(map(carries_tangent, tensors)):
        return False
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if mask is None or not mask.is_tensor():
        return True
    x = _example(mask)
    return not is_differentiated(x) or (x.requires_grad and level_of(x) == level())


def _example(x: Any) -> Any:
    """Return the fake tensor of a tensor that Dynamo reads."""
    return x.as_proxy().node.meta["example_value"]


def _is_whole(item: Any) -> bool:
    return all(x.is_python_constant() and x.as_python_constant() is None for x in item.items)


def _built(tx: Any, x: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    return VariableTracker.build(tx, x)
