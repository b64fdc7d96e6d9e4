"""Two trees side by side, dicts by key.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import _compat, _tree
from ._tree import children, is_plain, quick_leaves


@_compat.of_trees
def pair(
    tree: Any,
    like: Any,
    names: tuple[str, str],
    path: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[list[Any], list[str]]:
    """One leaf of a tree for each leaf of another, in the order of the other. Dicts are paired
    by key, all other containers by position.

    Args:
        tree: the tree whose leaves are returned.
        like: the tree whose order they take.
        names: the names of the two in mismatches, in the plural.
        path: the path of both.
        is_leaf: whether a part of `tree` stands for all leaves of its counterpart, as in a
            prefix tree; without it the two trees have one structure.

    Returns:
        (the leaves, None where there is none; the mismatches, a line each).
    """
    if is_leaf is not None and (is_leaf(tree) or not is_node(tree)):
        return [tree] * len(quick_leaves((like,))), []
    if not is_node(tree) and not is_node(like):
        return [tree], []
    at = path or "the whole tree"
    if not _same_kind(tree, like):
        return _none_paired(like), [f"{at}: {_kinds_text(tree, like, names)}"]
    mine = dict(children(tree))
    counterparts = dict(children(like))
    if mine.keys() != counterparts.keys():
        difference = _difference(names[0], list(mine), list(counterparts))
        return _none_paired(like), [f"{at}: {difference}"]
    matches: list[Any] = []
    wrong: list[str] = []
    for way, counterpart in counterparts.items():
        below, more = pair(mine[way], counterpart, names, path + way, is_leaf)
        matches += below
        wrong += more
    return matches, wrong


def _none_paired(like: Any) -> list[Any]:
    return [None] * len(quick_leaves((like,)))


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One leaf of a tree of placements for every leaf of the arguments.

    Raises:
        ValueError: the prefix does not match; its args are the mismatches, one line each.
    """
    if _tree.holders(tree):  # which `pair` takes for leaves
        tree = _tree.map_held(lambda _: None, tree)
    return spread(prefix, tree, is_leaf)


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """`broadcast_prefix` over a tree in which no tensor holds others.

    Raises:
        ValueError: the prefix does not match; its args are the mismatches, one line each.
    """
    found, wrong = pair(prefix, tree, ("placements", "the arguments"), is_leaf=is_leaf)
    if wrong:
        raise ValueError(*wrong)
    return found


def is_node(x: Any) -> bool:
    """Whether x is a container, and not a leaf."""
    if isinstance(x, torch.Tensor):
        return False
    return is_plain(x) or not _tree.is_leaf(x)


def classes(tree: Any, path: str) -> list[tuple[str, str]]:
    """The containers in a tree of classes that nothing tells how to make, each with its path and
    the name of its class.
    """
    if not is_node(tree):
        return []
    if not is_plain(tree) and _compat.registered(type(tree)) is None:
        return [(path, type(tree).__name__)]
    return [found for way, child in children(tree) for found in classes(child, path + way)]


def _same_kind(a: Any, b: Any) -> bool:
    """Whether two trees are containers of one type. All mappings count as one type."""
    are_mappings = isinstance(a, Mapping) and isinstance(b, Mapping)
    return is_node(a) and (type(a) is type(b) or are_mappings)


def _kinds_text(tree: Any, like: Any, names: tuple[str, str]) -> str:
    first, second = names
    return f"{first} have {_said(tree)}, {second} have {_said(like)}"


def _said(x: Any) -> str:
    if is_node(x):
        return f"a {type(x).__name__}"
    return "a tensor" if hasattr(x, "shape") else f"a leaf {x!r}"


def _difference(mine: str, keys: list[str], wanted: list[str]) -> str:
    missing = [key for key in wanted if key not in keys]
    extra = [key for key in keys if key not in wanted]
    pairs = (("lack", missing), ("have also", extra))
    return "; ".join([f"{mine} {verb} {', '.join(some)}" for verb, some in pairs if some])
