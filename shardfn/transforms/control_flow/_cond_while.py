"""cond and while_loop: a branch or a loop as one op, differentiable, with sharded carries.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _compat, _tree, tree_pairs
from ...capture.control_flow import bodies, control_flow_ops
from ...capture.shard_map import axis_names
from ...tracebacks import filter_errors
from .._paired import kind, kinds, scalar
from .._transformed import name_of
from ._checks import branch_dtypes, check_branch_trees, check_carry, check_choice
from ._controlled import Controlled, carried, leaf_kinds


@filter_errors
def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any
) -> Any:
    """Call one of two functions, depending on a value that may be known only when the program runs.
    `cond` computes only the chosen function.

    Args:
        pred: a bool, or a tensor with one element. If `pred` is a Python bool, `cond` chooses the
            function during the capture.
        true_fn: a function of the operands that returns a tensor or a tree of tensors.
        false_fn: a function of the operands whose result has the same tree, shapes and dtypes as
            that of true_fn.
        operands: trees of tensors. Tensors that true_fn or false_fn closes over may be
            differentiated too.

    Returns:
        The result of the chosen function, in which numbers become tensors. Under `vmap`, if `pred`
        differs between samples, both functions are computed.

    Raises:
        TreeError: the results of the two functions have different trees, shapes or dtypes.

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


def _cond(true_fn: Any, settings: tuple[Any, ...], pred: torch.Tensor, *operands: Any) -> Any:
    (false_fn,) = settings
    name = f"cond({name_of(true_fn)}, {name_of(false_fn)})"
    check_choice(f"{name}, pred", kind(pred))
    yes = _branch_region(name, true_fn, operands, None, None)
    no = _branch_region(name, false_fn, operands, yes, None)
    dtypes = _dtypes(name, yes, no)
    if any(d is not None for d in dtypes):
        like = yes
        yes = _branch_region(name, true_fn, operands, like, dtypes)
        no = _branch_region(name, false_fn, operands, like, dtypes)
    first = _tree.tensors(yes)
    second = _tree.tensors(no)
    if not first:
        return yes
    outs = control_flow_ops.cond(pred.reshape(()).to(torch.bool), first, second)
    return _tree.with_tensors(yes, outs)


def _branch_region(
    name: str,
    fn: Any,
    operands: tuple[Any, ...],
    like: Any,
    dtypes: tuple[torch.dtype | None, ...] | None,
) -> Any:
    """One branch as a body: its leaves in the order of `like`, with tensors of these dtypes for
    numbers.
    """

    def run() -> Any:
        out = fn(*operands)
        leaves = _tree.quick_leaves((out,)) if like is None else _branch(name, out, like)
        if dtypes is not None:
            leaves = _as_tensors(leaves, dtypes)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        feed = iter(bodies.mark_results(tensors or [torch.zeros(())]))
        results = [next(feed) if isinstance(x, torch.Tensor) else x for x in leaves]
        return _tree.refill((out if like is None else like,), results)[0]

    return bodies.run_body(run, [])


def _branch(name: str, out: Any, like: Any) -> list[Any]:
    """The leaves of false_fn's result, in the order of true_fn's."""
    leaves, wrong = tree_pairs.pair(
        out, like, ("the results of false_fn", "the results of true_fn"), "result"
    )
    check_branch_trees(name, tuple(wrong))
    return leaves


def _dtypes(name: str, yes: Any, no: Any) -> tuple[torch.dtype | None, ...]:
    """For each leaf of two branches the dtype of its numbers, or None without numbers."""
    first = _tree.quick_leaves((yes,))
    second = _tree.quick_leaves((no,))
    constants = [
        tuple([None if isinstance(x, torch.Tensor) else x for x in side])
        for side in (first, second)
    ]
    paths = tuple(_tree.quick_paths(yes, "result"))
    return branch_dtypes(name, paths, kinds(first), kinds(second), *constants)


def _as_tensors(leaves: list[Any], dtypes: tuple[torch.dtype | None, ...]) -> list[Any]:
    """Leaves with tensors for numbers, of these dtypes."""
    pairs = zip(leaves, dtypes, strict=True)
    return [
        x if d is None or isinstance(x, torch.Tensor) else scalar(x, axis_names.device(), d)
        for x, d in pairs
    ]


def _cond_eagerly(true_fn: Any, false_fn: Any, pred: torch.Tensor, *operands: Any) -> Any:
    """cond for calls that Dynamo does not trace: computes both branches, and selects one
    result.
    """
    name = f"cond({name_of(true_fn)}, {name_of(false_fn)})"
    check_choice(f"{name}, pred", kind(pred))
    truth = pred.reshape(()).to(torch.bool)
    yes = true_fn(*_taken(truth, operands))
    others = _branch(name, false_fn(*_taken(~truth, operands)), yes)
    dtypes = _dtypes(name, yes, _tree.refill((yes,), others)[0])
    pairs = zip(
        _as_tensors(_tree.quick_leaves((yes,)), dtypes), _as_tensors(others, dtypes), strict=True
    )
    chosen = [torch.where(truth, a, b) if isinstance(a, torch.Tensor) else a for a, b in pairs]
    return _tree.refill((yes,), chosen)[0]


def _taken(truth: torch.Tensor, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a branch, without a gradient if it is not chosen, as it may be nan."""
    tensors = _tree.tensors(operands)
    own = [torch.where(truth, x, x.detach()) if _tree.is_floating(x) else x for x in tensors]
    return _tree.with_tensors(operands, own)


@filter_errors
def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """Apply a function to its own result while a condition holds.

    Args:
        cond_fun: a function of the carry that returns a tensor with one element, or a bool.
        body_fun: a function of the carry that returns the next carry, with the same tree, shapes
            and dtypes.
        init_val: the initial carry, a tree of tensors.

    Returns:
        The first carry for which `cond_fun` is false. `while_loop` works under every transform. In
        reverse mode, a `while_loop` runs a second time and saves 64 carries. In a loop of n > 64
        steps, the backward recomputes all other carries from the saved carries, in n * n / 128
        steps in total.

    Raises:
        TreeError: body_fun returns a carry with another tree, shape or dtype.

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
    check_carry(name, *leaf_kinds(init, "init_val"), needs_one=True)

    def test(*tensors: torch.Tensor) -> Any:
        return bodies.mark_results([_truth(name, cond_fun(_tree.with_tensors(init, tensors)))])

    def run(*tensors: torch.Tensor) -> Any:
        return bodies.mark_results(carried(name, body_fun(_tree.with_tensors(init, tensors)), init))

    outs = control_flow_ops.while_loop(
        bodies.run_body(test, carries), bodies.run_body(run, carries), carries
    )
    return _tree.with_tensors(init, outs)


def _while_eagerly(cond_fun: Any, body_fun: Any, init: Any) -> Any:
    """while_loop for calls that Dynamo does not trace."""
    name = f"while_loop({name_of(body_fun)})"
    check_carry(name, *leaf_kinds(init, "init_val"), needs_one=True)
    carry = init
    while _truth(name, cond_fun(carry)):
        carry = _tree.with_tensors(init, carried(name, body_fun(carry), init))
    return carry


def _truth(name: str, said: Any) -> torch.Tensor:
    """The result of cond_fun, as a tensor."""
    check_choice(f"{name}, the result of cond_fun", kind(said))
    return (
        said.reshape(()).to(torch.bool)
        if isinstance(said, torch.Tensor)
        else scalar(bool(said), axis_names.device())
    )
