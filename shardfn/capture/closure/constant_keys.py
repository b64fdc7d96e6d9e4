"""Keys of constants. Constants that a program can tell apart have different keys.

`==` is not enough: 0.0 == -0.0, 1 == True == 1.0, nan != nan, and a class may define it freely.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ...mesh import axes_of

EXACT = (int, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, Placement)
ITSELF = (
    enum.Enum,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.Tensor,
    torch.nn.Module,
)
DEPTH = 6  # how deep a key looks into objects; deeper objects count by identity


class IdentityKey:
    """A key that equals only that of the identical object."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return repr(self.held)


class EqualityKey:
    """The key of an object by its value: equal objects with equal attributes have equal
    keys.
    """

    __slots__ = ("held", "state")

    def __init__(self, held: Any, state: Any) -> None:
        self.held, self.state = held, state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EqualityKey) or self.state != other.state:
            return False
        return self.held is other.held or _equal(self.held, other.held)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.held)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def constant_key(x: Any, depth: int = DEPTH) -> tuple[Any, ...]:
    """The key of a constant: its type, and its value bit for bit.

    Example:
        >>> (constant_key(0.0) == constant_key(-0.0), constant_key(1) == constant_key(True))
        (False, False)
    """
    kind = type(x)
    if kind in EXACT:
        return kind, x
    if kind is float:
        return kind, x.hex()
    if isinstance(x, ITSELF) or not depth:
        return kind, IdentityKey(x)
    for known, key in KEYS:
        if isinstance(x, known):
            return kind, key(x, depth - 1)
    return kind, _of_object(x, depth - 1)


def is_constant(x: Any) -> bool:
    """Whether x is an immutable value."""
    if isinstance(x, tuple):
        return all(map(is_constant, x))
    simple = isinstance(x, (*EXACT, float, complex, *VALUES, slice, range, frozenset))
    return simple or (
        type(x).__module__ == "numpy" and hasattr(x, "dtype") and not hasattr(x, "__len__")
    )


def _of_object(x: Any, depth: int) -> Any:
    if callable(x) and (
        hasattr(x, "__wrapped__") or (type(x).__module__ or "").startswith("torch._ops")
    ):
        return IdentityKey(x)
    if hasattr(x, "tobytes") and hasattr(x, "dtype"):  # an array or a scalar of NumPy
        return str(x.dtype), x.shape, x.tobytes()
    return EqualityKey(x, _attribute_keys(x, depth))


def _attribute_keys(x: Any, depth: int) -> Any:
    """The names of an object's attributes, each with the key of its value."""
    names = dict(getattr(x, "__dict__", None) or {})
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else slots
        names |= {name: getattr(x, name) for name in slots if hasattr(x, name) and name[:2] != "__"}
    names = {name: child for name, child in names.items() if not name.startswith("_shardfn")}
    return tuple((name, constant_key(child, depth)) for name, child in sorted(names.items()))


def _of_partial(x: Any, depth: int) -> Any:
    parts = (x.func, x.args, x.keywords)
    return tuple(constant_key(part, depth) for part in parts)


def _of_method(x: Any, depth: int) -> Any:
    return IdentityKey(x.__self__), IdentityKey(x.__func__)


def _of_items(x: Any, depth: int) -> Any:
    return tuple(constant_key(child, depth) for child in x)


def _of_dict(x: Any, depth: int) -> Any:
    return tuple((constant_key(key, depth), constant_key(child, depth)) for key, child in x.items())


def _of_set(x: Any, depth: int) -> Any:
    return sorted(repr(constant_key(child, depth)) for child in x), frozenset(x)


def _with_state(value: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """The key of a number or text whose class may be a subclass with attributes."""
    return lambda x, depth: (
        (value(x), _attribute_keys(x, depth)) if hasattr(x, "__dict__") else value(x)
    )


KEYS: tuple[tuple[Any, Callable[[Any, int], Any]], ...] = (
    (float, _with_state(float.hex)),
    (complex, _with_state(lambda x: (x.real.hex(), x.imag.hex()))),
    (int, _with_state(int)),
    (str, _with_state(str.__str__)),
    (bytes, _with_state(bytes)),
    (VALUES, lambda x, depth: x),
    (DeviceMesh, lambda x, depth: (x, axes_of(x))),  # its links too
    (types.MethodType, _of_method),
    (functools.partial, _of_partial),
    ((tuple, list), _of_items),
    (dict, _of_dict),
    ((set, frozenset), _of_set),
    (slice, lambda x, depth: _of_items((x.start, x.stop, x.step), depth)),
    (range, lambda x, depth: (x.start, x.stop, x.step)),
)
