"""The leaves of a call whose structure is known: a check and a walk in one, made once for a
structure. It takes a third of the time of a flattening and a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _compat, _tree

# adds the leaves of a tree to a list; whether the tree has the structure
Walk = Callable[[Any, list[Any]], bool]


def leaves_like(treedef: _tree.TreeDef) -> Callable[[Any], list[Any] | None] | None:
    """Build the function that returns a tree's leaves if it has this structure, else None. Where
    the structure has a leaf, a tree may have a container, which then counts as a leaf.

    None for a structure with other containers than dicts, lists and tuples.
    """
    walk = _walk(treedef)
    return None if walk is None else _compat.calls.Leaves(_said(treedef), walk)


def _said(treedef: _tree.TreeDef) -> Any:
    """Describe a tree structure by values: None for a leaf, else class, dict keys and children."""
    if treedef.is_leaf():
        return None
    keys = list(treedef.entries()) if treedef.type is dict else None
    return treedef.type, keys, list(map(_said, treedef.children()))


def _walk(treedef: _tree.TreeDef) -> Walk | None:
    if treedef.is_leaf():
        return _leaf
    if treedef.type not in (dict, list, tuple):
        return None
    children = treedef.children()
    walks = [_walk(child) for child in children]
    known = [walk for walk in walks if walk is not None]
    if len(known) < len(walks):
        return None
    if treedef.type is dict:
        keys = list(treedef.entries())
        if all(walk is _leaf for walk in known):
            return _dict_of_leaves(keys)
        return _dict(keys, known)
    return _row(treedef.type, known)


def _leaf(x: Any, leaves: list[Any]) -> bool:
    leaves.append(x)
    return True


def _dict_of_leaves(keys: list[Any]) -> Walk:
    def walk(x: Any, leaves: list[Any]) -> bool:
        if type(x) is not dict or list(x) != keys:
            return False
        leaves += x.values()
        return True

    return walk


def _dict(keys: list[Any], walks: list[Walk]) -> Walk:
    def walk(x: Any, leaves: list[Any]) -> bool:
        if type(x) is not dict or list(x) != keys:
            return False
        pairs = zip(x.values(), walks, strict=True)
        return all(inner(child, leaves) for child, inner in pairs)

    return walk


def _row(kind: type[Any], walks: list[Walk]) -> Walk:
    count = len(walks)

    def walk(x: Any, leaves: list[Any]) -> bool:
        if type(x) is not kind or len(x) != count:
            return False
        pairs = zip(x, walks, strict=True)
        return all(inner(child, leaves) for child, inner in pairs)

    return walk
