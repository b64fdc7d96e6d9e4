"""`compose`: several transforms as one transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from ..accepted import accept
from ._transformed import name_of

Transform = Callable[[Callable[..., Any]], Any]


@attrs.define(repr=False, slots=False, hash=True)
class Composed:
    """Several transforms as one. It prints, compares and pickles as they do. Not frozen: Dynamo
    may read its constructor.
    """

    transforms: tuple[Transform, ...]

    def __call__(self, fn: Callable[..., Any]) -> Any:
        for transform in reversed(self.transforms):
            fn = transform(fn)
        return fn

    def __repr__(self) -> str:
        names = [repr(t) if isinstance(t, Composed) else name_of(t) for t in self.transforms]
        return f"compose({', '.join(names)})"


def compose(*transforms: Transform) -> Composed:
    """Combine several transforms into one. The first transform is the outermost one, as with
    decorators.

    Args:
        transforms: functions that each take a function and return a function. To give a transform
            arguments, use functools.partial.

    Returns:
        A transform: `compose(a, b)(fn)` equals `a(b(fn))`.

    Raises:
        ShardError: a transform is not a function.

    Source: optax.chain; decorators.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.compose(sf.grad, sf.grad)(lambda x: x**3)(torch.tensor(2.0))
        tensor(12.)
        >>> sf.compose(sf.shard, sf.grad)
        compose(shard, grad)
    """
    for transform in transforms:
        accept("compose", transform=transform)
    return Composed(transforms)
