"""Objects of the user's classes, where Dynamo does otherwise than Python."""

from __future__ import annotations

import inspect
import types
from typing import Any


def class_described(
    _: Any, resolve: Any, owner: Any, tx: Any, name: str, found: Any, source: Any
) -> Any:
    """Patch the attribute of a class that a descriptor of the user's gives, such as a class
    property: Dynamo takes the descriptor itself, or guards on its value (torch 2.13).
    """
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.base import VariableTracker

    get = inspect.getattr_static(type(found), "__get__", None)
    is_of_torch = owner.value.__module__.split(".")[0] == "torch"
    if not isinstance(get, types.FunctionType) or is_of_torch:
        return resolve(owner, tx, name, found, source)
    place = owner.get_source_by_walking_mro(tx, name) if owner.source else None
    descriptor = VariableTracker.build(tx, found, place)
    given = [ConstantVariable.create(None), owner]
    return descriptor.realize().call_method(tx, "__get__", given, {})


def keys_compared(_: Any, compare: Any, key: Any, other: Any) -> bool:
    """Patch the comparison of two keys of a dict or elements of a set, whose hashes are equal:
    Dynamo ignores an `__eq__` of the user's (torch 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.object_protocol import generic_richcompare_bool

    if compare(key, other):
        return True
    if not (isinstance(other, type(key)) and (_has_own_eq(key.vt) or _has_own_eq(other.vt))):
        return False
    tx = InstructionTranslator.current_tx()
    return bool(generic_richcompare_bool(tx, key.vt, other.vt, "__eq__").as_python_constant())


def _has_own_eq(x: Any) -> bool:
    """Whether a variable is an object of a class with an `__eq__` in Python, or a tuple of such."""
    from torch._dynamo.variables import TupleVariable, UserDefinedObjectVariable

    x = x.realize()
    if isinstance(x, TupleVariable):
        return any(map(_has_own_eq, x.items))
    is_object = isinstance(x, UserDefinedObjectVariable)
    return is_object and isinstance(type(x.value).__eq__, types.FunctionType)
