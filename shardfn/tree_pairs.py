"""Pairing of the leaves of two trees, in which dicts are paired by key.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import _compat, _tree
from ._tree import children, is_plain, quick_leaves

# of a function: the names of its positional parameters, of `*args`, of those by keyword alone, of
# `**kwargs`
Parameters = tuple[tuple[str, ...], str, tuple[str, ...], str]


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


@_compat.of_trees
def by_parameter(
    prefix: Any,
    parameters: Parameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: Callable[[Any], bool],
    count: int | None = None,
) -> tuple[list[Any], list[str]]:
    """One leaf of a prefix tree for every leaf of the arguments of a call. Its parts bind to
    parameters as arguments do: those of a tuple by position, those of a dict by name.

    Args:
        prefix: one leaf for all arguments, a tuple or list, or a dict of parameters by name, in
            which `*args` and `**kwargs` have their own names.
        parameters: of the function.
        args: the positional arguments.
        kwargs: the keyword arguments.
        is_leaf: as in `pair`.
        count: of the leaves of the arguments, if the caller knows it.

    Returns:
        (the leaves, None for arguments without a part; the mismatches, a line each).
    """
    if count is None:
        count = len(quick_leaves((args, kwargs)))
    if is_leaf(prefix) or not isinstance(prefix, (tuple, list, dict)):
        return [prefix] * count, []
    parts = _parts(prefix, parameters)
    values = bound(parameters, args, kwargs, parts)
    numbers = bound(parameters, *_numbered(args, kwargs, count), parts)
    needed = [] if isinstance(prefix, dict) else [*bound(parameters, args, {}, {})]
    known = {*parameters[0], parameters[1], *parameters[2], parameters[3]}
    keys = [str(name) for name in parts if name in values or name not in known]
    optional = [name for name in values if name not in needed and name not in parts]
    difference = _difference("placements", keys + optional, [*values])
    is_extra = any(key not in values for key in keys)
    text = f"; the parameters are {_signature(parameters)}" if is_extra else ""
    wrong = [f"the whole tree: {difference}{text}"] if difference else []
    found: list[Any] = [None] * count
    names = ("placements", "the arguments")
    for name in [name for name in values if name in parts]:
        leaves, more = pair(parts[name], values[name], names, name, is_leaf)
        wrong += more
        for i, leaf in zip(quick_leaves((numbers[name],)), leaves, strict=True):
            found[i] = leaf
    return found, wrong


def _numbered(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the numbers of its leaves, as a list, in the place of each."""
    sizes = tuple([0] * len(quick_leaves((x,))) for x in args)
    by_name = {name: [0] * len(quick_leaves((x,))) for name, x in kwargs.items()}
    rows, named = _tree.refill((sizes, by_name), range(count))
    return rows, named


def _parts(prefix: Any, parameters: Parameters) -> dict[str, Any]:
    """The parts of a prefix tree by the names of parameters; `[2]` for one too many."""
    if isinstance(prefix, dict):
        return {**prefix}
    positional, starred = parameters[:2]
    parts = dict(zip(positional, prefix, strict=False))
    rest = tuple(prefix[len(positional) :])
    if starred:
        return {**parts, starred: rest} if rest else parts
    return {**parts, **{f"[{len(positional) + i}]": part for i, part in enumerate(rest)}}


def bound(
    parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names of their parameters. A keyword that `**kwargs` takes
    stands alone if a part has its name.
    """
    positional, starred, by_keyword, double_starred = parameters
    out = dict(zip(positional, args, strict=False))
    if len(args) > len(positional):
        out[starred] = args[len(positional) :]
    named = {*positional, *by_keyword, *parts} - out.keys()
    out |= {name: x for name, x in kwargs.items() if name in named}
    others = {name: x for name, x in kwargs.items() if name not in named}
    return {**out, double_starred: others} if others else out


def _signature(parameters: Parameters) -> str:
    positional, starred, by_keyword, double_starred = parameters
    star = [f"*{starred}"] if starred or by_keyword else []
    rest = [f"**{double_starred}"] if double_starred else []
    return f"({', '.join([*positional, *star, *by_keyword, *rest])})"


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
