"""Sparse tensors in Dynamo, which refuses them: objects of a class of ours stand for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .dtensors.calls import read_ours

# operators of Python, with the names of torch's functions
OPERATORS: dict[Any, str] = {
    operator.matmul: "matmul",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.add: "add",
    operator.sub: "sub",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.imatmul: "matmul_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.ipow: "pow_",
}


class Sparse(NamedTuple):
    """What stands for sparse tensors.

    Args:
        cls: the class of the objects.
        is_supported: whether a tensor is sparse, and can be split.
        split: the parts of a sparse tensor: tensors, tuples of them and constants.
        made: makes an object of these parts. Dynamo reads it.
        called: the result of a function, by name, of which an argument is such an object. Dynamo
            reads it.
        parts: a tuple of the parts of an object, which a function that takes parts gets in its
            place. Dynamo reads it.
        takes_parts: whether a function takes parts of objects, inside of its containers.
    """

    cls: type
    is_supported: Callable[[Any], bool]
    split: Callable[[torch.Tensor], tuple[Any, ...]]
    made: Callable[..., Any]
    called: Callable[..., Any]
    parts: Callable[[Any], Any]
    takes_parts: Callable[[Any], bool]


def closed_over(sparse: Sparse, wrap: Callable[..., Any], builder: Any, x: Any) -> Any:
    """Patch Dynamo's wrapping of a new tensor, which may be a sparse one."""
    if not sparse.is_supported(x):
        return wrap(builder, x)
    builder.install_guards(SPARSE_MATCH)
    parts = [_variable(builder.tx, part) for part in sparse.split(x)]
    made = read_ours(builder.tx, sparse.made, parts, {})
    # else Dynamo would take the new object for an old one that was changed
    effects = builder.tx.output.side_effects
    effects.id_to_variable[id(x)] = made
    effects.keepalive.append(x)
    return made


def _variable(tx: Any, part: Any) -> Any:
    from torch._dynamo import variables
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.builder import VariableBuilder

    if type(part) is tuple:
        return variables.TupleVariable([_variable(tx, x) for x in part])
    if not isinstance(part, torch.Tensor):
        return variables.base.VariableTracker.build(tx, part)
    name = tx.output.install_global_by_id("stored", part)
    return VariableBuilder(tx, GlobalSource(name))(part)


def SPARSE_MATCH(builder: Any, guard: Any) -> None:
    """The guard that a place has the same sparse tensor, which nobody has written to."""


def function_called(
    sparse: Sparse, call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of a function of torch, or of one that runs as it is."""
    if sparse.takes_parts(function.value):
        return call(function, tx, [_opened(sparse, tx, x) for x in args], kwargs)
    if not _has_sparse(sparse, (*args, *kwargs.values())):
        return call(function, tx, args, kwargs)
    return _called(sparse, tx, function.value.__name__, args, kwargs)


def operator_called(
    sparse: Sparse, call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of an operator of Python."""
    name = OPERATORS.get(function.fn)
    if name is None or not any(_is_sparse(sparse, x) for x in args):
        return call(function, tx, args, kwargs)
    return _called(sparse, tx, name, args, kwargs)


def method_called(
    sparse: Sparse,
    call: Callable[..., Any],
    tensor: Any,
    tx: Any,
    name: str,
    args: Any,
    kwargs: Any,
) -> Any:
    """Patch Dynamo's call of a method of a dense tensor."""
    if not _has_sparse(sparse, (*args, *kwargs.values())):
        return call(tensor, tx, name, args, kwargs)
    return _called(sparse, tx, name, [tensor, *args], kwargs)


def is_instance(
    sparse: Sparse, call: Callable[..., Any], builtin: Any, tx: Any, x: Any, classes: Any
) -> Any:
    """Patch isinstance in Dynamo: a sparse tensor is a tensor."""
    from torch._dynamo.variables.base import VariableTracker

    if not _is_sparse(sparse, x):
        return call(builtin, tx, x, classes)
    asked = classes.as_python_constant()
    every = asked if isinstance(asked, tuple) else (asked,)
    return VariableTracker.build(tx, torch.Tensor in every or sparse.cls in every)


def _called(sparse: Sparse, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    from torch._dynamo import variables
    from torch._dynamo.variables.base import VariableTracker

    named = {VariableTracker.build(tx, key): x for key, x in kwargs.items()}
    given = [name, variables.TupleVariable([*args]), variables.ConstDictVariable(named)]
    return read_ours(tx, sparse.called, given, {})


def _opened(sparse: Sparse, tx: Any, x: Any) -> Any:
    """A container with the parts of sparse tensors in their place; itself, without such."""
    from torch._dynamo import variables

    x = x.realize()
    if _is_sparse(sparse, x):
        return read_ours(tx, sparse.parts, [x], {})
    if type(x).__name__ in ROWS:
        rows = [_opened(sparse, tx, y) for y in x.items]
        return x if _are_same(rows, x.items) else type(x)(rows)
    if type(x).__name__ == "ConstDictVariable":
        values = [*x.items.values()]
        rows = [_opened(sparse, tx, y) for y in values]
        items = {key.vt: y for key, y in zip(x.items, rows, strict=True)}
        return x if _are_same(rows, values) else variables.ConstDictVariable(items)
    return x


def _are_same(rows: list[Any], others: list[Any]) -> bool:
    """Whether nothing was opened; a variable that is not lazy any more is the same."""
    return all(a is b.realize() for a, b in zip(rows, others, strict=True))


def _has_sparse(sparse: Sparse, args: Iterable[Any]) -> bool:
    """Whether an argument is a sparse tensor, or a list of tensors with one."""
    for x in args:
        rows = getattr(x, "items", None) if type(x).__name__ in ROWS else None
        if _is_sparse(sparse, x) or any(_is_sparse(sparse, y) for y in rows or ()):
            return True
    return False


ROWS = ("ListVariable", "TupleVariable")


def _is_sparse(sparse: Sparse, x: Any) -> bool:
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if isinstance(x, LazyVariableTracker):
        if not x.is_realized() and not sparse.is_supported(x.peek_value()):
            return False
        x = x.realize()
    return isinstance(x, UserDefinedObjectVariable) and type(x.value) is sparse.cls
