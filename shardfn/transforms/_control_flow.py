"""scan, map, cond and while_loop: loops and branches as one op, differentiable, with sharded
carries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from .. import _compat, _tree
from ..capture.control_flow import bodies, endings
from ..capture.shard_map import axis_names
from ..runtime import Request
from ._control_flow_checks import (
    branch_dtypes,
    check_after,
    check_branch_trees,
    check_carry,
    check_choice,
    check_step,
    rows_of,
)
from ._options import check_flag
from ._paired import NUMBERS, kind, kinds, scalar
from ._transformed import Transformed, name_of


@attrs.define(eq=False, repr=False, slots=False)
class Controlled(Transformed):
    """A loop or a branch on its own: it is staged as it is."""

    held: tuple[Callable[..., Any]]
    body: Callable[..., Any]
    settings: tuple[Any, ...]

    @property
    def verb(self) -> str:
        """The name of the loop or branch."""
        return self.body.__name__.removeprefix("_")

    def inline(self, *args: Any) -> Any:
        return self.body(self.fn, self.settings, *args)

    def asked(self) -> Request:
        return Request(
            self.__name__,
            self.inline,
            functools.partial(self.body, self.fn, self.settings),
        )

    def options(self) -> Any:
        return self.body, self.settings


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run a function over the rows of tensors, each run handing a carry to the next; one op,
    however long.

    Args:
        f: (carry, row) -> (carry, result). The carry keeps its tree, shapes and dtypes; what f
            closes over is the same in every run.
        init: the carry that enters the first run, a tree of tensors.
        xs: a tree of tensors, all with the same first dim; a row is the tree of `x[i]`. None
            where there are none.
        length: how many runs; needed only without xs.
        reverse: whether the last row comes first; results stay where their row is.

    Returns:
        (the carry after the last run, the tree of results, each stacked along a new first dim; a
        number that f returns is stacked as a tensor, other constants stay).

    Raises:
        TreeError: rows of different numbers; a carry that changes its tree, a shape or a dtype.
        PlacementError: inside a sharded function, a carry that is constrained to another
            placement than it enters with.

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
    carries, columns = _tree.tensors(init), [] if xs is None else _tree.tensors(xs)
    count = rows_of(name, *_leaves(xs, "xs"), length)
    check_carry(name, *_leaves(init, "init"))
    rows = [x[0] if count else x.new_zeros(x.shape[1:]) for x in columns]

    def run(*tensors: torch.Tensor) -> Any:
        carry = _tree.with_tensors(init, tensors[: len(carries)])
        row = (
            None if xs is None else _tree.with_tensors(xs, tensors[len(carries) :])
        )
        kept, y = _step(name, f(carry, row), init)
        outs = bodies.leave([*kept, *_tree.tensors(y)])
        return outs[: len(carries)], _tree.with_tensors(y, outs[len(carries) :])

    kept, y = bodies.region(run, [*carries, *rows])
    ys = _tree.tensors(y)
    if not carries and not ys:
        return init, y
    outs = endings.scan([*kept, *ys], carries, columns, count, reverse)
    ends, stacked = outs[: len(carries)], outs[len(carries) :]
    return _tree.with_tensors(init, ends), _tree.with_tensors(y, stacked)


def _step(name: str, out: Any, init: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of the carry that a body returns, in the order of the first one, and its
    result as tensors.
    """
    is_pair = isinstance(out, (tuple, list)) and len(out) == 2
    check_step(name, is_pair, type(out).__name__)
    after, y = out
    leaves = _tree.quick_leaves((y,))
    filled = [
        scalar(x, axis_names.device()) if isinstance(x, NUMBERS) else x
        for x in leaves
    ]
    return _carried(name, after, init), _tree.refill((y,), iter(filled))[0]


def _carried(name: str, after: Any, init: Any) -> list[torch.Tensor]:
    """The tensors of a carry, in the order of the first one; a number takes that one's dtype."""
    leaves, wrong = _tree.pair(
        after, init, ("the carries that leave", "the carries that enter"), "carry"
    )
    entered = _tree.quick_leaves((init,))
    paths = _tree.quick_paths(init, "carry")
    check_after(name, tuple(wrong), tuple(paths), kinds(entered), kinds(leaves))
    pairs = [
        (x, c)
        for x, c in zip(leaves, entered, strict=True)
        if isinstance(c, torch.Tensor)
    ]
    return [
        x if isinstance(x, torch.Tensor) else scalar(x, c.device, c.dtype)
        for x, c in pairs
    ]


def _leaves(tree: Any, path: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The paths and kinds of the leaves of a tree that may be None."""
    if tree is None:
        return (), ()
    return tuple(_tree.quick_paths(tree, path)), kinds(_tree.quick_leaves((tree,)))


def _scan_eagerly(
    f: Any, init: Any, xs: Any, length: int | None, reverse: bool
) -> Any:
    """Where Dynamo does not read, under a torch.func transform or in a module that it leaves to
    run.
    """
    name = f"scan({name_of(f)})"
    columns = [] if xs is None else _tree.tensors(xs)
    count = rows_of(name, *_leaves(xs, "xs"), length)
    check_carry(name, *_leaves(init, "init"))
    carry, results = init, []
    order = reversed(range(count)) if reverse else range(count)
    for i in order:
        row = (
            None if xs is None else _tree.with_tensors(xs, [x[i] for x in columns])
        )
        kept, y = _step(name, f(carry, row), init)
        carry = _tree.with_tensors(init, kept)
        results.append(y)
    if not results:
        empty = (
            None
            if xs is None
            else _tree.with_tensors(xs, [x.new_zeros(x.shape[1:]) for x in columns])
        )
        y = _step(name, f(init, empty), init)[1]
        return init, _tree.with_tensors(
            y, [x.new_zeros((0, *x.shape)) for x in _tree.tensors(y)]
        )
    ordered = list(reversed(results)) if reverse else results
    stacked = [
        torch.stack(ys)
        for ys in zip(*[_tree.tensors(y) for y in ordered], strict=True)
    ]
    return carry, _tree.with_tensors(ordered[0], stacked)


def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """Apply `f` to each slice of dim 0, one at a time: `vmap(f)` with the memory of one slice.

    Args:
        f: of one row; returns a tensor or a tree of them.
        xs: a tree of tensors, all with the same first dim; a row is the tree of `x[i]`.

    Returns:
        The tree of results, each stacked along a new first dim.

    Raises:
        TreeError: rows of different numbers.

    Source: jax.lax.map.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.map(lambda x: x @ x, torch.eye(2))
        tensor([1., 1.])
    """
    if _compat.is_in_dynamo():
        return _map(f, (), xs)
    if _compat.is_tracing() or _compat.inside_transform():
        return _scan_eagerly(lambda carry, x: (carry, f(x)), (), xs, None, False)[1]
    return Controlled((f,), _map, ())(xs)


def _map(f: Any, settings: tuple[Any, ...], xs: Any) -> Any:
    return _scan(lambda carry, x: (carry, f(x)), (None, False), (), xs)[1]


def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    *operands: Any,
) -> Any:
    """One of two functions, chosen by a value when the program runs; only the chosen one is
    computed.

    Args:
        pred: a bool, or a tensor with one element. A Python bool chooses at once.
        true_fn: of the operands; returns a tensor or a tree of them.
        false_fn: returns the same tree, of the same shapes and dtypes.
        operands: trees of tensors; what the functions close over may be differentiated too.

    Returns:
        What the chosen function returns, numbers as tensors. Under `vmap` with mapped choices
        both are computed.

    Raises:
        TreeError: results of different trees, shapes or dtypes.

    Source: jax.lax.cond.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.cond(torch.tensor(True), torch.sin, torch.cos, torch.tensor(0.0))
        tensor(0.)
    """
    if isinstance(pred, (bool, int, float)):
        return (true_fn if pred else false_fn)(*operands)
    if _compat.is_in_dynamo():
        return _cond(true_fn, (false_fn,), pred, *operands)
    if _compat.is_tracing() or _compat.inside_transform():
        return _cond_eagerly(true_fn, false_fn, pred, *operands)
    return Controlled((true_fn,), _cond, (false_fn,))(pred, *operands)


def _cond(
    true_fn: Any, settings: tuple[Any, ...], pred: torch.Tensor, *operands: Any
) -> Any:
    (false_fn,) = settings
    name = f"cond({name_of(true_fn)}, {name_of(false_fn)})"
    check_choice(f"{name}, pred", kind(pred))

    def run(fn: Any, like: Any, dtypes: Any) -> Any:
        """One branch; its leaves in the order of `like`, and numbers as tensors of these dtypes."""
        out = fn(*operands)
        leaves = (
            _tree.quick_leaves((out,)) if like is None else _branch(name, out, like)
        )
        if dtypes is not None:
            leaves = _as_tensors(leaves, dtypes)
        left = bodies.leave(
            [x for x in leaves if isinstance(x, torch.Tensor)] or [torch.zeros(())]
        )
        feed = iter(left)
        filled = [next(feed) if isinstance(x, torch.Tensor) else x for x in leaves]
        return _tree.refill((out if like is None else like,), iter(filled))[0]

    yes = bodies.region(lambda: run(true_fn, None, None), [])
    no = bodies.region(lambda: run(false_fn, yes, None), [])
    dtypes = _dtypes(name, yes, no)
    if any(d is not None for d in dtypes):
        like = yes
        yes = bodies.region(lambda: run(true_fn, like, dtypes), [])
        no = bodies.region(lambda: run(false_fn, like, dtypes), [])
    first, second = _tree.tensors(yes), _tree.tensors(no)
    if not first:
        return yes
    return _tree.with_tensors(
        yes, endings.cond(pred.reshape(()).to(torch.bool), first, second)
    )


def _branch(name: str, out: Any, like: Any) -> list[Any]:
    """The leaves of what false_fn returns, in the order in which true_fn has them."""
    leaves, wrong = _tree.pair(
        out, like, ("the results of false_fn", "the results of true_fn"), "result"
    )
    check_branch_trees(name, tuple(wrong))
    return leaves


def _dtypes(name: str, yes: Any, no: Any) -> tuple[torch.dtype | None, ...]:
    """For each leaf of two branches the dtype of its numbers; None where there are none."""
    first, second = _tree.quick_leaves((yes,)), _tree.quick_leaves((no,))
    constants = [
        tuple([None if isinstance(x, torch.Tensor) else x for x in side])
        for side in (first, second)
    ]
    paths = tuple(_tree.quick_paths(yes, "result"))
    return branch_dtypes(name, paths, kinds(first), kinds(second), *constants)


def _as_tensors(
    leaves: list[Any], dtypes: tuple[torch.dtype | None, ...]
) -> list[Any]:
    """Leaves with tensors for numbers, of these dtypes."""
    pairs = zip(leaves, dtypes, strict=True)
    return [
        x
        if d is None or isinstance(x, torch.Tensor)
        else scalar(x, axis_names.device(), d)
        for x, d in pairs
    ]


def _cond_eagerly(
    true_fn: Any, false_fn: Any, pred: torch.Tensor, *operands: Any
) -> Any:
    """Where Dynamo does not read: both branches, and one of them is chosen."""
    name = f"cond({name_of(true_fn)}, {name_of(false_fn)})"
    check_choice(f"{name}, pred", kind(pred))
    yes, truth = true_fn(*operands), pred.reshape(()).to(torch.bool)
    others = _branch(name, false_fn(*operands), yes)
    dtypes = _dtypes(name, yes, _tree.refill((yes,), iter(others))[0])
    pairs = zip(
        _as_tensors(_tree.quick_leaves((yes,)), dtypes),
        _as_tensors(others, dtypes),
        strict=True,
    )
    chosen = [
        torch.where(truth, a, b) if isinstance(a, torch.Tensor) else a
        for a, b in pairs
    ]
    return _tree.refill((yes,), iter(chosen))[0]


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """Run a function on its own result for as long as another says so.

    Args:
        cond_fun: carry -> a tensor with one element, or a bool.
        body_fun: carry -> carry, of the same tree, shapes and dtypes.
        init_val: the carry that enters, a tree of tensors.

    Returns:
        The carry for which `cond_fun` says no. Right under `vmap` and `jvp`.

    Raises:
        TreeError: a carry that changes its tree, a shape or a dtype.
        CaptureError: when it is differentiated in reverse: how often it runs is not known.

    Source: jax.lax.while_loop.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.while_loop(lambda x: x < 10, lambda x: x * 2, torch.tensor(1))
        tensor(16)
    """
    if _compat.is_in_dynamo():
        return _while_loop(body_fun, (cond_fun,), init_val)
    if _compat.is_tracing() or _compat.inside_transform():
        return _while_eagerly(cond_fun, body_fun, init_val)
    return Controlled((body_fun,), _while_loop, (cond_fun,))(init_val)


def _while_loop(body_fun: Any, settings: tuple[Any, ...], init: Any) -> Any:
    (cond_fun,) = settings
    name = f"while_loop({name_of(body_fun)})"
    carries = _tree.tensors(init)
    check_carry(name, *_leaves(init, "init_val"), needs_one=True)

    def test(*tensors: torch.Tensor) -> Any:
        return bodies.leave(
            [_truth(name, cond_fun(_tree.with_tensors(init, tensors)))]
        )

    def run(*tensors: torch.Tensor) -> Any:
        return bodies.leave(
            _carried(name, body_fun(_tree.with_tensors(init, tensors)), init)
        )

    outs = endings.while_loop(
        bodies.region(test, carries), bodies.region(run, carries), carries
    )
    return _tree.with_tensors(init, outs)


def _while_eagerly(cond_fun: Any, body_fun: Any, init: Any) -> Any:
    """Where Dynamo does not read."""
    name = f"while_loop({name_of(body_fun)})"
    check_carry(name, *_leaves(init, "init_val"), needs_one=True)
    carry = init
    while _truth(name, cond_fun(carry)):
        carry = _tree.with_tensors(init, _carried(name, body_fun(carry), init))
    return carry


def _truth(name: str, said: Any) -> torch.Tensor:
    """What cond_fun returns, as a tensor."""
    check_choice(f"{name}, the result of cond_fun", kind(said))
    return (
        said.reshape(()).to(torch.bool)
        if isinstance(said, torch.Tensor)
        else scalar(bool(said), axis_names.device())
    )
