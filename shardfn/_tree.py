"""Trees of arguments: the only file that imports optree."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch

NAMESPACE = "shardfn"
TreeDef = optree.PyTreeSpec


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
    return type(x) in (dict, list, tuple, OrderedDict) or hasattr(x, "_fields")


def quick_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree in the order of `refill`; a fifth of the time of `flatten` where Dynamo reads it."""
    out: list[Any] = []
    for child in tree.values() if isinstance(tree, dict) else tree:
        if _is_plain(child):
            out += quick_leaves(child)
        elif isinstance(child, torch.Tensor):
            out.append(child)
        else:
            out += leaves(child)
    return out


def quick_paths(x: Any, path: str) -> list[str]:
    """How each leaf of `quick_leaves` is reached from x, as Python writes it."""
    if isinstance(x, torch.Tensor):
        return [path]
    if not _is_plain(x):
        count = len(leaves(x))
        return [path] if count == 1 else [f"{path}<{i}>" for i in range(count)]
    if isinstance(x, dict):
        named = [(f"{path}[{key!r}]", child) for key, child in x.items()]
    elif hasattr(x, "_fields"):
        named = [(f"{path}.{name}", child) for name, child in zip(x._fields, x, strict=True)]
    else:
        named = [(f"{path}[{i}]", child) for i, child in enumerate(x)]
    return [found for p, child in named for found in quick_paths(child, p)]


def refill(tree: Any, feed: Iterator[Any]) -> Any:
    """A tree like this one with other leaves, taken in the order of `quick_leaves`."""
    if isinstance(tree, dict):
        filled = {key: _refilled(child, feed) for key, child in tree.items()}
        return OrderedDict(filled) if type(tree) is OrderedDict else filled
    children = [_refilled(child, feed) for child in tree]
    if hasattr(tree, "_fields"):
        return type(tree)(*children)
    return children if type(tree) is list else tuple(children)


def _refilled(child: Any, feed: Iterator[Any]) -> Any:
    if _is_plain(child):
        return refill(child, feed)
    if isinstance(child, torch.Tensor):
        return next(feed)
    old, treedef = flatten(child)
    return unflatten(treedef, [next(feed) for _ in old])


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
    """How each leaf is reached, as Python writes it: `['w'][0].x`."""
    accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify("") for accessor in accessors]


def argument_paths(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The path of every argument leaf of a call, by parameter name: `params['w']`."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        names = [f"args[{i}]" for i in range(len(args))]
    else:
        names = _positional_names(bound, len(args))
    out = [name + path for name, arg in zip(names, args, strict=True) for path in paths(arg)]
    return out + [name + path for name in sorted(kwargs) for path in paths(kwargs[name])]


def _positional_names(bound: inspect.BoundArguments, count: int) -> list[str]:
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound.arguments.get(name, ())))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    return names[:count]


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One leaf of the prefix for every leaf of the tree.

    Raises:
        ValueError: the prefix does not match; its args are the mismatches, one line each.
    """
    errors = _prefix_errors(prefix, tree, is_leaf, "")
    if errors:
        raise ValueError(*errors)
    return optree.broadcast_prefix(prefix, tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def _prefix_errors(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], path: str) -> list[str]:
    if is_leaf(prefix) or _is_leaf(prefix):
        return []
    if _is_leaf(tree):
        return [f"{path or 'the whole tree'}: placements have {_kind(prefix)}, the arguments have {_kind(tree)}"]
    mine, theirs = _children(prefix), _children(tree)
    if type(prefix) is not type(tree) or mine.keys() != theirs.keys():
        return [f"{path or 'the whole tree'}: {_difference(prefix, tree, mine, theirs)}"]
    return [e for key in mine for e in _prefix_errors(mine[key], theirs[key], is_leaf, path + key)]


def _is_leaf(x: Any) -> bool:
    return optree.tree_is_leaf(x, none_is_leaf=True, namespace=NAMESPACE)


def _children(x: Any) -> dict[str, Any]:
    one = optree.tree_flatten_one_level(x, none_is_leaf=True, namespace=NAMESPACE)
    return {entry(child).codify(""): value for entry, child, value in _entries(one)}


def _entries(one: Any) -> list[tuple[Any, Any, Any]]:
    kind, node = one.path_entry_type, one.type
    return [(lambda key: kind(key, node, one.kind), key, child) for key, child in zip(one.entries, one.children, strict=True)]


def _kind(x: Any) -> str:
    return "a leaf " + repr(x) if _is_leaf(x) and not hasattr(x, "shape") else "a tensor" if _is_leaf(x) else f"a {type(x).__name__}"


def _difference(prefix: Any, tree: Any, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    if type(prefix) is not type(tree):
        return f"placements have {_kind(prefix)}, the arguments have {_kind(tree)}"
    missing, extra = [k for k in theirs if k not in mine], [k for k in mine if k not in theirs]
    said = [f"{label} {', '.join(keys)}" for label, keys in (("placements lack", missing), ("placements have also", extra)) if keys]
    return "; ".join(said)
