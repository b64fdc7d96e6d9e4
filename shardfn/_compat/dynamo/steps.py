"""Indices whose numbers are tensors, such as the step of a loop: `x[t]`, `x[:, t:t + 2]`.

Dynamo takes the number out of the tensor. Here it reads functions of ours, which gather and
scatter the dims of such numbers, and index the others as before.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import CaptureError
from .sizes import user_line

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
ADDS = {operator.add: 1, operator.iadd: 1, "add": 1, operator.sub: -1, operator.isub: -1, "sub": -1}
MULTIPLIES = (operator.mul, operator.imul, "mul")


class Functions(NamedTuple):
    """Our functions for indexing by tensors: one of (tensor, starts, rows (dim, count, stride),
    remaining index), and one that also takes the written value.
    """

    get: Callable[..., Any]
    put: Callable[..., Any]


def sliced(
    _: Any, init: Callable[..., None], self: Any, items: Sequence[Any], *args: Any, **kwargs: Any
) -> None:
    """Patch Dynamo's slice variable to keep tensors in place of making ints of them."""
    from torch._dynamo.variables import ConstantVariable

    nothing = ConstantVariable.create(None)
    init(self, [nothing if _is_step(x) else x for x in items], *args, **kwargs)
    if any(map(_is_step, items)):
        bounds = [nothing, *items] if len(items) == 1 else [*items, nothing]
        self.items = tuple(bounds[:3])


def selected(
    ours: Functions, call: Callable[..., Any], builtin: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's `x[key]`."""
    if builtin.fn is operator.getitem and len(args) == 2 and args[0].is_tensor():
        found = _split(args[0], tx, args[1])
        if found is not None:
            return _called(tx, ours.get, args[0], *found)
    return call(builtin, tx, args, kwargs)


def written(ours: Functions, put: Callable[..., Any], x: Any, tx: Any, key: Any, value: Any) -> Any:
    """Patch Dynamo's `x[key] = value`."""
    found = _split(x, tx, key)
    return put(x, tx, key, value) if found is None else _called(tx, ours.put, x, *found, value)


def narrowed(
    ours: Functions, call: Callable[..., Any], x: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's `x.select(dim, t)` and `x.narrow(dim, t, count)`."""
    from torch._dynamo.variables import TupleVariable

    given = [*args, *kwargs.values()]
    if name not in ("select", "narrow") or not any(map(_is_step, given)):
        return call(x, tx, name, args, kwargs)
    names = ("dim", "index") if name == "select" else ("dim", "start", "length")
    dim, start, *count = {**dict(zip(names, args, strict=False)), **kwargs}.values()
    axis = dim.as_python_constant() % x.ndim
    row = (axis, count[0].as_python_constant() if count else None, 1)
    whole = _whole()
    key = [whole] * axis + [whole if count else _constant(0)]
    return _called(tx, ours.get, x, TupleVariable([start]), (row,), TupleVariable(key))


def _called(tx: Any, fn: Callable[..., Any], x: Any, starts: Any, rows: Any, *others: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    ours = VariableTracker.build(tx, fn)
    return ours.call_function(tx, [x, starts, VariableTracker.build(tx, rows), *others], {})


def _split(x: Any, tx: Any, key: Any) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Split an index into tensor-valued starts, their rows, and the remaining index; None without
    tensor starts.
    """
    from torch._dynamo.variables import ListVariable, SliceVariable, TupleVariable

    is_tuple = isinstance(key, TupleVariable) and not isinstance(key, ListVariable)
    items = [*key.items] if is_tuple else [key]
    slices = [isinstance(item, SliceVariable) for item in items]
    places = [
        any(map(_is_step, item.items)) if is_slice else _is_step(item)
        for item, is_slice in zip(items, slices, strict=True)
    ]
    if not any(places) or not isinstance(x.ndim, int):
        return None
    dims = _dims(items, x.ndim)
    starts = []
    rows = []
    for k, item in enumerate(items):
        if not places[k]:
            continue
        if slices[k]:
            start, count, stride = _range(item, tx)
            items[k] = _whole()
        else:
            start, count, stride = item, None, 1
            items[k] = _constant(0)
        starts.append(start)
        rows.append((dims[k], count, stride))
    every: Any = items
    return TupleVariable(starts), tuple(rows), TupleVariable(every)


def _dims(items: Sequence[Any], ndim: int) -> list[int]:
    """List the tensor dim at which each item of an index starts."""
    taken = [_taken(item) for item in items]
    known = sum(n for n in taken if n is not None)
    dims = []
    at = 0
    for n in taken:
        dims.append(at)
        at += ndim - known if n is None else n
    return dims


def _taken(item: Any) -> int | None:
    """Count the dims that an index item consumes; None for an ellipsis."""
    if item.is_tensor():
        return item.ndim if item.dtype == torch.bool else 1
    value = item.as_python_constant() if item.is_python_constant() else 0
    if value is Ellipsis:
        return None
    return 0 if value is None or isinstance(value, bool) else 1


def _range(item: Any, tx: Any) -> tuple[Any, int, int]:
    """Return the start, size and stride of a slice.

    Raises:
        CaptureError: its size depends on values.
    """
    start, stop, step = item.items
    stride = 1 if _is_none(step) else None if _is_step(step) else step.as_python_constant()
    if _is_step(start) and _is_step(stop) and stride:
        (after, size), (before, first) = _sum_of(stop, tx), _sum_of(start, tx)
        if before == after:
            return start, max(-(-(size - first) // stride), 0), stride
    raise CaptureError.of(
        "a slice",
        "the size of the slice depends on a tensor value",
        needed="a size that is a number: x[t:t + 2]",
        fix="x[t:t + n] where n is a number, or torch.where over all of x",
        source=user_line(),
    )


def _sum_of(x: Any, tx: Any) -> tuple[dict[Any, int], int]:
    """Decompose an integer expression into multiples of values plus a constant."""
    lift = getattr(tx.output.current_tracer, "maybe_lift_tracked_freevar_to_input", None)
    proxy = x.as_proxy()
    return _terms((lift(proxy) if lift else proxy).node)


def _terms(x: Any) -> tuple[dict[Any, int], int]:
    if isinstance(x, int):
        return {}, x
    args = x.args if x.op in ("call_function", "call_method") and not x.kwargs else ()
    name = getattr(x.target, "__name__", x.target)
    target = name if isinstance(x.target, str) or x.target in (torch.add, torch.sub) else x.target
    is_linear = len(args) == 2 and all(isinstance(y, (int, torch.fx.Node)) for y in args)
    if is_linear and target in ADDS:
        (terms, number), (others, other) = map(_terms, args)
        sign = ADDS[target]
        total = Counter(terms)
        for y, n in others.items():
            total[y] += sign * n
        return {y: n for y, n in total.items() if n}, number + sign * other
    if is_linear and target in MULTIPLIES and any(isinstance(y, int) for y in args):
        factor, other = sorted(args, key=lambda y: not isinstance(y, int))
        terms, number = _terms(other)
        return {y: n * factor for y, n in terms.items() if n * factor}, number * factor
    return {x: 1}, 0


def _is_step(x: Any) -> bool:
    """Return whether an index item is an integer held in a tensor."""
    return x.is_tensor() and x.ndim == 0 and x.dtype in INTEGERS


def _is_none(x: Any) -> bool:
    return x.is_python_constant() and x.as_python_constant() is None


def _constant(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


def _whole() -> Any:
    from torch._dynamo.variables import SliceVariable

    return SliceVariable([_constant(None)] * 3)
