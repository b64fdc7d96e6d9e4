"""`explain_retrace`: the reason why a transformed function is captured again."""

from __future__ import annotations

from typing import Any

from ...errors import ShardError
from ...tracebacks import filter_errors
from .._transformed import Bound, Transformed, name_of


@filter_errors
def explain_retrace(fn: Any, *args: Any, **kwargs: Any) -> str:
    """Explain why a call of a transformed function is captured and compiled again.

    Args:
        fn: a transformed function, such as the result of jit.
        args: the arguments of a call. Without `args`, `explain_retrace` explains the last call that
            was captured.
        kwargs: the keyword arguments of the call.

    Returns:
        A text that lists, one per line, the differences from the closest earlier signature of the
        function.

    Raises:
        ShardError: fn is not a transformed function.

    Source: jax.config.jax_explain_cache_misses.

    Example:
        >>> import torch, shardfn as sf
        >>> scale = sf.jit(lambda x, by: x * by, backend="aten")
        >>> scale(torch.ones(2), 2)
        tensor([2., 2.])
        >>> print(sf.explain_retrace(scale, torch.ones(2), 3))
        jit(<lambda>): a new signature; the closest of 1 earlier signature differs in
          by: 3, was 2
    """
    if isinstance(fn, Bound):
        is_of_last_call = not args and not kwargs
        fn, args = fn.func, () if is_of_last_call else (*fn.args, *args)
    if not isinstance(fn, Transformed):
        got = f"{name_of(fn)} is not a transformed function"
        fix = "sf.jit(fn)"
        raise ShardError.of("explain_retrace", got, fix=fix)
    return fn.explain_retrace(*args, **kwargs)
