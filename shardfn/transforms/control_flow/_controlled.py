"""Loops and branches as transforms, and the code that their carries share.

Dynamo reads this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ... import _compat, _tree, tree_pairs
from ...runtime import Request
from .._paired import kinds, scalar
from .._transformed import Transformed
from ._checks import check_after


@attrs.define(eq=False, repr=False, slots=False)
class Controlled(Transformed):
    """A loop or a branch called on its own, staged as it is."""

    held: tuple[Callable[..., Any]]
    body: Callable[..., Any]
    settings: tuple[Any, ...]

    @property
    def verb(self) -> str:
        """The name of the loop or branch."""
        return self.body.__name__.removeprefix("_")

    def inline(self, *args: Any) -> Any:
        return self.body(self.fn, self.settings, *args)

    def asked(self) -> Request:
        return Request(
            self.__name__, self.inline, functools.partial(self.body, self.fn, self.settings)
        )

    def options(self) -> Any:
        return self.body, self.settings


def carried(name: str, after: Any, init: Any) -> list[torch.Tensor]:
    """The tensors of a carry, in the order of the first carry. A number takes the dtype of that
    carry's leaf.
    """
    leaves, wrong = tree_pairs.pair(
        after, init, ("the carries that leave", "the carries that enter"), "carry"
    )
    entered = _tree.quick_leaves((init,))
    paths = _tree.quick_paths(init, "carry")
    check_after(name, tuple(wrong), tuple(paths), kinds(entered), kinds(leaves))
    starts, ends, are_tensors = _at_tensors(entered, leaves)
    if are_tensors:
        return ends
    pairs = zip(starts, ends, strict=True)
    return [x if isinstance(x, torch.Tensor) else scalar(x, c.device, c.dtype) for c, x in pairs]


@_compat.of_trees
def _at_tensors(entered: list[Any], left: list[Any]) -> tuple[list[Any], list[Any], bool]:
    """The tensors of a carry, the leaves that come after them, and whether all are tensors."""
    pairs = [(c, x) for c, x in zip(entered, left, strict=True) if isinstance(c, torch.Tensor)]
    are_tensors = all(isinstance(x, torch.Tensor) for _, x in pairs)
    return [c for c, _ in pairs], [x for _, x in pairs], are_tensors


def leaf_kinds(tree: Any, path: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The paths of the leaves of a tree that may be None, and the leaves as `kind` returns
    them.
    """
    if tree is None:
        return (), ()
    return tuple(_tree.quick_paths(tree, path)), kinds(_tree.quick_leaves((tree,)))
