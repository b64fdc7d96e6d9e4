"""Objects that are containers, among the arguments of a function: taken apart for Dynamo, which
takes no others than Python's own, and made again inside of the function.
"""

from __future__ import annotations

from typing import Any

from ... import _compat, _tree, tree_pairs
from ...errors import CaptureError


def apart(tree: Any) -> tuple[Any, Any]:
    """A tree with rows of children in place of the objects that are containers of classes that
    torch's pytree does not know, and how `made` makes them. None where there are none.
    """
    if not tree_pairs.is_node(tree):
        return tree, None
    way = None if _tree.is_plain(tree) else _compat.registered(type(tree))
    if way is None:
        children, context = [x for _, x in _tree.children(tree)], None
    else:
        children, context, _ = way.opened(tree)
    pairs = [apart(x) for x in children]
    rows = [x for x, _ in pairs]
    inner = tuple(how for _, how in pairs)
    if way is not None:
        return tuple(rows), (way, context, inner)
    if not any(inner):
        return tree, None
    return _tree.like(tree, rows), (None, None, inner)


@_compat.read_by_dynamo
def made(tree: Any, how: Any, records: list[Any]) -> Any:
    """The tree that `apart` took apart. Adds to a list for each record (the outermost record
    around it, itself, how it opens, its children).
    """
    if how is None:
        return tree
    way, context, inner = how
    given = tree.values() if isinstance(tree, dict) else tree
    first = len(records)
    pairs = zip(given, inner, strict=True)
    children = [made(x, below, records) for x, below in pairs]
    if way is None:
        return _tree.like(tree, children)
    closed = way.closed(context, children)
    if way.has_names:
        before = [list(x) if isinstance(x, list) else x for x in children]
        records.append((closed, closed, way.opened, before))
        for i in range(first, len(records)):
            records[i] = (closed, *records[i][1:])
    return closed


@_compat.read_by_dynamo
def lost_changes(records: list[Any], out: Any) -> list[str]:
    """The classes of the records that have other children than they were made with, and are no
    part of the result.
    """
    found = []
    for outer, x, opened, before in records:
        after = opened(x)[0]
        if not _are_same(before, after) and not _holds(out, outer):
            found.append(type(outer).__name__)
    return found


@_compat.read_by_dynamo
def _are_same(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists have the same tensors and objects."""
    if len(before) != len(after):
        return False
    for x, y in zip(before, after, strict=True):
        if isinstance(x, list) and isinstance(y, list):
            if not _are_same(x, y):
                return False
        elif x is not y:
            return False
    return True


@_compat.read_by_dynamo
def _holds(tree: Any, x: Any) -> bool:
    """Whether a tree has an object among its parts."""
    if tree is x:
        return True
    if isinstance(tree, dict):
        return any(_holds(child, x) for child in tree.values())
    if isinstance(tree, (list, tuple)):
        return any(_holds(child, x) for child in tree)
    return False


@_compat.constant_in_graph
def refuse_lost(name: str, kinds: list[str]) -> None:
    """Refuse a function that changes an argument which its caller has.

    Raises:
        CaptureError: it does.
    """
    if kinds:
        raise CaptureError.of(
            name,
            f"it changes its argument, a {kinds[0]}, and the caller would not see it",
            needed="a function that returns what it changes",
            fix=f"return the {kinds[0]}, and go on with the one that the call returns",
        )
