"""Objects that are containers, among the arguments of a function: opened for Dynamo, which takes
Python's own only, and made again inside of the function.
"""

from __future__ import annotations

from typing import Any

from ... import _compat, _tree, tree_pairs
from ...errors import CaptureError


def opened_tree(tree: Any) -> tuple[Any, Any]:
    """A tree with a tuple of children in place of each container object, and how `remade_tree`
    makes the objects again. None where there are none.
    """
    if not tree_pairs.is_node(tree):
        return tree, None
    is_plain = _tree.is_plain(tree)
    way = None if is_plain else _compat.registered(type(tree))
    context = None
    if way is None:
        children = [x for _, x in _tree.children(tree)]
    else:
        children, context, _ = way.opened(tree)
    rows = []
    inner = []
    for child in children:
        row, how = opened_tree(child)
        rows.append(row)
        inner.append(how)
    if way is not None:
        return tuple(rows), (way, context, inner)
    if not any(inner):
        return tree, None
    return _tree.like(tree, rows), (None, None, inner)


@_compat.read_by_dynamo
def remade_tree(tree: Any, how: Any, records: list[Any]) -> Any:
    """The tree with its container objects made again, as `opened_tree` took them apart. Adds to
    a list for each record (the outermost record around it, itself, how it opens, its children).
    """
    if how is None:
        return tree
    way, context, inner = how
    first = len(records)
    given = tree.values() if isinstance(tree, dict) else tree
    children = []
    for x, below in zip(given, inner, strict=True):
        children.append(remade_tree(x, below, records))
    if way is None:
        return _tree.like(tree, children)
    found = way.closed(context, children)
    if way.has_names:
        before = list(map(_noted, children))
        records.append((found, found, way.opened, before))
        for i in range(first, len(records)):
            records[i] = (found, *records[i][1:])
    return found


@_compat.read_by_dynamo
def _noted(x: Any) -> Any:
    """A shallow copy of a child, to compare it later."""
    return list(x) if isinstance(x, list) else x


@_compat.read_by_dynamo
def lost_changes(records: list[Any], out: Any) -> list[str]:
    """The classes of the records that have other children than they were made with, and that the
    result does not hold.
    """
    classes = []
    for outer, x, how, before in records:
        after, *_ = how(x)
        is_same = _are_same(before, after)
        if not is_same and not _holds(out, outer):
            classes.append(type(outer).__name__)
    return classes


@_compat.read_by_dynamo
def _are_same(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists have the same tensors and objects."""
    if len(before) != len(after):
        return False
    for x, y in zip(before, after, strict=True):
        are_lists = isinstance(x, list) and isinstance(y, list)
        is_same = _are_same(x, y) if are_lists else x is y
        if not is_same:
            return False
    return True


@_compat.read_by_dynamo
def _holds(tree: Any, x: Any) -> bool:
    """Whether a tree contains an object."""
    if tree is x:
        return True
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, (list, tuple)):
        return False
    return any(_holds(child, x) for child in tree)


@_compat.constant_in_graph
def refuse_lost(name: str, kinds: list[str]) -> None:
    """Refuse a function that changes an argument which its caller has.

    Raises:
        CaptureError: it does.
    """
    if kinds:
        raise CaptureError.of(
            name,
            f"the function changes its argument, a {kinds[0]}, and the caller would not see this",
            needed="a function that returns the changed object",
            fix=f"return the {kinds[0]}, and use the returned object after the call",
        )
