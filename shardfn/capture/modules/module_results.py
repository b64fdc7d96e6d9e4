"""The result of a module as a tree of literals, the form that Dynamo accepts from a call that it
does not read, and how each is made again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from ...types import CONSTANTS
from ..refusals import tensor_subclasses

# (kind, what, children); what: the number of a tensor, a constant, names, or (class, names)
Shape = tuple[str, Any, tuple[Any, ...]]
PLAIN = ("dict", "OrderedDict", "list", "tuple")
# methods of a class by which its objects would be more than their attributes
OWN = ("__new__", "__reduce__", "__reduce_ex__", "__getattribute__", "__setattr__", "__delattr__")


class ModuleResults:
    """The results of a module as trees of literals, with the classes that make them again. Dynamo
    reaches each as an attribute of this.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def pair(self, out: tuple[Any, Any], tensors: list[torch.Tensor]) -> Shape:
        """A result and the buffers after the call, as one tree of literals."""
        numbers: dict[int, int] = {}
        return "tuple", (), tuple(self.shape(x, tensors, numbers) for x in out)

    def shape(
        self, x: Any, tensors: list[torch.Tensor], numbers: dict[int, int], path: str = ""
    ) -> Shape:
        """A result as a tree of literals; its tensors are added to a list.

        Args:
            x: the result.
            tensors: a list to which its tensors are added.
            numbers: the numbers of the containers so far, by id, in the order in which they are
                made again. One that stands in two places stays one.
            path: where it stands.

        Raises:
            CaptureError: it is neither a tree nor an object of tensors and constants.
        """
        if isinstance(x, torch.Tensor):
            if _compat.is_foreign(x):
                raise tensor_subclasses.subclass_error(
                    self.name, f"the module returns a {type(x).__name__}", None
                )
            tensors.append(x)
            return "tensor", len(tensors) - 1, ()
        if isinstance(x, CONSTANTS):
            return "constant", x, ()
        if isinstance(x, type):
            return "class", self.held(x), ()
        if id(x) in numbers:
            return "same", numbers[id(x)], ()
        kind, names, children = self.parts(x, path)
        ways = [f".{name}" for name in names] if names else map(_item, range(len(children)))
        shapes = tuple(
            self.shape(child, tensors, numbers, path + way)
            for way, child in zip(ways, children, strict=True)
        )
        numbers[id(x)] = len(numbers)
        is_plain = kind in PLAIN
        return kind, names if is_plain else (self.held(type(x)), names), shapes

    def parts(self, x: Any, path: str) -> tuple[str, tuple[Any, ...], list[Any]]:
        """The kind of a container, the names of its children, and the children."""
        kind = type(x).__name__
        if type(x) in (list, tuple):
            return kind, (), list(x)
        if type(x) in (dict, OrderedDict):
            return kind, tuple(x), list(x.values())
        if _is_named_tuple(x):
            return "named", tuple(x._fields), list(x)
        if _is_of_keywords(x):
            return "keywords", tuple(x), list(x.values())
        if _is_record(x) and not _holds_itself(x):
            return "record", tuple(vars(x)), list(vars(x).values())
        at = f" at {path.lstrip('.')}" if path else ""
        raise CaptureError.of(
            self.name,
            f"the module returns a {kind}{at}",
            needed="a tree of tensors and constants",
            fix="return tensors and constants; turn your own class into a NamedTuple or a dict",
        )

    def held(self, kind: type) -> str:
        """The name of the attribute in which this object keeps a class."""
        name = f"class_{id(kind)}"
        setattr(self, name, kind)
        return name


def _item(i: int) -> str:
    return f"[{i}]"


def _is_named_tuple(x: Any) -> bool:
    """Whether a NamedTuple is equal to one that its class makes of its items."""
    if not isinstance(x, tuple) or not hasattr(x, "_fields"):
        return False
    if getattr(x, "__dict__", None):
        return False
    remade: Any = type(x)(*x)
    return all(a is b for a, b in zip(remade, x, strict=True))


def _is_of_keywords(x: Any) -> bool:
    """Whether a dict that is a dataclass is equal to one that its class makes of its items."""
    if not isinstance(x, dict) or not dataclasses.is_dataclass(x):
        return False
    remade: Any = type(x)(**x)
    return _is_same(remade, x) and _is_same(vars(remade), vars(x))


def _is_same(remade: dict[Any, Any], x: dict[Any, Any]) -> bool:
    """Whether two dicts have the same items in the same order."""
    if list(remade) != list(x):
        return False
    return all(
        remade[key] is child or (isinstance(child, CONSTANTS) and remade[key] == child)
        for key, child in x.items()
    )


def _is_record(x: Any) -> bool:
    """Whether an object is fully described by its attributes."""
    kind = type(x)
    is_plain = all(getattr(kind, name) is getattr(object, name) for name in OWN)
    if not is_plain or isinstance(x, torch.nn.Module):
        return False
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    names = getattr(x, "__dict__", None)
    return (
        isinstance(names, dict)
        and not has_slots
        and not any(hasattr(getattr(kind, name, None), "__set__") for name in names)
    )


def _holds_itself(x: Any) -> bool:
    """Whether an object contains itself."""
    inside = set[int]()
    queue = [*vars(x).values()]
    while queue:
        child = queue.pop()
        if child is x:
            return True
        if id(child) in inside or isinstance(child, (torch.Tensor, type, *CONSTANTS)):
            continue
        inside.add(id(child))
        if isinstance(child, dict):
            queue += child.values()
        elif isinstance(child, (list, tuple)):
            queue += child
        elif _is_record(child):
            queue += vars(child).values()
    return False
