"""scan, map, cond and while_loop: loops and branches as one op, differentiable, with sharded carries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from .. import _compat, _tree
from ..argnums import is_number
from ..capture import endings, regions
from ..errors import TreeError, problem
from ..runtime import Request
from ._options import check_flag
from ._transformed import Transformed, name_of


@attrs.define(eq=False, repr=False, slots=False)
class Controlled(Transformed):
    """A loop or a branch on its own: it is staged as it is."""

    held: tuple[Callable[..., Any]]
    body: Callable[..., Any]
    settings: tuple[Any, ...]

    @property
    def __name__(self) -> str:
        return f"{self.body.__name__.removeprefix('_')}({name_of(self.fn)})"

    def inline(self, *args: Any) -> Any:
        return self.body(self.fn, self.settings, *args)

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, functools.partial(self.body, self.fn, self.settings))

    def options(self) -> Any:
        return self.body, self.settings


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Run a function over the rows of tensors, each run handing a carry to the next; one op, however long.

    Args:
        f: (carry, row) -> (carry, result). The carry keeps its tree, shapes and dtypes; what f closes over is the same in every run.
        init: the carry that enters the first run, a tree of tensors.
        xs: a tree of tensors, all with the same first dim; a row is the tree of `x[i]`. None where there are none.
        length: how many runs; needed only without xs.
        reverse: whether the last row comes first; results stay where their row is.

    Returns:
        (the carry after the last run, the tree of results, each stacked along a new first dim).

    Raises:
        TreeError: rows of different numbers; a carry that changes its tree, a shape or a dtype.
        PlacementError: inside a sharded function, a carry that is constrained to another placement than it enters with.

    Source: jax.lax.scan.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.scan(lambda total, x: (total + x, total * x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
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
    carries, columns = _tree.quick_leaves((init,)), [] if xs is None else _tree.quick_leaves((xs,))
    count = rows_of(name, _shapes(columns), tuple(_tree.quick_paths(xs, "xs")) if columns else (), length)
    check_carry(name, _kinds(carries), tuple(_tree.quick_paths(init, "init")))
    rows = [x[0] if count else x.new_zeros(x.shape[1:]) for x in columns]

    def run(*tensors: torch.Tensor) -> Any:
        carry = _tree.refill((init,), iter(tensors[: len(carries)]))[0]
        row = None if xs is None else _tree.refill((xs,), iter(tensors[len(carries) :]))[0]
        after, y = f(carry, row)
        check_same_tree(name, _said(init), _said(after))
        kept = _tree.quick_leaves((after,))
        check_after(name, _kinds(carries), _kinds(kept), tuple(_tree.quick_paths(init, "carry")))
        outs = regions.leave([*kept, *_tensors(y)])
        return outs[: len(carries)], _refilled(y, outs[len(carries) :])

    kept, y = regions.region(run, [*carries, *rows])
    outs = endings.scan([*kept, *_tensors(y)], carries, columns, count, reverse)
    return _tree.refill((init,), iter(outs[: len(carries)]))[0], _refilled(y, outs[len(carries) :])


def _scan_eagerly(f: Any, init: Any, xs: Any, length: int | None, reverse: bool) -> Any:
    """Where Dynamo does not read, under a torch.func transform or in a module that is kept whole: run by run."""
    columns = [] if xs is None else _tree.leaves(xs)
    count = columns[0].shape[0] if columns else length
    carry, results = init, []
    for i in reversed(range(count)) if reverse else range(count):
        carry, y = f(carry, None if xs is None else _tree.tree_map(lambda x, i=i: x[i], xs))
        results.append(y)
    ordered = list(reversed(results)) if reverse else results
    return carry, _tree.tree_map(lambda *ys: torch.stack(ys) if isinstance(ys[0], torch.Tensor) else ys[0], *ordered)


def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """Apply a function to one row after the other; `vmap`, with the memory of one row.

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


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """One of two functions, chosen by a value when the program runs; only the chosen one is computed.

    Args:
        pred: a bool, or a tensor with one element. A Python bool chooses at once.
        true_fn: of the operands; returns a tensor or a tree of them.
        false_fn: returns the same tree, of the same shapes and dtypes.
        operands: trees of tensors; what the functions close over may be differentiated too.

    Returns:
        What the chosen function returns. Under `vmap` with mapped choices both are computed.

    Raises:
        TreeError: results of different trees, shapes or dtypes.

    Source: jax.lax.cond.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.cond(torch.tensor(True), torch.sin, torch.cos, torch.tensor(0.0))
        tensor(0.)
    """
    if isinstance(pred, bool):
        return (true_fn if pred else false_fn)(*operands)
    if _compat.is_in_dynamo():
        return _cond(true_fn, (false_fn,), pred, *operands)
    if _compat.is_tracing() or _compat.inside_transform():
        truth = pred.reshape(()).to(torch.bool)
        return _tree.tree_map(lambda a, b: torch.where(truth, a, b), true_fn(*operands), false_fn(*operands))
    return Controlled((true_fn,), _cond, (false_fn,))(pred, *operands)


def _cond(true_fn: Any, settings: tuple[Any, ...], pred: torch.Tensor, *operands: Any) -> Any:
    (false_fn,) = settings
    check_choice(f"cond({name_of(true_fn)}, {name_of(false_fn)})", tuple(pred.shape), pred.dtype)

    def run(fn: Any) -> Any:
        out = fn(*operands)
        return _refilled(out, regions.leave(_tensors(out)))

    yes, no = regions.region(lambda: run(true_fn), []), regions.region(lambda: run(false_fn), [])
    first, second = _tensors(yes), _tensors(no)
    check_branches(f"cond({name_of(true_fn)}, {name_of(false_fn)})", _said(yes), _said(no), _kinds(first), _kinds(second))
    return _refilled(yes, endings.cond(pred.reshape(()).to(torch.bool), first, second))


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
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
        carry = init_val
        while cond_fun(carry):
            carry = body_fun(carry)
        return carry
    return Controlled((body_fun,), _while_loop, (cond_fun,))(init_val)


def _while_loop(body_fun: Any, settings: tuple[Any, ...], init: Any) -> Any:
    (cond_fun,) = settings
    name = f"while_loop({name_of(body_fun)})"
    carries = _tree.quick_leaves((init,))
    check_carry(name, _kinds(carries), tuple(_tree.quick_paths(init, "init_val")))

    def test(*tensors: torch.Tensor) -> Any:
        said = cond_fun(_tree.refill((init,), iter(tensors))[0])
        return regions.leave([said.reshape(()).to(torch.bool)])

    def run(*tensors: torch.Tensor) -> Any:
        after = body_fun(_tree.refill((init,), iter(tensors))[0])
        check_same_tree(name, _said(init), _said(after))
        kept = _tree.quick_leaves((after,))
        check_after(name, _kinds(carries), _kinds(kept), tuple(_tree.quick_paths(init, "carry")))
        return regions.leave(kept)

    outs = endings.while_loop(regions.region(test, carries), regions.region(run, carries), carries)
    return _tree.refill((init,), iter(outs))[0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in _tree.quick_leaves((tree,)) if isinstance(x, torch.Tensor)]


def _refilled(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """A tree with these tensors in the places of its own; constants stay."""
    feed = iter(tensors)
    leaves = [next(feed) if isinstance(x, torch.Tensor) else x for x in _tree.quick_leaves((tree,))]
    return _tree.refill((tree,), iter(leaves))[0]


def _shapes(xs: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in xs)


def _kinds(xs: list[Any]) -> tuple[Any, ...]:
    """Shape and dtype of each, or the name of its type where it is no tensor."""
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in xs)


def _said(tree: Any) -> str:
    """A tree as text, with a star for each leaf."""
    if isinstance(tree, dict):
        return "{" + ", ".join([f"{key!r}: {_said(child)}" for key, child in tree.items()]) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join([_said(child) for child in tree]) + "]"
    if isinstance(tree, tuple):
        return "(" + ", ".join([_said(child) for child in tree]) + ")"
    return "*"


def _kind(said: Any) -> str:
    return f"a {said}, which is no tensor" if isinstance(said, str) else f"{said[0]} {said[1]}"


@_compat.constant_in_graph
def rows_of(name: str, shapes: tuple[Any, ...], paths: tuple[str, ...], length: int | None) -> int:
    """How many rows a scan has.

    Raises:
        TreeError: leaves without rows, or with different numbers of them.
    """
    if length is not None and not (is_number(length) and length >= 0):
        fix = "length=None where xs has rows"
        raise TreeError(problem(f"{name}, length", f"length is {length!r}", needed="an int, 0 or more", fix=fix), fix=fix)
    wrong = [f"{p} has no rows: it is {'no tensor' if s is None else 'a scalar'}" for p, s in zip(paths, shapes, strict=True) if not s]
    counts = {s[0] for s in shapes if s} | ({length} if length is not None else set())
    if not wrong and len(counts) > 1:
        wrong = [f"{p} has {s[0]} rows" for p, s in zip(paths, shapes, strict=True)]
        wrong += [] if length is None else [f"length is {length}"]
    if not wrong and not counts:
        wrong = ["it has no rows, and length is not given"]
    if wrong:
        fix = "xs whose leaves have one first dim, or length"
        raise TreeError(problem(name, *wrong, needed="one number of rows", fix=fix), fix=fix)
    return counts.pop()


@_compat.constant_in_graph
def check_carry(name: str, kinds: tuple[Any, ...], paths: tuple[str, ...]) -> None:
    """Check that a carry is made of tensors.

    Raises:
        TreeError: naming the leaves that are none.
    """
    wrong = [f"{path} is {_kind(kind)}" for path, kind in zip(paths, kinds, strict=True) if isinstance(kind, str)]
    if wrong:
        fix = "torch.tensor(x) for what changes from run to run; the function may close over what does not"
        raise TreeError(problem(name, *wrong, needed="a carry of tensors", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_same_tree(name: str, entered: str, left: str) -> None:
    """Check that a carry keeps its tree.

    Raises:
        TreeError: it does not.
    """
    if entered != left:
        fix = "return a carry built as the one that came in"
        raise TreeError(problem(name, f"the carry enters as {entered} and leaves as {left}", needed="the same tree", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_after(name: str, entered: tuple[Any, ...], left: tuple[Any, ...], paths: tuple[str, ...]) -> None:
    """Check that a carry keeps its shapes and dtypes.

    Raises:
        TreeError: naming the leaves that change.
    """
    pairs = zip(paths, entered, left, strict=True)
    wrong = [f"{path} enters as {_kind(before)} and leaves as {_kind(after)}" for path, before, after in pairs if before != after]
    if wrong:
        fix = "cast or reshape the carry before it is returned, or start with what the function returns"
        raise TreeError(problem(name, *wrong, needed="a carry of the same shapes and dtypes in every run", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_choice(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that a truth value is one.

    Raises:
        TreeError: it has several elements.
    """
    if any(n != 1 for n in shape):
        fix = "torch.where(pred, a, b), which chooses element by element, or vmap"
        raise TreeError(problem(f"{name}, pred", f"{shape} {dtype}", needed="a bool, or a tensor with one element", fix=fix), fix=fix)


@_compat.constant_in_graph
def check_branches(name: str, yes: str, no: str, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Check that two branches return the same tree of the same shapes and dtypes.

    Raises:
        TreeError: with every result that differs.
    """
    wrong = [f"true_fn returns {yes}, false_fn {no}"] if yes != no else []
    pairs = enumerate(zip(first, second, strict=False))
    wrong += [f"result {k}: true_fn returns {_kind(a)}, false_fn {_kind(b)}" for k, (a, b) in pairs if a != b]
    if wrong:
        fix = "cast, or expand, the result of one branch"
        raise TreeError(problem(name, *wrong, needed="branches with the same results", fix=fix), fix=fix)
