"""Calls of modules of fully_shard: their parameters are DTensors that the function closes over, and
propagation gathers them where it is due. A policy of mixed precision casts them while their module
runs, before they are gathered.

Dynamo reads this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ... import _compat, _tree
from ..._compat.distributed import fsdp_hooks
from ...capture import annotations
from ...capture.dtensors import checks, table
from ...ops import placement
from ...ops import shard_map as prims
from ...ops.text_formats import print_axes


@_compat.read_by_dynamo
def pre_forward(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """The hook before the forward, which casts the inputs, and gathers the parameters."""
    policy = fsdp_hooks.policy_of(state)
    is_own = not checks.is_constraint() and not _has_dtensors(args, kwargs)
    _compat.for_a_while(_enter, state, policy, is_own)
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args = _cast(policy.param_dtype, args)
        kwargs = _cast(policy.param_dtype, kwargs)
    return args, kwargs


@_compat.read_by_dynamo
def post_forward(state: Any, module: Any, input: Any, output: Any) -> Any:
    """The hook after the forward, which frees the gathered parameters, and casts the results."""
    policy = fsdp_hooks.policy_of(state)
    _compat.for_a_while(_leave, state)
    if policy.output_dtype is not None:
        return _cast(policy.output_dtype, output)
    return output


@_compat.read_by_dynamo
def pre_forward_of_group(hook: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """The hook before the forward of one module of fully_shard([a, b])."""
    return pre_forward(fsdp_hooks.state_of(hook), module, args, kwargs)


@_compat.read_by_dynamo
def post_forward_of_group(hook: Any, module: Any, input: Any, output: Any) -> Any:
    """The hook after the forward of one module of fully_shard([a, b])."""
    return post_forward(fsdp_hooks.state_of(hook), module, input, output)


@_compat.read_by_dynamo
def _has_dtensors(args: Any, kwargs: Any) -> bool:
    """Whether a module is called with DTensors, so it computes with global tensors."""
    leaves = _tree.quick_leaves((args, kwargs))
    found = [isinstance(x, DTensor) for x in leaves]
    return any(found)


@_compat.read_by_dynamo
def _enter(state: Any, policy: Any, is_own: bool) -> None:
    """Give the modules their parameters in the dtype of the computation, of each rank's own
    tensors gathered ones. A module of theirs that runs meanwhile finds them there. Where nothing
    is changed nothing is written, as bodies of loops and branches need it.
    """
    runs = getattr(state, fsdp_hooks.RUNS, [])
    before = _replaced(state, policy, is_own) if not runs else []
    if runs or before:
        setattr(state, fsdp_hooks.RUNS, [*runs, before])


@_compat.read_by_dynamo
def _replaced(state: Any, policy: Any, is_own: bool) -> list[Any]:
    """The parameters of modules before they are replaced: module, name, tensor."""
    before = []
    for group in fsdp_hooks.groups_of(state):
        factor = group.gradient_divide_factor
        _check(None if is_own else factor, fsdp_hooks.has_hook(group))
        for parameter in group.fsdp_params:
            for owner, name in fsdp_hooks.places_of(parameter):
                now = fsdp_hooks.parameter_at(owner, name)
                x = fsdp_hooks.sharded(parameter, now)
                y = _computed_with(x, policy) if _is_cast(x.dtype, policy) else x
                y = _gathered(y, factor) if is_own and isinstance(y, DTensor) else y
                if y is not now:
                    before.append((owner, name, fsdp_hooks.replaced(owner, name, y)))
    return before


@_compat.read_by_dynamo
def _gathered(x: Any, factor: float | None) -> torch.Tensor:
    """A parameter as each rank computes with it. Its gradient is the mean over ranks, or their sum
    divided by a factor.
    """
    rows = checks.axes_here()
    axes = [name for name, _ in rows]
    sizes = [n for _, n in rows]
    everywhere = [Replicate()] * len(axes)
    terms = [Partial()] * len(axes)
    whole = x.redistribute(placements=everywhere)
    own = whole.to_local(grad_placements=terms)
    own = placement.shared(own, placement.GATHERED)
    own = prims.vary(own, print_axes(axes))
    divisor = math.prod(sizes) if factor is None else factor
    return placement.scaled(own, 1 / divisor)


@_compat.read_by_dynamo
def _leave(state: Any) -> None:
    """Give the modules their parameters back."""
    runs = getattr(state, fsdp_hooks.RUNS, [])
    if not runs:
        return
    for owner, name, x in runs[-1]:
        fsdp_hooks.replaced(owner, name, x)
    if len(runs) > 1:
        setattr(state, fsdp_hooks.RUNS, runs[:-1])
    else:
        delattr(state, fsdp_hooks.RUNS)


@_compat.read_by_dynamo
def _is_cast(own: torch.dtype, policy: Any) -> bool:
    """Whether a policy casts a parameter, or its gradient."""
    if not own.is_floating_point:
        return False
    compute = own if policy.param_dtype is None else policy.param_dtype
    reduce = compute if policy.reduce_dtype is None else policy.reduce_dtype
    return compute != own or reduce != own


@_compat.read_by_dynamo
def _computed_with(x: torch.Tensor, policy: Any) -> torch.Tensor:
    """A parameter in the dtype of the computation. The casts of its gradient are those of
    FSDP: the sum over ranks is one of the dtype in which it is reduced.
    """
    compute, reduce = policy.param_dtype, policy.reduce_dtype
    own = x.dtype
    compute = own if compute is None else compute
    reduce = compute if reduce is None else reduce
    _check_reduced(str(own), str(compute), str(reduce))
    with annotations.casting(str(compute), str(reduce)):
        if reduce != own:
            # there and back: the same values, and gradients that are reduced between
            x = x.to(reduce)
        return x.to(compute)


@_compat.constant_in_graph
def _check_reduced(own: str, compute: str, reduce: str) -> None:
    """Check that a gradient can be reduced in a dtype.

    Raises:
        CaptureError: it cannot.
    """
    if reduce in (own, compute):
        return
    sizes = [
        getattr(torch, name.removeprefix("torch.")).itemsize for name in (own, compute, reduce)
    ]
    if own == compute and sizes[2] > sizes[0]:
        return
    checks.refuse_option(
        "fully_shard",
        f"mp_policy with reduce_dtype={reduce}, of parameters in {own} that are computed with "
        f"in {compute}",
        f"reduce_dtype={own}; or sf.bucketed_grad(fn, reduce_dtype={reduce}) of a module without "
        "reduce_dtype",
    )


@_compat.constant_in_graph
def _check(factor: float | None, has_hook: bool) -> None:
    """Check that gradients are those of the function.

    Raises:
        CaptureError: the user has FSDP change them.
    """
    if factor is not None:
        checks.refuse_option(
            "fully_shard",
            f"a module with set_gradient_divide_factor({factor})",
            "the loss of all rows, divided in the function as it should be",
        )
    if has_hook:
        checks.refuse_option(
            "fully_shard",
            "a module with set_all_reduce_hook",
            "the gradients that sf.grad returns, changed after it",
        )


@_compat.read_by_dynamo
def _cast(dtype: torch.dtype, tree: Any) -> Any:
    """A tree with its floating tensors in a dtype."""
    return fsdp_hooks.of_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


table.FUNCTIONS[fsdp_hooks.PRE_FORWARD] = pre_forward
table.FUNCTIONS[fsdp_hooks.POST_FORWARD] = post_forward
table.FUNCTIONS[fsdp_hooks.OF_GROUPS[fsdp_hooks.PRE_FORWARD]] = pre_forward_of_group
table.FUNCTIONS[fsdp_hooks.OF_GROUPS[fsdp_hooks.POST_FORWARD]] = post_forward_of_group
