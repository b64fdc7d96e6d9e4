"""Trees of parameters, paired with their gradients and paths.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat, _tree, tree_pairs
from ...types import ShapeDtype


@_compat.of_trees
def dotted_paths(tree: Any, path: str = "") -> list[str]:
    """The path of each tensor of a tree, such as `layers.0.weight`."""
    if isinstance(tree, torch.Tensor):
        return [path]
    if not tree_pairs.is_node(tree):
        return []
    start = f"{path}." if path else ""
    return [found for name, child in _named(tree) for found in dotted_paths(child, start + name)]


@_compat.of_trees
def _named(tree: Any) -> list[tuple[str, Any]]:
    """The children of a container by name."""
    if isinstance(tree, dict):
        return [(str(key), child) for key, child in tree.items()]
    return [(way.strip(".[]'"), child) for way, child in _tree.children(tree)]


@_compat.of_trees
def beside(params: Any, tree: Any, names: tuple[str, str]) -> tuple[list[Any], list[str]]:
    """The leaf of a tree for each tensor of the parameters, and the mismatches of the two."""
    leaves = _tree.quick_leaves((params,))
    found, wrong = tree_pairs.pair(tree, params, names)
    chosen = [x for p, x in zip(leaves, found, strict=True) if isinstance(p, torch.Tensor)]
    return chosen, wrong


@_compat.of_trees
def described(leaves: list[Any]) -> list[Any]:
    """(shape, dtype) of each leaf that is a tensor, the class of another. None for None."""
    return [_described(x) for x in leaves]


@_compat.of_trees
def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(map(int, x.shape)), x.dtype
    return None if x is None else f"a {type(x).__name__}"


def has_shapes(tree: Any) -> bool:
    """Whether a tree has ShapeDtypes among its leaves."""
    return any(isinstance(x, ShapeDtype) for x in _tree.leaves(tree))


def as_shapes(tree: Any) -> Any:
    """A tree with a ShapeDtype for each tensor."""
    made = lambda x: ShapeDtype(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
    return _tree.tree_map(made, tree)


def without_values(tree: Any) -> Any:
    """A tree with a tensor of the meta device for each tensor and each ShapeDtype."""

    def made(x: Any) -> Any:
        is_shape = isinstance(x, (torch.Tensor, ShapeDtype))
        return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") if is_shape else x

    return _tree.tree_map(made, tree)
