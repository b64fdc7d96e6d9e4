"""The result of a module as a tree of literals, the form that Dynamo accepts from a call that it
does not read, and how each is made again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from ...types import CONSTANTS
from ..refusals import tensor_classes

# (kind, what, children); what: the number of a tensor, a constant, names, or (class, names)
Shape = tuple[str, Any, tuple[Any, ...]]
PLAIN = {"dict": dict, "OrderedDict": dict, "list": list, "tuple": tuple}


class Returned:
    """The classes in the results of a module. Dynamo reaches each as an attribute of this."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pair(self, out: tuple[Any, Any], tensors: list[torch.Tensor]) -> Shape:
        """A result and the buffers beside it as literals."""
        return "tuple", (), tuple(self.shape(x, tensors) for x in out)

    def shape(self, x: Any, tensors: list[torch.Tensor], path: str = "") -> Shape:
        """A result as literals. Adds its tensors to a list.

        Raises:
            CaptureError: it is neither a tree nor an object of tensors and constants.
        """
        if isinstance(x, torch.Tensor):
            if _compat.is_foreign(x):
                got = f"the module returns a {type(x).__name__}"
                raise tensor_classes.refused(self.name, got, None)
            tensors.append(x)
            return "tensor", len(tensors) - 1, ()
        if isinstance(x, CONSTANTS):
            return "constant", x, ()
        if isinstance(x, type):
            return "class", self.held(x), ()
        kind, names, children = self.parts(x, path)
        ways = (
            [f".{name}" for name in names]
            if names
            else map(_item, range(len(children)))
        )
        shapes = tuple(
            self.shape(child, tensors, path + way)
            for way, child in zip(ways, children, strict=True)
        )
        is_plain = kind in PLAIN
        return kind, names if is_plain else (self.held(type(x)), names), shapes

    def parts(self, x: Any, path: str) -> tuple[str, tuple[Any, ...], list[Any]]:
        """The kind of a container, the names of its children, and the children."""
        kind = type(x).__name__
        if type(x) in (list, tuple):
            return kind, (), list(x)
        if hasattr(x, "_fields") and isinstance(x, tuple):
            return "named", tuple(x._fields), list(x)
        if kind in PLAIN and isinstance(x, dict):
            return kind, tuple(x), list(x.values())
        if isinstance(x, dict) and dataclasses.is_dataclass(x):
            return "keywords", tuple(x), list(x.values())
        if _is_record(x):
            return "record", tuple(vars(x)), list(vars(x).values())
        at = f" at {path.lstrip('.')}" if path else ""
        fix = "return tensors and constants; make a class of yours a NamedTuple or a dict"
        raise CaptureError.of(
            self.name,
            f"the module returns a {kind}{at}",
            needed="a tree of tensors and constants",
            fix=fix,
        )

    def held(self, kind: type) -> str:
        """The name of the attribute that holds a class."""
        name = f"class_{id(kind)}"
        setattr(self, name, kind)
        return name


def _item(i: int) -> str:
    return f"[{i}]"


def _is_record(x: Any) -> bool:
    """Whether an object is its attributes, and nothing else."""
    kind = type(x)
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__new__ is object.__new__
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and hasattr(x, "__dict__")
        and not isinstance(x, torch.nn.Module)
    )
