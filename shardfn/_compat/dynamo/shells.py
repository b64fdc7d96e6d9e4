"""Tensors that hold other tensors, and objects that are containers: how to open and to close
them.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch.utils import _pytree

from ..tracing import read_by_dynamo

Opened = tuple[list[Any], Any, list[Any]]  # children, what else it is, their names
# attributes that a graph cannot use, by class: offsets of words in the texts of a batch
LEFT_OUT = {"BatchEncoding": "_encodings"}
# classes whose objects are their attributes, by module: the caches of Hugging Face, and sparse
# tensors inside captured functions
RECORDS = {"transformers.cache_utils", "shardfn.capture.rewrites.sparse_matrices"}
PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size, type)


class Class(NamedTuple):
    """How a class of containers is opened and closed."""

    opened: Callable[[Any], Opened]
    closed: Callable[[Any, Any], Any]
    has_names: bool  # whether children are attributes, and not items


@attrs.frozen
class Shell:
    """A tensor that holds others, without those.

    `context` is what its class says of it besides its tensors. It is compared as text, which
    tells 1 from True and does not change with it.
    """

    kind: type[Any]
    names: tuple[str, ...]
    context: Any = attrs.field(eq=False)
    said: str  # the context
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_followed: bool  # by autograd

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self.names)}; {self.said})"


def opened(x: Any) -> tuple[list[torch.Tensor], Shell]:
    """Split a wrapper subclass into its inner tensors and a spec of the rest."""
    names, context = x.__tensor_flatten__()
    if isinstance(context, dict):
        context = dict(context)  # as it is now
    is_followed = x.requires_grad and torch.is_grad_enabled()
    shape = tuple(x.shape)
    stride = tuple(x.stride())
    said = repr(context)
    shell = Shell(type(x), tuple(names), context, said, shape, stride, is_followed)
    return [getattr(x, name) for name in names], shell


@read_by_dynamo
def closed(shell: Shell, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Build a wrapper subclass from its spec and inner tensors."""
    held = dict(zip(shell.names, tensors, strict=True))
    size = torch.Size(shell.shape)
    stride = shell.stride
    told = shell.context
    told = dict(told) if isinstance(told, dict) else told
    return shell.kind.__tensor_unflatten__(held, told, size, stride)


def registered(kind: type[Any]) -> Class | None:
    """Return how to flatten and rebuild a container class: one that torch's pytree knows, a
    subclass of dict or UserDict, or a record. None for others.
    """
    if kind.__module__ == "builtins" or kind is torch.Size:  # a constant
        return None
    if kind in _pytree.SUPPORTED_NODES:
        return _of_torch(kind)
    if kind.__bases__ == (dict,):
        return _mapping(kind, None)
    if issubclass(kind, UserDict):
        return _mapping(kind, "data")
    if kind.__module__ in RECORDS:
        return _record(kind)
    return None


def _of_torch(kind: type[Any]) -> Class:
    """Build the flatten and rebuild functions of a class that torch's pytree knows."""

    # each closes over the class alone: Dynamo reads them, and no functools.partial of torch's
    def opened(x: Any) -> Opened:
        # of a dataclass the other function has not all of the context (torch 2.13)
        known: Any = _pytree.SUPPORTED_NODES[kind]
        children, context = known.flatten_fn(x)
        children = list(children)
        names = _names(known, x, len(children))
        return children, context, names

    def closed(context: Any, children: Any) -> Any:
        known: Any = _pytree.SUPPORTED_NODES[kind]
        children = list(children)
        return known.unflatten_fn(children, context)

    return Class(opened, closed, dataclasses.is_dataclass(kind))


def _names(known: Any, x: Any, count: int) -> list[Any]:
    """Name the children of an object that torch's pytree knows."""
    if known.flatten_with_keys_fn is None:
        is_items = isinstance(x, dict) and len(x) == count
        return list(x) if is_items else [f"item{i}" for i in range(count)]
    names = []
    pairs, _ = known.flatten_with_keys_fn(x)
    for key, _ in pairs:
        name = getattr(key, "name", None)
        names.append(getattr(key, "key", name))
    return names


def _mapping(kind: Any, place: str | None) -> Class:
    """Build the flatten and rebuild functions of a mapping with attributes.

    Args:
        kind: the class.
        place: the attribute that holds the items, if it is not a dict itself.
    """

    def opened(x: Any) -> Opened:
        values, names, constants = _attributes(x, place)
        keys = list(x)
        context = keys, names, constants
        return [*x.values(), *values], context, [*keys, *names]

    def closed(context: Any, children: Any) -> Any:
        keys, names, constants = context
        made = kind.__new__(kind)
        values = list(children)
        count = len(keys)
        items = dict(zip(keys, values[:count], strict=True))
        if place is None:
            dict.update(made, items)
        else:
            object.__setattr__(made, place, items)
        _store(made, names, values[count:], constants)
        return made

    return Class(opened, closed, has_names=False)


def _record(kind: Any) -> Class:
    """Build the flatten and rebuild functions of an object that is just its attributes."""

    def opened(x: Any) -> Opened:
        values, names, constants = _attributes(x, None)
        return values, (names, constants), names

    def closed(context: Any, children: Any) -> Any:
        names, constants = context
        made = kind.__new__(kind)
        _store(made, names, children, constants)
        return made

    return Class(opened, closed, has_names=True)


def _attributes(x: Any, place: str | None) -> tuple[list[Any], list[str], list[tuple[str, Any]]]:
    """Split an object's attributes into children with names, and constants, leaving out the one
    that holds its items.
    """
    left_out = LEFT_OUT.get(type(x).__name__)
    values: list[Any] = []
    names: list[str] = []
    constants: list[tuple[str, Any]] = []
    for name, value in vars(x).items():
        if name == left_out:
            constants.append((name, None))
        elif isinstance(value, PLAIN):
            constants.append((name, value))
        elif name != place:
            values.append(value)
            names.append(name)
    return values, names, constants


def _store(made: Any, names: Any, values: Any, constants: Any) -> None:
    """Set the attributes of a rebuilt object."""
    for name, value in constants:
        object.__setattr__(made, name, value)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
