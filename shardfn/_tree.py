"""Operations on pytrees of arguments, built on optree. No other file imports optree.

The leaves of a dict have the order of the keys. A function may read the order of the keys, so the
order is part of the tree's structure.

A tensor that holds other tensors is a container once `learn` has registered its class. The
functions marked `of_trees`, which Dynamo calls without tracing them, always treat a tensor as a
leaf.

Dynamo reads this.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import optree
import torch

from . import _compat
from .accepted import accept

NAMESPACE = "shardfn"
TreeDef = optree.PyTreeSpec
Kind = TypeVar("Kind", bound=type)
_ordered = optree.dict_insertion_ordered(True, namespace=NAMESPACE)  # our namespace alone
_ordered.__enter__()  # and left when this module goes


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree, in order, and its structure; `None` is a leaf, and so is what
    `is_leaf` says.
    """
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """The tree of that structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def containers(treedef: TreeDef) -> str:
    """The containers of a tree as text, with a star for each leaf."""
    text = str(treedef).removeprefix("PyTreeSpec(")
    return text.partition(", NoneIsLeaf")[0]


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def tree_map(
    fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply a function to every leaf of one tree, or of several trees with the same structure.

    Args:
        fn: a function of one leaf from each tree.
        tree: a pytree: dicts, lists, tuples, named tuples, `None` (a leaf), and classes that
            torch's pytree knows. A tensor is a leaf, even if it holds other tensors.
        rest: more trees with the same structure as the first tree.
        is_leaf: a function that returns whether a part of the tree is treated as a leaf.

    Returns:
        A tree with the same structure as the first tree.

    Raises:
        ValueError: the structures of the trees differ.

    Source: jax.tree.map.

    Example:
        >>> tree_map(lambda p, g: p - g, {"w": 3}, {"w": 1})
        {'w': 2}
    """
    if not _compat.is_tracing():
        accept("tree_map", fn=fn, is_leaf=is_leaf)
        learn_registered((tree, rest))
    leaf = is_tensor if is_leaf is None else lambda x: is_tensor(x) or is_leaf(x)
    return optree.tree_map(fn, tree, *rest, is_leaf=leaf, none_is_leaf=True, namespace=NAMESPACE)


def map_held(fn: Callable[..., Any], tree: Any) -> Any:
    """Apply a function to every leaf of a tree, and to the tensors that others hold."""
    return optree.tree_map(fn, tree, none_is_leaf=True, namespace=NAMESPACE)


@_compat.of_trees
def is_tensor(x: Any) -> bool:
    """Whether a leaf is a tensor."""
    return isinstance(x, torch.Tensor)


def paths(tree: Any) -> list[str]:
    """The path of each leaf, as Python writes it: `['w'][0].x`."""
    accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify("") for accessor in accessors]


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path as a module writes it: `layers.0.weight`."""
    leaves, treedef = flatten(tree, is_leaf)
    ways = [".".join(map(str, way.path)) for way in treedef.accessors()]
    return list(zip(ways, leaves, strict=True))


def dict_node(kind: Kind) -> Kind:
    """Make a subclass of dict a container; trees made from it hold a dict in its place."""
    optree.register_pytree_node(
        kind, _dict_opened, _dict_closed, path_entry_type=optree.MappingEntry, namespace=NAMESPACE
    )
    return kind


def _dict_opened(x: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    keys = tuple(x)
    return list(x.values()), keys, keys


def _dict_closed(keys: Any, children: Iterable[Any]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


def argument_paths(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The path of every argument leaf of a call, by parameter name: `params['w']`."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        bound = None
    _, treedef = flatten((args, kwargs))
    return call_paths(treedef, positional_names(bound, len(args)))


def call_paths(treedef: TreeDef, names: Sequence[str]) -> list[str]:
    """The path of every leaf of (args, kwargs), given the names of the positional arguments."""
    out = []
    for way in treedef.accessors():
        side, argument = way.path[:2]
        root = str(argument) if side else names[argument]
        out.append(f"{root}{way[2:].codify('')}")
    return out


def positional_names(bound: inspect.BoundArguments | None, count: int) -> list[str]:
    """The names of the positional arguments of a call, of which there are so many."""
    if bound is None:
        return [f"args[{i}]" for i in range(count)]
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound.arguments.get(name, ())))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    return names[:count]


def container_classes(treedef: TreeDef) -> set[type]:
    """Collect the classes of all containers in a tree."""
    if treedef.type is None:  # a leaf
        return set()
    return {treedef.type}.union(*map(container_classes, treedef.children()))


def learn(tree: Any) -> bool:
    """Make containers of the classes of tensors that hold other tensors, where a tree has such.

    Returns:
        Whether one of them was not known.
    """
    new = {type(x) for x in leaves(tree) if _compat.holds_tensors(x)}
    entry = optree.GetAttrEntry
    for kind in new:
        with contextlib.suppress(ValueError):  # another thread was first
            optree.register_pytree_node(
                kind, _opened, _closed, path_entry_type=entry, namespace=NAMESPACE
            )
    if new:
        learn(tree)  # those inside of them
    return bool(new)


def learn_registered(tree: Any) -> None:
    """Make containers of the classes in a tree of which `_compat.registered` tells how."""
    kinds = {type(x) for x in leaves(tree)}
    found = {kind: _compat.registered(kind) for kind in kinds}
    new = {kind: how for kind, how in found.items() if how is not None}
    for kind, how in new.items():
        opened, closed, has_names = how
        entry = optree.GetAttrEntry if has_names else optree.MappingEntry
        with contextlib.suppress(ValueError):  # another thread was first
            optree.register_pytree_node(
                kind, opened, closed, path_entry_type=entry, namespace=NAMESPACE
            )
    if new:
        learn_registered(tree)  # those inside of them


def _opened(x: Any) -> tuple[list[torch.Tensor], _compat.Shell, tuple[str, ...]]:
    tensors, shell = _compat.opened(x)
    return tensors, shell, shell.names


def _closed(shell: Any, children: Iterable[Any]) -> Any:
    """A tensor that holds these; a dict if they are something else than tensors."""
    held = list(children)
    if all(isinstance(x, torch.Tensor) for x in held):
        return _compat.closed(shell, held)
    return dict(zip(shell.names, held, strict=True))


def holders(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a tree that hold other tensors, each with its path."""
    leaves, treedef = flatten(tree, _compat.holds_tensors)
    pairs = zip(treedef.accessors(), leaves, strict=True)
    return [(way.codify(""), x) for way, x in pairs if _compat.holds_tensors(x)]


def named_children(x: Any) -> list[tuple[str, Any]]:
    """The children of a container of a class that is registered, each with how Python reaches
    it.
    """
    one = optree.tree_flatten_one_level(x, none_is_leaf=True, namespace=NAMESPACE)
    entries = [one.path_entry_type(entry, one.type, one.kind) for entry in one.entries]
    return [(entry.codify(""), child) for entry, child in zip(entries, one.children, strict=True)]


def is_leaf(x: Any) -> bool:
    """Whether x is not a container."""
    return optree.tree_is_leaf(x, none_is_leaf=True, namespace=NAMESPACE)


def is_plain(x: Any) -> bool:
    """Whether x is a container that Dynamo reads quickly."""
    plain = type(x) in (dict, list, tuple, OrderedDict, defaultdict, deque)
    return plain or (isinstance(x, tuple) and hasattr(x, "_fields"))


def is_plain_class(kind: type) -> bool:
    """Whether containers of this class are plain."""
    plain = kind in (dict, list, tuple, OrderedDict, defaultdict, deque)
    return plain or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


@_compat.of_trees
def quick_leaves(tree: Any) -> list[Any]:
    """The leaves of a container in the order of `refill`; a fifth of the time of `flatten` where
    Dynamo reads it.
    """
    out: list[Any] = []
    for child in tree.values() if isinstance(tree, dict) else tree:
        if is_plain(child):
            out += quick_leaves(child)
        elif (
            isinstance(child, torch.Tensor) or child is None or isinstance(child, (int, float, str))
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
    if not is_plain(x):
        count = len(leaves(x))
        return [path] if count == 1 else [f"{path}<{i}>" for i in range(count)]
    return [found for way, child in children(x) for found in quick_paths(child, path + way)]


def children(x: Any) -> list[tuple[str, Any]]:
    """The children of a container, each with how Python reaches it."""
    if isinstance(x, dict):
        return [(f"[{key!r}]", child) for key, child in x.items()]
    if hasattr(x, "_fields"):
        return [(f".{name}", child) for name, child in zip(x._fields, x, strict=True)]
    if is_plain(x):
        return [(f"[{i}]", child) for i, child in enumerate(x)]
    return named_children(x)


@_compat.of_trees
def refill(tree: Any, leaves: Iterable[Any]) -> Any:
    """A container like this one with other leaves, taken in the order of `quick_leaves`."""
    return _refilled(tree, iter(leaves))


def _refilled(tree: Any, feed: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        filled = {key: _refilled_child(x, feed) for key, x in tree.items()}
        return _dict_like(tree, filled)
    return _row_like(tree, [_refilled_child(x, feed) for x in tree])


def _refilled_child(child: Any, feed: Iterator[Any]) -> Any:
    if is_plain(child):
        return _refilled(child, feed)
    if isinstance(child, torch.Tensor):
        return next(feed)
    old, treedef = flatten(child)
    return unflatten(treedef, [next(feed) for _ in old])


@_compat.of_trees
def is_floating(x: Any) -> bool:
    """Whether a leaf is a tensor that has derivatives."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


@_compat.of_trees
def are_floating(tree: Any) -> bool:
    """Whether every leaf of a container is a tensor that has derivatives."""
    return all(map(is_floating, quick_leaves(tree)))


@_compat.of_trees
def tensors(tree: Any, chosen: Callable[[Any], bool] = is_tensor) -> list[torch.Tensor]:
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


def _with_chosen(tree: Any, feed: Iterator[Any], chosen: Callable[[Any], bool]) -> Any:
    """`with_tensors` of a container, in one walk: Dynamo reads this for every leaf."""
    if isinstance(tree, dict):
        return _dict_like(tree, {key: _chosen_child(x, feed, chosen) for key, x in tree.items()})
    return _row_like(tree, [_chosen_child(x, feed, chosen) for x in tree])


def _chosen_child(child: Any, feed: Iterator[Any], chosen: Callable[[Any], bool]) -> Any:
    if isinstance(child, torch.Tensor):
        return next(feed) if chosen(child) else child
    if is_plain(child):
        return _with_chosen(child, feed, chosen)
    if child is None or isinstance(child, (int, float, str)):
        return child
    old, treedef = flatten(child)
    return unflatten(treedef, [next(feed) if chosen(x) else x for x in old])


def like(tree: Any, children: list[Any]) -> Any:
    """A plain container like this one with these children."""
    if isinstance(tree, dict):
        return _dict_like(tree, dict(zip(tree, children, strict=True)))
    return _row_like(tree, children)


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
