"""compose: a pipeline of transforms as one transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Transform = Callable[[Callable[..., Any]], Any]


def compose(*transforms: Transform) -> Transform:
    """One transform that applies several; the first is the outermost, as decorators are read.

    Args:
        transforms: each takes a function and returns one; use functools.partial to give a transform its arguments.

    Returns:
        A transform: `compose(a, b)(fn)` is `a(b(fn))`.

    Source: optax.chain; decorators.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.compose(sf.grad, sf.grad)(lambda x: x**3)(torch.tensor(2.0))
        tensor(12.)
    """

    def composed(fn: Callable[..., Any]) -> Any:
        for transform in reversed(transforms):
            fn = transform(fn)
        return fn

    return composed
