"""Trees as optree knows them: the only file that imports it.

A tensor that holds other tensors is a container of them once `learn` has met its class.

Dynamo reads this.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from .. import _compat

NAMESPACE = "shardfn"
TreeDef = optree.PyTreeSpec
_ordered = optree.dict_insertion_ordered(
    True, namespace=NAMESPACE
)  # our namespace alone
_ordered.__enter__()  # and left when this module goes


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree, in order, and its structure; `None` is a leaf, and so is what
    `is_leaf` says.
    """
    return optree.tree_flatten(
        tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """The tree of that structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def tree_map(
    fn: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Apply a function to every leaf of one tree, or of several of the same structure.

    Args:
        fn: takes one leaf of each tree.
        tree: a pytree: dicts, lists, tuples, named tuples, `None` (a leaf), registered classes. A
            tensor is a leaf, also one that holds others.
        rest: further trees of the same structure.
        is_leaf: whether a part of the tree counts as a leaf.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: the structures differ.

    Source: jax.tree.map.

    Example:
        >>> tree_map(lambda p, g: p - g, {"w": 3}, {"w": 1})
        {'w': 2}
    """
    leaf = is_tensor if is_leaf is None else lambda x: is_tensor(x) or is_leaf(x)
    return optree.tree_map(
        fn, tree, *rest, is_leaf=leaf, none_is_leaf=True, namespace=NAMESPACE
    )


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
    entries = [
        one.path_entry_type(entry, one.type, one.kind) for entry in one.entries
    ]
    return [
        (entry.codify(""), child)
        for entry, child in zip(entries, one.children, strict=True)
    ]


def is_leaf(x: Any) -> bool:
    """Whether x is not a container."""
    return optree.tree_is_leaf(x, none_is_leaf=True, namespace=NAMESPACE)
