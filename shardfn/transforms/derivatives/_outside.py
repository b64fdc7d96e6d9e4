"""The function that is captured for a call that autograd follows from outside (`loss.backward()`):
it returns the value and the gradients, whose cotangents arrive later.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _tree
from ...capture import annotations as sources
from ...ops import placement
from ...runtime import Followed


class Flat:
    """Present a function of trees as one of the tensors that autograd follows, and keep
    its result.
    """

    def __init__(
        self, fn: Callable[..., Any], given: tuple[Any, Any], numbers: tuple[int, ...]
    ) -> None:
        self.fn, self.given, self.numbers = fn, given, numbers
        self.leaves = _tree.quick_leaves(given)
        self.returned: list[Any] = []

    def __call__(self, *primals: torch.Tensor) -> Any:
        filled = list(self.leaves)
        # the primals after the leaves are closed over, and need no place
        for i, x in zip(self.numbers, primals, strict=False):
            filled[i] = x
        args, kwargs = _tree.refill(self.given, filled)
        value = self.fn(*args, **kwargs)
        self.returned.append(value)
        every = _tree.tensors(value)
        floating = tuple([x for x in every if _tree.is_floating(x)])
        others = tuple([x for x in every if not _tree.is_floating(x)])
        return floating or (torch.zeros(()),), others  # torch.func wants a result

    def value(self, floating: Iterable[Any], others: Iterable[Any]) -> Any:
        """Rebuild the tree of the function's value from its floating and its other tensors."""
        first = iter(floating)
        second = iter(others)
        tensors = [
            next(first) if _tree.is_floating(x) else next(second)
            for x in _tree.tensors(self.returned[0])
        ]
        return _tree.with_tensors(self.returned[0], tensors)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def differentiated(
    fn: Callable[..., Any],
    followed: Followed,
    entering: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
) -> Callable[..., Any]:
    """Build the function that computes fn and the gradients of the tensors that autograd follows.

    Args:
        fn: the function that is called.
        followed: these tensors.
        entering: from a plain tensor that fn closes over to the one that is differentiated.

    Returns:
        A function of the same arguments, of (value, gradients): those of the leaves, then those
        of the tensors that fn closes over. Each has the placements of its tensor.
    """
    numbers = followed.leaves
    closed_over = [(x, isinstance(x, DTensor)) for x in followed.closed_over]
    wishes = followed.wishes

    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        flat = Flat(fn, (args, kwargs), numbers)
        leaves = [flat.leaves[i] for i in numbers]
        held = [placement.closed_over_primal(x) for x, _ in closed_over]
        entered = [
            x if is_placed else entering(x)
            for x, (_, is_placed) in zip(held, closed_over, strict=True)
        ]
        primals = leaves + entered
        derivative: Any = torch.func.vjp(flat, *primals, has_aux=True)
        floating, pull, others = derivative
        cotangents = [placement.cotangent(x, i) for i, x in enumerate(floating)]
        with sources.as_backward():
            gradients = list(pull(tuple(cotangents)))
            gradients = placement.align(gradients, primals, wishes)
        return flat.value(floating, others), gradients

    return value_and_gradients
