"""Hooks of fully_shard modules inside a captured function. Parameters are closed-over DTensors, and
propagation all-gathers them where needed. A MixedPrecisionPolicy casts them before the all-gather,
while their module runs.

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
from ...capture.dtensors import placement_checks, replaced_calls
from ...ops import placement
from ...ops import shard_map as prims
from ...ops.text_formats import print_axes


@_compat.read_by_dynamo
def pre_forward(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Replace FSDP's pre-forward hook: cast the inputs, and all-gather the parameters."""
    policy = fsdp_hooks.policy_of(state)
    is_own = not placement_checks.is_constraint() and not _has_dtensors(args, kwargs)
    _compat.for_a_while(_enter, state, policy, is_own)
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args = _cast(policy.param_dtype, args)
        kwargs = _cast(policy.param_dtype, kwargs)
    return args, kwargs


@_compat.read_by_dynamo
def post_forward(state: Any, module: Any, input: Any, output: Any) -> Any:
    """Replace FSDP's post-forward hook: restore the sharded parameters, and cast the output."""
    policy = fsdp_hooks.policy_of(state)
    _compat.for_a_while(_leave, state)
    if policy.output_dtype is not None:
        return _cast(policy.output_dtype, output)
    return output


@_compat.read_by_dynamo
def pre_forward_of_group(hook: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Replace the pre-forward hook of one module of a `fully_shard([a, b])` group."""
    return pre_forward(fsdp_hooks.state_of(hook), module, args, kwargs)


@_compat.read_by_dynamo
def post_forward_of_group(hook: Any, module: Any, input: Any, output: Any) -> Any:
    """Replace the post-forward hook of one module of a `fully_shard([a, b])` group."""
    return post_forward(fsdp_hooks.state_of(hook), module, input, output)


@_compat.read_by_dynamo
def _has_dtensors(args: Any, kwargs: Any) -> bool:
    """Return whether a module is called with DTensors, and so computes on global tensors."""
    leaves = _tree.quick_leaves((args, kwargs))
    flags = [isinstance(x, DTensor) for x in leaves]
    return any(flags)


@_compat.read_by_dynamo
def _enter(state: Any, policy: Any, is_own: bool) -> None:
    """Replace the parameters of modules by those of the compute dtype, all-gathered in per-rank
    code, until `_leave`. A nested module that runs meanwhile reads the replaced ones. Nothing is
    written where nothing changes: bodies of loops and branches may not write.
    """
    runs = getattr(state, fsdp_hooks.RUNS, [])
    before = _replaced(state, policy, is_own) if not runs else []
    if runs or before:
        setattr(state, fsdp_hooks.RUNS, [*runs, before])


@_compat.read_by_dynamo
def _replaced(state: Any, policy: Any, is_own: bool) -> list[Any]:
    """Replace the parameters of modules, and return (module, name, tensor before) for each."""
    before = []
    for group in fsdp_hooks.groups_of(state):
        factor = group.gradient_divide_factor
        _check(None if is_own else factor, fsdp_hooks.has_hook(group))
        for parameter in group.fsdp_params:
            for owner, name in fsdp_hooks.places_of(parameter):
                now = fsdp_hooks.parameter_at(owner, name)
                x = fsdp_hooks.sharded(parameter, now)
                y = _computed_with(x, policy) if _is_cast(x.dtype, policy) else x
                if is_own and isinstance(y, DTensor):
                    y = _gathered(y, fsdp_hooks.part_of(parameter), factor)
                if y is not now:
                    before.append((owner, name, fsdp_hooks.replaced(owner, name, y)))
    return before


@_compat.read_by_dynamo
def _gathered(x: DTensor, part: Any, factor: float | None) -> torch.Tensor:
    """All-gather a parameter for per-rank code. Its gradient is the mean over ranks, or the sum
    divided by `factor` if the user set one.

    Args:
        x: the parameter, on the axes of FSDP and then those of its part.
        part: the spec of parallelize_module with which the module computes, or None.
        factor: that divides the gradient.
    """
    mesh = x.device_mesh
    of_part = [] if part is None else list(part.placements)
    count = mesh.ndim - len(of_part)
    axes = list(mesh.mesh_dim_names or ())[:count]
    sizes = list(mesh.shape)[:count]
    everywhere = [Replicate()] * count + of_part
    terms = [Partial()] * count + of_part
    replicated = x.redistribute(placements=everywhere)
    local = replicated.to_local(grad_placements=terms)
    local = placement.forbid_writes(local, placement.GATHERED)
    local = prims.vary(local, print_axes(axes))
    divisor = math.prod(sizes) if factor is None else factor
    local = placement.scale_gradient(local, 1 / divisor)
    return local if part is None else DTensor.from_local(local, part.mesh, of_part)


@_compat.read_by_dynamo
def _leave(state: Any) -> None:
    """Restore the parameters that `_enter` replaced."""
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
    """Return whether a MixedPrecisionPolicy casts a parameter of this dtype, or its gradient."""
    if not own.is_floating_point:
        return False
    compute = own if policy.param_dtype is None else policy.param_dtype
    reduce = compute if policy.reduce_dtype is None else policy.reduce_dtype
    return compute != own or reduce != own


@_compat.read_by_dynamo
def _computed_with(x: torch.Tensor, policy: Any) -> torch.Tensor:
    """Cast a parameter to the policy's param_dtype, so that its gradient is reduced over ranks in
    reduce_dtype, as FSDP does.
    """
    compute, reduce = policy.param_dtype, policy.reduce_dtype
    own = x.dtype
    compute = own if compute is None else compute
    reduce = compute if reduce is None else reduce
    _check_reduced(str(own), str(compute), str(reduce))
    with annotations.annotate_cast(str(compute), str(reduce)):
        if reduce != own:
            # there and back: the same values, and gradients that are reduced between
            x = x.to(reduce)
        return x.to(compute)


@_compat.constant_in_graph
def _check_reduced(own: str, compute: str, reduce: str) -> None:
    """Refuse a reduce_dtype that two casts of the parameter cannot give to its gradient.

    Raises:
        CaptureError: reduce_dtype is neither the dtype of the parameter nor of the computation.
    """
    if reduce in (own, compute):
        return
    sizes = [
        getattr(torch, name.removeprefix("torch.")).itemsize for name in (own, compute, reduce)
    ]
    if own == compute and sizes[2] > sizes[0]:
        return
    placement_checks.refuse_option(
        "fully_shard",
        f"mp_policy has reduce_dtype={reduce}, but the parameters have dtype {own}, and the module "
        f"computes in {compute}",
        f"reduce_dtype={own}; or sf.bucketed_grad(fn, reduce_dtype={reduce}) with no "
        "reduce_dtype in mp_policy",
    )


@_compat.constant_in_graph
def _check(factor: float | None, has_hook: bool) -> None:
    """Refuse FSDP modules that change gradients: a divide factor, or an all-reduce hook.

    Raises:
        CaptureError: the module has a gradient divide factor or an all-reduce hook.
    """
    if factor is not None:
        placement_checks.refuse_option(
            "fully_shard",
            f"a module with set_gradient_divide_factor({factor})",
            "divide the loss inside the function by the factor that you need",
        )
    if has_hook:
        placement_checks.refuse_option(
            "fully_shard",
            "a module with set_all_reduce_hook",
            "change the gradients that sf.grad returns",
        )


@_compat.read_by_dynamo
def _cast(dtype: torch.dtype, tree: Any) -> Any:
    """Cast the floating-point tensors of a tree to a dtype."""
    return fsdp_hooks.of_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


replaced_calls.FUNCTIONS[fsdp_hooks.PRE_FORWARD] = pre_forward
replaced_calls.FUNCTIONS[fsdp_hooks.POST_FORWARD] = post_forward
replaced_calls.FUNCTIONS[fsdp_hooks.OF_GROUPS[fsdp_hooks.PRE_FORWARD]] = pre_forward_of_group
replaced_calls.FUNCTIONS[fsdp_hooks.OF_GROUPS[fsdp_hooks.POST_FORWARD]] = post_forward_of_group
