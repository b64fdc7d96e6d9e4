"""Trees of arguments: containers, and the tensors and constants in them.

The leaves of a dict come in the order of its keys. A function may read that order, so it is
part of a tree's structure. Dynamo reads this.
"""

from .nodes import (
    TreeDef,
    argument_paths,
    flatten,
    holders,
    is_tensor,
    learn,
    leaves,
    map_held,
    paths,
    tree_map,
    unflatten,
)
from .pairs import broadcast_prefix, classes, is_node, pair
from .quick import (
    is_floating,
    quick_leaves,
    quick_paths,
    refill,
    tensors,
    with_tensors,
)

__all__ = [
    "TreeDef",
    "argument_paths",
    "broadcast_prefix",
    "classes",
    "flatten",
    "holders",
    "is_floating",
    "is_node",
    "is_tensor",
    "learn",
    "leaves",
    "map_held",
    "pair",
    "paths",
    "quick_leaves",
    "quick_paths",
    "refill",
    "tensors",
    "tree_map",
    "unflatten",
    "with_tensors",
]
