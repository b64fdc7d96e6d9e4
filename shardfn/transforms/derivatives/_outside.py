"""The function that is captured where autograd follows a call from outside: it returns the value
and the gradients, of cotangents that are given later.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _tree
from ...capture import annotations as sources
from ...ops import placement
from ...runtime import Followed


def differentiated(
    fn: Callable[..., Any], followed: Followed
) -> Callable[..., Any]:
    """A function with the value of fn, and the gradients of the tensors that autograd follows.

    Args:
        fn: the function that is called.
        followed: these tensors.

    Returns:
        A function of the same arguments, of (value, gradients): those of the leaves, then those
        of the tensors that fn closes over. Each has the placements of its tensor.
    """
    numbers, held = followed.leaves, list(followed.closed_over)
    wishes = followed.wishes

    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        leaves = _tree.quick_leaves((args, kwargs))
        returned: list[Any] = []

        def flat(*primals: torch.Tensor) -> Any:
            filled = list(leaves)
            for i, x in zip(
                numbers, primals, strict=False
            ):  # the rest is closed over
                filled[i] = x
            mine, named = _tree.refill((args, kwargs), filled)
            value = fn(*mine, **named)
            returned.append(value)
            every = _tree.tensors(value)
            floating = [x for x in every if _tree.is_floating(x)]
            others = [x for x in every if not _tree.is_floating(x)]
            # torch.func wants a result
            return tuple(floating) or (torch.zeros(()),), tuple(others)

        primals = [leaves[i] for i in numbers] + [placement.primal(x) for x in held]
        derivative: Any = torch.func.vjp(flat, *primals, has_aux=True)
        found, pull, others = derivative
        cotangents = [placement.cotangent(x, i) for i, x in enumerate(found)]
        with sources.as_backward():
            gradients = list(pull(tuple(cotangents)))
            gradients = placement.align(gradients, primals, wishes)
        plain, rest = iter(found), iter(others)
        tensors = [
            next(plain) if _tree.is_floating(x) else next(rest)
            for x in _tree.tensors(returned[0])
        ]
        return _tree.with_tensors(returned[0], tensors), gradients

    return value_and_gradients
