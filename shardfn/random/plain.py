"""plain: a function run eagerly by torch, its random calls as a captured function makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .ambient import Eager, drawing_from
from .torch_ops import TABLE


class _Replacing(TorchDispatchMode):
    """Torch's random ops replaced by the rows of the table."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        run: Any = TABLE.get(func, func)
        return run(*args, **(kwargs or {}))


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Run torch eagerly with the random numbers that a captured function would draw.

    What `torch.rand`, dropout and their kin draw inside follows from `state`, the number of the
    call and the element, as it does under `jit`, `grad` and `shard`: one device run so is what a
    sharded run is compared with. Usable as a decorator.

    Source: jax.threefry_partitionable, whose numbers do not depend on the sharding either.

    Example:
        >>> import torch, shardfn as sf
        >>> def noisy(x):
        ...     return torch.nn.functional.dropout(x, 0.5)
        >>> sf.random.state.seed(0)
        >>> once = sf.jit(noisy)(torch.ones(8))
        >>> sf.random.state.seed(0)
        >>> with sf.random.plain():
        ...     again = noisy(torch.ones(8))
        >>> torch.equal(once, again)
        True
    """
    with drawing_from(Eager()), _Replacing():
        yield
