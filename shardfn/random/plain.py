"""`plain`: torch runs a function eagerly with the random numbers that a captured function would
draw.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .. import _compat
from .ambient import Eager, drawing_from, is_eager, state
from .torch_ops import TABLE, patched_initialisation


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Run torch eagerly with the random numbers that a captured function would draw.

    The numbers of `torch.rand`, dropout and similar ops depend on `sf.random.state`, the number of
    the call and the index of the element, as under `jit`, `grad` and `shard`. A run on one device
    inside `with sf.random.plain():` draws the same numbers as a sharded run, so the results of the
    two runs can be compared. `plain` can also be used as a decorator. A DataLoader, and calls with
    a `torch.Generator`, draw from torch's own generator.

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
    with contextlib.ExitStack() as stack:
        for context in (
            drawing_from(Eager()),
            _compat.ops_replaced(TABLE, is_replaced),
            patched_initialisation(),
            _compat.patched("plain", redrawing=redraw_on_recompute),
            *_compat.loaders_in_context(lambda: drawing_from(None), is_eager),
        ):
            stack.enter_context(context)
        yield


def is_replaced(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random call under `plain` is ours to replace: it has no torch.Generator."""
    return is_eager() and kwargs.get("generator") is None


def redraw_on_recompute(fn: Callable[..., Any], runs_first: bool) -> Callable[..., Any]:
    """Wrap a function of torch's checkpoint so that it draws the same numbers when it runs again,
    inside of `plain` or after it.

    Args:
        fn: the user's, which is about to run.
        runs_first: whether the first run goes through this function too.
    """
    if not is_eager():
        return fn  # another thread is under `plain`
    before = state.get(), state.tag
    runs = itertools.count(0 if runs_first else 1)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not next(runs):
            return fn(*args, **kwargs)
        with plain(), state.again(*before):
            return fn(*args, **kwargs)

    return run
