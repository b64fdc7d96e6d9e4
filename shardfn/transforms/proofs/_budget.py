"""`explain` and `assert_comms`: the collectives of a call, and a budget for them."""

from __future__ import annotations

from typing import Any

from ...accepted import accept
from ...byte_sizes import bytes_of
from ...errors import BudgetError, ShardError, call_site
from ...inspect.budget import COLLECTIVE_KINDS, Explanation, over_budget
from ...tracebacks import filter_errors
from .._transformed import Bound, Transformed, name_of


@filter_errors
def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """List every collective of a call, with its bytes, mesh axis, bucket, source line and module
    path.

    `explain` neither runs nor compiles the function. `sf.shard(fn, ...).lower(*args).explain()`
    also returns the `Explanation` of a call.

    Args:
        fn: a transformed function, such as the result of shard.
        args: the arguments of the call. `ShapeDtype`s (global shape, dtype) may stand for tensors.
        kwargs: the keyword arguments of the call.

    Returns:
        An `Explanation`, which prints as a table. The `Explanation` has the fields `collectives`,
        `nbytes` (the total bytes of one rank's collectives), `implicit` (collectives that no
        placement asked for), and `elided` (the number of removed collectives).

    Raises:
        ShardError: fn is not a transformed function.

    Source: jax's `lower(...).compile().cost_analysis()`; DTensor's CommDebugMode.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     mesh = sf.make_mesh((4,), ("dp",))
        ...     total = sf.shard(lambda x: x.sum(), mesh, sf.P("dp"), sf.P())
        ...     print(sf.explain(total, sf.ShapeDtype((8,))))
        shard(<lambda>) on mesh (dp=4): 1 collective, 4 B a rank
          bytes  collective           for     bucket  asked by     at
            4 B  all_reduce[sum, dp]  result          a placement
          1 all_reduce over dp: 4 B
    """
    if isinstance(fn, Bound):
        fn, args = fn.func, (*fn.args, *args)
    if not isinstance(fn, Transformed):
        got = f"{name_of(fn)} is not a transformed function"
        raise ShardError.of("explain", got, fix="sf.shard(fn, mesh, ...)")
    return fn.lower(*args, **kwargs).explain()


@filter_errors
def assert_comms(
    fn: Any,
    *args: Any,
    counts: dict[str, int] | None = None,
    max_bytes: int | str | None = None,
    max_implicit: int | None = None,
    **kwargs: Any,
) -> Explanation:
    """Check the communication of a call against a budget, without running the call.

    Args:
        fn: a transformed function, such as the result of shard.
        args: the arguments of the call. `ShapeDtype`s may stand for tensors.
        counts: the required number of collectives of some kinds, such as `{"all_gather": 0}`. The
            numbers of other collectives are not limited.
        max_bytes: the largest allowed total of the bytes of a rank's collectives, as a number or as
            text such as "1MB".
        max_implicit: the largest allowed number of implicit collectives, which no placement asks
            for.
        kwargs: the keyword arguments of the call.

    Returns:
        The `Explanation` of the call.

    Raises:
        BudgetError: the call exceeds `counts`, `max_bytes` or `max_implicit`. The message lists
            each exceeded limit, and each collective with its source line.
        ShardError: a kind of collective is unknown, an option has a wrong value, or fn is not a
            transformed function.

    Source: DTensor's CommDebugMode, which counts collectives in tests.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     mesh = sf.make_mesh((4,), ("dp",))
        ...     total = sf.shard(lambda x: x.sum(), mesh, sf.P("dp"), sf.P())
        ...     x = sf.ShapeDtype((8,))
        ...     sf.assert_comms(total, x, counts={"all_reduce": 1}).nbytes
        4
    """
    accept("assert_comms", counts=counts, max_implicit=max_implicit)
    wanted = counts or {}
    unknown = [kind for kind in wanted if kind not in COLLECTIVE_KINDS]
    if unknown:
        got = f"{', '.join(map(repr, unknown))} in counts"
        needed = f"kinds of collectives: {', '.join(COLLECTIVE_KINDS)}"
        raise ShardError.of("assert_comms", got, needed=needed, arg_path="counts")
    most_bytes = None if max_bytes is None else _bytes(max_bytes)
    found = explain(fn, *args, **kwargs)
    wrong = over_budget(found, wanted, most_bytes=most_bytes, most_implicit=max_implicit)
    if wrong:
        fix = f"print(sf.explain({name_of(fn)}, ...)), which lists all collectives"
        raise BudgetError.of(found.name, *wrong, fix=fix, source=call_site())
    return found


def _bytes(size: int | str) -> int:
    if type(size) is int and size == 0:
        return 0
    try:
        return bytes_of(size)
    except ValueError as error:
        fix = "a number of bytes, or text such as '1MB'"
        raise ShardError.of("assert_comms, max_bytes", str(error), fix=fix) from None
