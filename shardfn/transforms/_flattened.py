"""A function of trees as one of tensors, for torch.func, which sees tuples of tensors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _tree


class Flattened:
    """A function of trees as one of the tensors in some of its arguments; it keeps what it returned last.

    Args:
        fn: the function.
        args: all its positional arguments.
        numbers: of the arguments whose tensors are passed in.
        kwargs: its keyword arguments.
        has_aux: whether it returns (value, aux); the flat one then returns (tensors of the value, tensors of aux).
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], numbers: tuple[int, ...], kwargs: Any, has_aux: bool) -> None:
        self.fn, self.args, self.numbers, self.kwargs, self.has_aux = fn, args, numbers, kwargs, has_aux
        self.returned: list[Any] = []

    @property
    def chosen(self) -> tuple[Any, ...]:
        """The arguments whose tensors are passed in."""
        return tuple(self.args[n] for n in self.numbers)

    @property
    def primals(self) -> tuple[torch.Tensor, ...]:
        """Their tensors."""
        return tuple(_tree.quick_leaves(self.chosen))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        filled = list(self.args)
        for n, arg in zip(self.numbers, _tree.refill(self.chosen, iter(tensors)), strict=True):
            filled[n] = arg
        out = self.fn(*filled, **self.kwargs)
        value, aux = ((out[0],), (out[1],)) if self.has_aux else ((out,), ())
        self.returned.append((value, aux))
        flat = tuple(_tree.quick_leaves(value))
        return (flat, tuple(x for x in _tree.quick_leaves(aux) if isinstance(x, torch.Tensor))) if self.has_aux else flat

    def value(self, leaves: Iterable[Any]) -> Any:
        """The tree of the value, with these leaves."""
        return _tree.refill(self.returned[0][0], iter(leaves))[0]

    def aux(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The tree of aux, with these tensors in place of those that were traced."""
        tree, feed = self.returned[0][1], iter(tensors)
        leaves = [next(feed) if isinstance(x, torch.Tensor) else x for x in _tree.quick_leaves(tree)]
        return _tree.refill(tree, iter(leaves))[0]
