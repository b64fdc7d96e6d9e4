"""plain: a function run eagerly by torch, its random calls as a captured function makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import _compat
from .ambient import Eager, drawing_from
from .torch_ops import TABLE, initialised


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Run torch eagerly with the random numbers that a captured function would draw.

    The numbers of `torch.rand`, dropout and their kin follow from `state`, the number of the call
    and the element, as under `jit`, `grad` and `shard`: a run of one device that a sharded run can
    be compared with. Usable as a decorator.

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
    with drawing_from(Eager()), _compat.ops_replaced(TABLE), initialised():
        yield
