"""isinstance of an object and a class that decides itself: a Protocol, or a class whose metaclass
has an `__instancecheck__`. Dynamo asks with an object that lacks the attributes that it gets in the
captured code, or by the class of the object alone (torch 2.13).
"""

from __future__ import annotations

import abc
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch

NOT_RUNTIME = "Instance and class checks can only be used with @runtime_checkable protocols"
LIBRARIES = "abc", "enum", "typing", "typing_extensions", torch.__name__


def instance_checked(
    _: Any, check: Callable[..., Any], builtin: Any, tx: Any, x: Any, classes: Any
) -> Any:
    """Patch Dynamo's isinstance."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.base import VariableTracker

    given = classes.as_python_constant() if classes.is_python_constant() else None
    members = [*_members(given)]
    if not any(map(_decides, members)):
        return check(builtin, tx, x, classes)
    for cls in members:
        kind = classes if cls is given else VariableTracker.build(tx, cls)
        if _is_protocol(cls):
            is_instance = _follows(tx, x, cls)
        elif _decides(cls) and _is_changed(tx, x) and x.python_type() is not cls:
            method = VariableTracker.build(tx, type(cls).__instancecheck__)
            is_instance = method.call_function(tx, [kind, x], {}).as_python_constant()
        else:
            is_instance = check(builtin, tx, x, kind).as_python_constant()
        if is_instance:
            return ConstantVariable.create(True)
    return ConstantVariable.create(False)


def _members(classes: Any) -> Iterator[Any]:
    """Yield the classes of a tuple or of a union `A | B`, in their order."""
    if isinstance(classes, types.UnionType):
        classes = typing.get_args(classes)
    if not isinstance(classes, tuple):
        yield classes
        return
    for cls in classes:
        yield from _members(cls)


def _is_protocol(cls: Any) -> bool:
    return isinstance(cls, type) and getattr(cls, "_is_protocol", False) is True


def _decides(cls: Any) -> bool:
    """Whether a class is a Protocol, or has an `__instancecheck__` of the user's."""
    check = getattr(type(cls), "__instancecheck__", None)
    is_function = isinstance(check, types.FunctionType)
    is_own = is_function and check.__module__.split(".")[0] not in LIBRARIES
    return is_own or _is_protocol(cls)


def _is_changed(tx: Any, x: Any) -> bool:
    """Whether the captured code has made an object of a user's class, or changed it."""
    from torch._dynamo.variables import UserDefinedObjectVariable

    x = x.realize()
    is_made = x.source is None or tx.output.side_effects.has_pending_mutation(x)
    return isinstance(x, UserDefinedObjectVariable) and is_made


def _follows(tx: Any, x: Any, protocol: Any) -> bool:
    """Whether an object has the members of a Protocol, or is of a class that declares it."""
    from torch._dynamo.exc import raise_observed_exception
    from torch._dynamo.variables import UserDefinedObjectVariable

    if not getattr(protocol, "_is_runtime_protocol", False):
        raise_observed_exception(TypeError, tx, args=[NOT_RUNTIME])
    x, cls = x.realize(), x.python_type()
    names = getattr(protocol, "__protocol_attrs__", None)  # Python 3.11 has a function for them
    names = vars(typing)["_get_protocol_attrs"](protocol) if names is None else names
    if protocol in cls.__mro__ or all(_has(tx, x, cls, protocol, name) for name in sorted(names)):
        return True
    is_object = isinstance(x, UserDefinedObjectVariable)
    return is_object and abc.ABCMeta.__instancecheck__(protocol, x.value)


def _has(tx: Any, x: Any, cls: type, protocol: Any, name: str) -> bool:
    """Whether an object has a member of a Protocol; a method that is None does not count."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.base import VariableTracker

    in_class = inspect.getattr_static(cls, name, None)
    if callable(in_class) or (in_class is not None and sys.version_info >= (3, 12)):
        return True
    if not x.call_obj_hasattr(tx, name).as_python_constant():
        return False
    if not callable(getattr(protocol, name, None)):
        return True
    asked = [x, ConstantVariable.create(name)]
    return not VariableTracker.build(tx, getattr).call_function(tx, asked, {}).is_constant_none()
