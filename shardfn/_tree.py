"""Trees of arguments: the only file that imports optree.

The leaves of a dict come in the order of its keys. A function may read that order, so it is
part of a tree's structure. `pair` pairs two trees, and dicts by key.

Dynamo reads this.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import optree
import torch

from . import _compat

NAMESPACE = "shardfn"
TreeDef = optree.PyTreeSpec
_ordered = optree.dict_insertion_ordered(
    True, namespace=NAMESPACE
)  # our namespace alone
_ordered.__enter__()  # and left when this module goes


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree, in order, and its structure; `None` is a leaf."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """The tree of that structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def _is_plain(x: Any) -> bool:
    """Whether x is a container that Dynamo reads quickly."""
    plain = type(x) in (dict, list, tuple, OrderedDict, defaultdict, deque)
    return plain or (isinstance(x, tuple) and hasattr(x, "_fields"))


@_compat.of_trees
def quick_leaves(tree: Any) -> list[Any]:
    """The leaves of a container in the order of `refill`; a fifth of the time of `flatten` where
    Dynamo reads it.
    """
    out: list[Any] = []
    for child in tree.values() if isinstance(tree, dict) else tree:
        if _is_plain(child):
            out += quick_leaves(child)
        elif (
            isinstance(child, torch.Tensor)
            or child is None
            or isinstance(child, (int, float, str))
        ):
            out.append(child)
        else:
            out += leaves(child)
    return out


@_compat.of_trees
def quick_paths(x: Any, path: str) -> list[str]:
    """The path of each leaf of `quick_leaves` from x, as Python writes it."""
    if isinstance(x, torch.Tensor):
        return [path]
    if not _is_plain(x):
        count = len(leaves(x))
        return [path] if count == 1 else [f"{path}<{i}>" for i in range(count)]
    return [
        found
        for way, child in _children(x)
        for found in quick_paths(child, path + way)
    ]


def _children(x: Any) -> list[tuple[str, Any]]:
    """The children of a container, each with how Python reaches it."""
    if isinstance(x, dict):
        return [(f"[{key!r}]", child) for key, child in x.items()]
    if hasattr(x, "_fields"):
        return [
            (f".{name}", child) for name, child in zip(x._fields, x, strict=True)
        ]
    if _is_plain(x):
        return [(f"[{i}]", child) for i, child in enumerate(x)]
    one = optree.tree_flatten_one_level(x, none_is_leaf=True, namespace=NAMESPACE)
    entries = [
        one.path_entry_type(entry, one.type, one.kind) for entry in one.entries
    ]
    return [
        (entry.codify(""), child)
        for entry, child in zip(entries, one.children, strict=True)
    ]


@_compat.of_trees
def refill(tree: Any, leaves: Iterable[Any]) -> Any:
    """A container like this one with other leaves, taken in the order of `quick_leaves`."""
    return _refilled(tree, iter(leaves))


def _refilled(tree: Any, feed: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        children = {key: _refilled_child(x, feed) for key, x in tree.items()}
        return _dict_like(tree, children)
    return _row_like(tree, [_refilled_child(x, feed) for x in tree])


def _refilled_child(child: Any, feed: Iterator[Any]) -> Any:
    if _is_plain(child):
        return _refilled(child, feed)
    if isinstance(child, torch.Tensor):
        return next(feed)
    old, treedef = flatten(child)
    return unflatten(treedef, [next(feed) for _ in old])


@_compat.of_trees
def is_tensor(x: Any) -> bool:
    """Whether a leaf is a tensor."""
    return isinstance(x, torch.Tensor)


@_compat.of_trees
def is_floating(x: Any) -> bool:
    """Whether a leaf is a tensor that has derivatives."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


@_compat.of_trees
def tensors(
    tree: Any, chosen: Callable[[Any], bool] = is_tensor
) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree, in order, or the leaves that a predicate selects."""
    return [x for x in quick_leaves((tree,)) if chosen(x)]


@_compat.of_trees
def with_tensors(
    tree: Any, others: Iterable[Any], chosen: Callable[[Any], bool] = is_tensor
) -> Any:
    """A tree with other values in the places of its tensors, or of the leaves that a predicate
    selects.
    """
    return _with_chosen((tree,), iter(others), chosen)[0]


def _with_chosen(
    tree: Any, feed: Iterator[Any], chosen: Callable[[Any], bool]
) -> Any:
    """`with_tensors` of a container, in one walk: Dynamo reads this for every leaf."""
    if isinstance(tree, dict):
        return _dict_like(
            tree, {key: _chosen_child(x, feed, chosen) for key, x in tree.items()}
        )
    return _row_like(tree, [_chosen_child(x, feed, chosen) for x in tree])


def _chosen_child(
    child: Any, feed: Iterator[Any], chosen: Callable[[Any], bool]
) -> Any:
    if isinstance(child, torch.Tensor):
        return next(feed) if chosen(child) else child
    if _is_plain(child):
        return _with_chosen(child, feed, chosen)
    if child is None or isinstance(child, (int, float, str)):
        return child
    old, treedef = flatten(child)
    return unflatten(treedef, [next(feed) if chosen(x) else x for x in old])


def _dict_like(tree: dict[Any, Any], filled: dict[Any, Any]) -> dict[Any, Any]:
    if type(tree) is defaultdict:
        return defaultdict(tree.default_factory, filled)
    return OrderedDict(filled) if type(tree) is OrderedDict else filled


def _row_like(tree: Any, children: list[Any]) -> Any:
    if hasattr(tree, "_fields"):
        return type(tree)(*children)
    if type(tree) is deque:
        return deque(children, tree.maxlen)
    return children if type(tree) is list else tuple(children)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to every leaf of one tree, or of several of the same structure.

    Args:
        fn: takes one leaf of each tree.
        tree: a pytree: dicts, lists, tuples, named tuples, `None` (a leaf), registered classes.
        rest: further trees of the same structure.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: the structures differ.

    Source: jax.tree.map.

    Example:
        >>> tree_map(lambda p, g: p - g, {"w": 3}, {"w": 1})
        {'w': 2}
    """
    return optree.tree_map(fn, tree, *rest, none_is_leaf=True, namespace=NAMESPACE)


def paths(tree: Any) -> list[str]:
    """The path of each leaf, as Python writes it: `['w'][0].x`."""
    accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify("") for accessor in accessors]


def argument_paths(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The path of every argument leaf of a call, by parameter name: `params['w']`."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        names = [f"args[{i}]" for i in range(len(args))]
    else:
        names = _positional_names(bound, len(args))
    out = [
        name + path
        for name, arg in zip(names, args, strict=True)
        for path in paths(arg)
    ]
    return out + [name + path for name in kwargs for path in paths(kwargs[name])]


def _positional_names(bound: inspect.BoundArguments, count: int) -> list[str]:
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [
                f"{name}[{i}]" for i in range(len(bound.arguments.get(name, ())))
            ]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    return names[:count]


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
    children, counterparts = dict(_children(tree)), dict(_children(like))
    if children.keys() != counterparts.keys():
        difference = _difference(names[0], list(children), list(counterparts))
        return _none_paired(like), [f"{at}: {difference}"]
    matches: list[Any] = []
    wrong: list[str] = []
    for way, counterpart in counterparts.items():
        below, more = pair(children[way], counterpart, names, path + way, is_leaf)
        matches += below
        wrong += more
    return matches, wrong


def _none_paired(like: Any) -> list[Any]:
    return [None] * len(quick_leaves((like,)))


def broadcast_prefix(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]
) -> list[Any]:
    """One leaf of a tree of placements for every leaf of the arguments.

    Raises:
        ValueError: the prefix does not match; its args are the mismatches, one line each.
    """
    found, wrong = pair(
        prefix, tree, ("placements", "the arguments"), is_leaf=is_leaf
    )
    if wrong:
        raise ValueError(*wrong)
    return found


def is_node(x: Any) -> bool:
    """Whether x is a container, and not a leaf."""
    if isinstance(x, torch.Tensor):
        return False
    return _is_plain(x) or not optree.tree_is_leaf(
        x, none_is_leaf=True, namespace=NAMESPACE
    )


def classes(tree: Any, path: str) -> list[tuple[str, str]]:
    """The containers in a tree that are not Python's own, each with its path and the name of
    its class.
    """
    if not is_node(tree):
        return []
    if not _is_plain(tree):
        return [(path, type(tree).__name__)]
    return [
        found
        for way, child in _children(tree)
        for found in classes(child, path + way)
    ]


def _same_kind(a: Any, b: Any) -> bool:
    """Whether two trees are containers of one type. All dicts count as one type."""
    return is_node(a) and (
        type(a) is type(b) or (isinstance(a, dict) and isinstance(b, dict))
    )


def _kinds_text(tree: Any, like: Any, names: tuple[str, str]) -> str:
    return f"{names[0]} have {_said(tree)}, {names[1]} have {_said(like)}"


def _said(x: Any) -> str:
    if is_node(x):
        return f"a {type(x).__name__}"
    return "a tensor" if hasattr(x, "shape") else f"a leaf {x!r}"


def _difference(mine: str, keys: list[str], wanted: list[str]) -> str:
    missing = [key for key in wanted if key not in keys]
    extra = [key for key in keys if key not in wanted]
    pairs = (("lack", missing), ("have also", extra))
    return "; ".join(
        [f"{mine} {verb} {', '.join(some)}" for verb, some in pairs if some]
    )
