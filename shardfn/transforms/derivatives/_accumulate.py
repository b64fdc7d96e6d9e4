"""accumulate: apply a function to several microbatches in turn, and reduce the gradients once.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import check_argnums, is_number, positions
from ...capture.shard_map import axis_names
from ...errors import ShardError, TreeError
from .._options import check_function
from .._paired import NUMBERS, paired, scalar
from .._transformed import Transformed, name_of
from ..sharding._shard import Shard
from ._grad import ValueAndGrad


@attrs.define(eq=False, repr=False, slots=False)
class Accumulate(Transformed):
    """A function under `accumulate`."""

    verb: ClassVar[str] = "accumulate"
    held: tuple[Callable[..., Any]]
    microbatches: int
    batch_argnums: tuple[int, ...] | None

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        return _accumulated(self.fn, self.microbatches, self.batch_argnums, args, kwargs)

    def options(self) -> Any:
        return self.microbatches, self.batch_argnums


def _accumulated(
    fn: Any,
    k: int,
    batch_argnums: tuple[int, ...] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of a function for the full batch, computed one microbatch at a time."""
    if isinstance(fn, Shard):
        with fn.asking():
            args, kwargs = fn.entering(args, kwargs)
            return fn.leaving(_accumulated(fn.fn, k, batch_argnums, args, kwargs))
    numbers = batches(f"accumulate({name_of(fn)})", fn, k, batch_argnums, args)
    if isinstance(fn, ValueAndGrad):
        return _gradients(fn, k, args, numbers, kwargs)
    outs = [fn(*_microbatch(args, numbers, k, i), **kwargs) for i in range(k)]
    sums = [_total(xs) for xs in zip(*_columns(fn, outs), strict=True)]
    return _tree.with_tensors(outs[0], [x / k for x in sums])


def batches(
    where: str, fn: Any, k: int, batch_argnums: tuple[int, ...] | None, args: tuple[Any, ...]
) -> tuple[int, ...]:
    """The positions of the arguments that are batches of k microbatches.

    Raises:
        TreeError: a batch whose size is not a multiple of k.
    """
    numbers = _batch_numbers(where, fn, batch_argnums, len(args))
    rows = [_rows(x, k) for n in numbers for x in _tree.quick_leaves((args[n],))]
    paths = [p for n in numbers for p in _tree.quick_paths(args[n], f"args[{n}]")]
    check_rows(where, k, paths, rows)
    return numbers


def _batch_numbers(
    where: str, fn: Any, batch_argnums: tuple[int, ...] | None, count: int
) -> tuple[int, ...]:
    """The positions of the arguments that are batches."""
    differentiated = fn.numbers(count) if isinstance(fn, ValueAndGrad) else (0,)
    if batch_argnums is None:
        return tuple([n for n in range(count) if n not in differentiated])
    return positions(where, "batch_argnums", batch_argnums, count)


def _columns(fn: Any, outs: Sequence[Any]) -> list[list[torch.Tensor]]:
    """The tensors of each microbatch's result, in the order of the first one's."""
    where = f"accumulate({name_of(fn)})"
    names = ("the results of a microbatch", "those of the first")
    paths = ("result", "result")
    rows = [
        paired(where, out, outs[0], names, paths, "return the same tree for every microbatch")
        for out in outs
    ]
    return [[x for x in row if isinstance(x, torch.Tensor)] for row in rows]


@_compat.of_trees
def _rows(x: Any, k: int) -> int | None:
    """The number of rows of a leaf. The rest of the division by k, if it is a symbol."""
    if not isinstance(x, torch.Tensor) or not x.dim():
        return None
    n = x.shape[0]
    return int(bool(n % k)) if _compat.is_symbol(n) else n


def _gradients(
    fn: Any, k: int, args: tuple[Any, ...], numbers: tuple[int, ...], kwargs: dict[str, Any]
) -> Any:
    """The mean of value and gradients, with aux stacked. Each gradient is redistributed to its
    placement once.
    """
    wishes = fn.wishes(args)
    found = [fn.found(_microbatch(args, numbers, k, i), kwargs) for i in range(k)]
    value = _total([one for one, _, _ in found]) / k
    gradients = [_total(parts) / k for parts in zip(*[g for _, _, g in found], strict=True)]
    auxes = [aux for _, aux, _ in found]
    stacked = None
    if fn.has_aux:
        columns = zip(*_columns(fn, [as_tensors(aux) for aux in auxes]), strict=True)
        stacked = _tree.with_tensors(
            as_tensors(auxes[0]), [torch.stack(column) for column in columns]
        )
    return fn.returned(*fn.placed((value, stacked, gradients), args, wishes))


def _total(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def as_tensors(tree: Any) -> Any:
    """A tree with tensors for its numbers."""
    leaves = _tree.quick_leaves((tree,))
    filled = [scalar(x, axis_names.device()) if isinstance(x, NUMBERS) else x for x in leaves]
    return _tree.refill((tree,), filled)[0]


def _microbatch(args: tuple[Any, ...], numbers: tuple[int, ...], k: int, i: int) -> tuple[Any, ...]:
    """The arguments with rows i, i + k, i + 2k, ... of the batches. Every rank holds a share of
    each microbatch, so splitting sends nothing.
    """
    rows = []
    for n, arg in enumerate(args):
        if n in numbers:
            tensors = [_every(x, k, i) if x.dim() else x for x in _tree.tensors(arg)]
            arg = _tree.with_tensors(arg, tensors)
        rows.append(arg)
    return tuple(rows)


def _every(x: torch.Tensor, k: int, i: int) -> torch.Tensor:
    """Rows of a tensor, in memory of their own: `view` is then what it is for the batch."""
    return x.reshape(x.shape[0] // k, k, *x.shape[1:]).select(1, i).clone()


@_compat.constant_in_graph
def check_rows(name: str, k: int, paths: Sequence[str], rows: Sequence[int | None]) -> None:
    """Check that every batch leaf can be split into k microbatches.

    Raises:
        TreeError: names the leaves that cannot.
    """
    wrong = [
        f"{p} has {n} rows" for p, n in zip(paths, rows, strict=True) if n is not None and n % k
    ]
    if wrong or not any(n is not None for n in rows):
        fix = (
            "pass a batch whose dim 0 is a multiple of microbatches; set batch_argnums to the "
            "arguments that are batches"
        )
        lines = wrong or ["no batch argument holds a tensor with rows"]
        raise TreeError.of(
            name, f"the batch cannot be split into {k} equal microbatches", *lines, fix=fix
        )


@_compat.constant_in_graph
def check_microbatches(name: str, is_count: bool, got: str) -> None:
    """Check the number of microbatches.

    Raises:
        ShardError: it is not a positive int.
    """
    if not is_count:
        raise ShardError.of(
            name, f"microbatches is {got}", needed="a positive int", fix="microbatches=1 or more"
        )


def accumulate(
    fn: Callable[..., Any], microbatches: int, *, batch_argnums: int | tuple[int, ...] | None = None
) -> Accumulate:
    """Apply a function to a batch in microbatches, and reduce the gradients once, after the last
    microbatch.

    The function that `accumulate` returns calls fn on each microbatch, and returns the mean of the
    results. If the loss is a mean over rows, the result equals that of `fn` on the global batch.
    Only the activations of one microbatch are in memory at a time. Between microbatches, the
    gradient is Partial over the mesh: each rank keeps one term of the sum.

    Args:
        fn: a function such as `value_and_grad(loss)`, `grad(loss)` or `bucketed_grad(loss)`,
            sharded or not, or any other function with floating-point results.
        microbatches: the number of microbatches. The first dim of every batch tensor must be a
            multiple of `microbatches`.
        batch_argnums: the positions of the arguments that are batches. By default, the batches are
            the arguments that fn does not differentiate. If fn does not compute a gradient, the
            batches are all arguments except the first. With k microbatches, microbatch i holds rows
            i, i + k, i + 2k, ...

    Returns:
        A function with the same arguments and results as fn. If fn has `has_aux`, aux gets a
        leading dim whose size is the number of microbatches.

    Raises:
        ShardError: microbatches is not a positive int.
        TreeError: in a call of the returned function, the rows of a batch cannot be split evenly
            into microbatches.

    Source: optax.MultiSteps; no_sync of torch's DistributedDataParallel.

    Example:
        >>> import torch, shardfn as sf
        >>> loss = lambda w, x: ((x @ w) ** 2).mean()
        >>> sf.accumulate(sf.grad(loss), microbatches=2)(
        ...     torch.ones(1), torch.tensor([[1.0], [3.0]])
        ... )
        tensor([10.])
    """
    check_function("accumulate", fn)
    name = f"accumulate({name_of(fn)})"
    check_microbatches(name, is_number(microbatches) and microbatches >= 1, repr(microbatches))
    numbers = None if batch_argnums is None else check_argnums(name, "batch_argnums", batch_argnums)
    return Accumulate((fn,), microbatches, numbers)
