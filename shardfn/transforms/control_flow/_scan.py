"""scan and map: a loop as one op, differentiable, with sharded carries.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat, _tree
from ...capture import annotations as sources
from ...capture.control_flow import bodies, control_flow_ops
from ...capture.shard_map import axis_names
from ...tracebacks import filter_errors
from .._options import check_flag
from .._paired import NUMBERS, compare_sizes, scalar
from .._transformed import name_of
from ._checks import check_carry, check_step, rows_of
from ._controlled import Controlled, carried, leaf_kinds


@filter_errors
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run a function over the slices of dim 0 of tensors, and pass a carry from step to step. A
    `scan` of any length is one op of the captured program.

    Args:
        f: a function (carry, x) -> (carry, y), where x and y are the per-step input and output. The
            carry must have the same tree, shapes and dtypes after each step. Values that f closes
            over are the same in every step.
        init: the carry of the first step, a tree of tensors.
        xs: a tree of tensors, all with the same first dim, or None. The input of step i is the tree
            with `x[i]` in place of each tensor x.
        length: the number of steps, which is needed only if xs is None.
        reverse: whether to start with the last slice. With `reverse`, output i still belongs to
            slice i.

    Returns:
        A tuple of the carry after the last step, and the tree of per-step outputs. Each tensor in
        the per-step output y of f is stacked along a new first dim. A Python number in y is
        converted to a tensor, and stacked too. A constant in y that is neither a tensor nor a
        number, such as None, is returned unchanged.

    Raises:
        TreeError: the first dims of xs have different sizes, or the tree, a shape or a dtype of the
            carry changes between steps.
        PlacementError: inside a sharded function, a carry is constrained to a placement that
            differs from that of `init`.

    Source: jax.lax.scan.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.scan(
        ...     lambda total, x: (total + x, total * x),
        ...     torch.tensor(0.0),
        ...     torch.tensor([1.0, 2.0, 3.0]),
        ... )
        (tensor(6.), tensor([0., 2., 9.]))
    """
    if _compat.is_in_dynamo():
        return _scan(f, (length, reverse), init, xs)
    if _compat.is_tracing() or _compat.inside_transform():
        return _scan_eagerly(f, init, xs, length, reverse)
    return Controlled((f,), _scan, (length, reverse))(init, xs)


def _scan(f: Any, settings: tuple[Any, Any], init: Any, xs: Any) -> Any:
    length, reverse = settings
    name = f"scan({name_of(f)})"
    check_flag(name, "reverse", reverse)
    carries = _tree.tensors(init)
    columns = _columns(xs)
    compare_sizes(columns, [0] * len(columns))
    count = rows_of(name, *leaf_kinds(xs, "xs"), length)
    if isinstance(count, str):  # of a symbol
        count = columns[0].shape[0]
    check_carry(name, *leaf_kinds(init, "init"))
    row = [x[0] for x in columns] if count else _zero_row(columns)
    after, y = _step_region(name, f, init, xs, [*carries, *row])
    ys = _tree.tensors(y)
    if not carries and not ys:
        return init, y
    outs = control_flow_ops.scan([*after, *ys], carries, columns, count, reverse)
    ends = outs[: len(carries)]
    stacked = outs[len(carries) :]  # each (count, *shape of y)
    carry = _tree.with_tensors(init, ends)
    results = _tree.with_tensors(y, stacked)
    return carry, results


def pipelined(
    step: Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], Any]],
    like: list[torch.Tensor],
    columns: list[torch.Tensor],
    length: int,
    pipeline: str,
) -> tuple[list[torch.Tensor], Any]:
    """The means over microbatches of the tensors of a step, and its stacked outputs. A pipeline may
    run the steps in another order.

    Args:
        step: microbatch -> (tensors, per-step output).
        like: tensors of the same shapes and dtypes as those of a step.
        columns: the microbatches, stacked.
        length: how many there are.
        pipeline: the text of the schedule and its axis.
    """
    count = len(like)
    if not _compat.is_in_dynamo():
        return _means_eagerly(step, like, columns, length)

    def run(*tensors: torch.Tensor) -> Any:
        terms, y = step(list(tensors))
        outs = bodies.mark_results([*terms, *_tree.tensors(y)])
        return outs[:count], _tree.with_tensors(y, outs[count:])

    terms, y = bodies.run_body(run, [x[0] for x in columns])
    with sources.annotate_pipeline(pipeline):
        outs = control_flow_ops.scan([*terms, *_tree.tensors(y)], [], columns, length, False, like)
    return outs[:count], _tree.with_tensors(y, outs[count:])


def _means_eagerly(
    step: Any, like: list[torch.Tensor], columns: list[torch.Tensor], length: int
) -> tuple[list[torch.Tensor], Any]:
    """`pipelined` for calls that Dynamo does not trace."""

    def added(sums: list[torch.Tensor], row: list[torch.Tensor]) -> Any:
        terms, y = step(row)
        return [s + x for s, x in zip(sums, terms, strict=True)], y

    zeros = [torch.zeros_like(x) for x in like]
    sums, y = _scan_eagerly(added, zeros, columns, length, False)
    return [s / length for s in sums], y


def _step_region(name: str, f: Any, init: Any, xs: Any, inputs: list[torch.Tensor]) -> Any:
    """One step as a body: from the tensors of the carry and of the per-step input to (the
    tensors of the new carry, the per-step output).
    """
    count = len(_tree.tensors(init))

    def run(*tensors: torch.Tensor) -> Any:
        carry = _tree.with_tensors(init, tensors[:count])
        row = _row(xs, tensors[count:])
        out = f(carry, row)
        after, y = _step(name, out, init)
        ys = _tree.tensors(y)
        outs = bodies.mark_results([*after, *ys])
        ends = outs[:count]
        y = _tree.with_tensors(y, outs[count:])
        return ends, y

    return bodies.run_body(run, inputs)


def _columns(xs: Any) -> list[torch.Tensor]:
    """The tensors over whose slices a scan runs."""
    return [] if xs is None else _tree.tensors(xs)


def _zero_row(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros with the shapes of one slice, where there is none."""
    return [x.new_zeros(x.shape[1:]) for x in columns]


def _row(xs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree of one per-step input with these tensors, or None without xs."""
    return None if xs is None else _tree.with_tensors(xs, tensors)


def _step(name: str, out: Any, init: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of the carry that a body returns, in the order of the first carry, and its
    per-step output as tensors.
    """
    is_pair = isinstance(out, (tuple, list)) and len(out) == 2
    check_step(name, is_pair, type(out).__name__)
    after, y = out
    leaves = _tree.quick_leaves((y,))
    filled = [scalar(x, axis_names.device()) if isinstance(x, NUMBERS) else x for x in leaves]
    carry = carried(name, after, init)
    (y,) = _tree.refill((y,), filled)
    return carry, y


def _scan_eagerly(f: Any, init: Any, xs: Any, length: int | None, reverse: bool) -> Any:
    """scan for calls that Dynamo does not trace: under a torch.func transform, or in a module
    that it leaves as one call.
    """
    name = f"scan({name_of(f)})"
    columns = _columns(xs)
    count = rows_of(name, *leaf_kinds(xs, "xs"), length)
    check_carry(name, *leaf_kinds(init, "init"))
    if not count:
        return _no_steps(name, f, init, xs)
    carry = init
    results = []
    steps = range(count)
    for i in reversed(steps) if reverse else steps:
        slices = [x[i] for x in columns]
        row = _row(xs, slices)
        out = f(carry, row)
        after, y = _step(name, out, init)
        carry = _tree.with_tensors(init, after)
        results.append(y)
    if reverse:
        results = list(reversed(results))
    rows = [_tree.tensors(y) for y in results]
    ys = zip(*rows, strict=True)
    stacked = [torch.stack(column) for column in ys]
    return carry, _tree.with_tensors(results[0], stacked)


def _no_steps(name: str, f: Any, init: Any, xs: Any) -> Any:
    """The result of a scan of length 0: its carry, and outputs of length 0."""
    zeros = _zero_row(_columns(xs))
    row = _row(xs, zeros)
    out = f(init, row)
    _, y = _step(name, out, init)
    ys = _tree.tensors(y)
    empty = [x.new_zeros((0, *x.shape)) for x in ys]
    return init, _tree.with_tensors(y, empty)


@filter_errors
def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """Apply a function to each slice of dim 0 of tensors, one slice at a time. The result equals
    that of `vmap(f)`, but only one slice is in memory at a time.

    Args:
        f: a function of one slice that returns a tensor or a tree of tensors.
        xs: a tree of tensors, all with the same first dim. Slice i of xs is the tree with `x[i]` in
            place of each tensor x.

    Returns:
        The tree of results, each stacked along a new first dim.

    Raises:
        TreeError: the first dims of the tensors have different sizes.

    Source: jax.lax.map.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.map(lambda x: x @ x, torch.eye(2))
        tensor([1., 1.])
    """
    if _compat.is_in_dynamo():
        return _map(f, (), xs)
    if _compat.is_tracing() or _compat.inside_transform():
        step = lambda carry, x: (carry, f(x))
        _, ys = _scan_eagerly(step, (), xs, None, False)
        return ys
    return Controlled((f,), _map, ())(xs)


def _map(f: Any, settings: tuple[Any, ...], xs: Any) -> Any:
    step = lambda carry, x: (carry, f(x))
    _, ys = _scan(step, (None, False), (), xs)
    return ys
