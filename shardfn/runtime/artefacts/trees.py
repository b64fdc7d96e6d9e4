"""Structures of arguments and results as JSON: dicts, lists and tuples. A leaf is `null`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ... import _tree
from ...compile.text import Unwritable

Opened = Callable[[Any], list[Any]]
KINDS: dict[str, type] = {"list": list, "tuple": tuple}
DICTS: dict[str, type] = {"dict": dict, "ordered": OrderedDict}
KEYS = (str, int, bool)


class Leaf:
    """Stand for a leaf in a tree structure."""


def tree_text(treedef: Any) -> Any:
    """Print a tree structure as JSON.

    Raises:
        Unwritable: it has a container of another class, or a key other than text and numbers.
    """
    return _text(_tree.unflatten(treedef, [Leaf()] * treedef.num_leaves))


def _text(x: Any) -> Any:
    if isinstance(x, Leaf):
        return None
    for name, kind in KINDS.items():
        if type(x) is kind:
            return {name: [_text(child) for child in x]}
    for name, kind in DICTS.items():
        if type(x) is kind:
            return {name: [[_key(k), _text(child)] for k, child in x.items()]}
    raise Unwritable(f"a container of class {type(x).__name__}")


def _key(x: Any) -> Any:
    if type(x) in KEYS:
        return x
    raise Unwritable(f"a key of type {type(x).__name__}")


def tree_of(said: Any) -> Any:
    """Parse the tree structure of a JSON text.

    Raises:
        ValueError, TypeError: it is none.
    """
    return _tree.flatten(_built(said))[1]


def _built(said: Any) -> Any:
    if said is None:
        return Leaf()
    if not isinstance(said, dict) or len(said) != 1:
        raise ValueError(f"{said!r} must be a tree")
    ((name, rows),) = said.items()
    if name in KINDS:
        return KINDS[name](_built(child) for child in rows)
    if name not in DICTS or any(type(key) not in KEYS for key, _ in rows):
        raise ValueError(f"{name!r} must be a container")
    return DICTS[name]((key, _built(child)) for key, child in rows)
