"""FSDP2's private state: its hooks, parameter groups, layouts and mixed-precision policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed.utils

STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
PRE_FORWARD = "FSDPState._pre_forward"
POST_FORWARD = "FSDPState._post_forward"
# the same hooks around those of fully_shard([a, b]), which find the state themselves
OF_GROUPS = {PRE_FORWARD: "of a group, before", POST_FORWARD: "of a group, after"}
RUNS = "_shardfn_runs"  # an attribute of the state while its modules run


def key_of(called: Any) -> Any:
    """Return the lookup key of a called function: its name for a hook of fully_shard, whose
    module imports slowly. None without a hash.
    """
    if getattr(called, "__hash__", None) is None:
        return None
    if getattr(called, "__module__", None) != STATE:
        return called
    name = called.__qualname__
    return OF_GROUPS.get(name, name) if _is_of_group(called) else name


def takes_itself(key: Any) -> bool:
    """Check whether our replacement of a hook takes the hook as its first argument."""
    return key in OF_GROUPS.values()


def _is_of_group(called: Any) -> bool:
    """Check whether a hook closes over its FSDPState, as those of fully_shard([a, b]) do."""
    inner = called
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
        if hasattr(inner, "__self__"):
            return True
    return False


def state_of(hook: Any) -> Any:
    """Return the FSDPState that a group's hook closes over: its wrappers refuse Dynamo. Dynamo
    reads this.
    """
    inner = hook
    while not hasattr(inner, "__self__"):
        inner = inner.__wrapped__
    return inner.__self__


def policy_of(state: Any) -> Any:
    """Return the MixedPrecisionPolicy of an FSDPState. Dynamo reads this."""
    return state._mp_policy


def groups_of(state: Any) -> Any:
    """Return the parameter groups of an FSDPState. Dynamo reads this."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = state._fsdp_param_group  # until torch 2.12
    return [] if group is None else [group]


def of_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Map a function over the tensors of a module's arguments, as FSDP does. Dynamo reads this."""
    return torch.distributed.utils._apply_to_tensors(fn, tree)


def has_hook(group: Any) -> bool:
    """Check whether the user has set an all-reduce hook on a group. Dynamo reads this."""
    return group._all_reduce_hook is not None


def places_of(parameter: Any) -> list[tuple[Any, str]]:
    """List the (module, name) pairs under which a parameter is registered. Dynamo reads this."""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def sharded(parameter: Any, now: Any) -> Any:
    """Return the sharded parameter in place of a gathered one that a forward has left in the
    module. Dynamo reads this.
    """
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.sharded_param if now is gathered else now


def parameter_at(module: Any, name: str) -> Any:
    """Return a module's parameter of a name. Dynamo reads this."""
    return module._parameters[name]


def replaced(module: Any, name: str, x: Any) -> Any:
    """Set a module's parameter of a name to a tensor, and return the previous one. Dynamo reads
    this.
    """
    before = module._parameters[name]
    module._parameters[name] = x
    return before


@attrs.frozen(eq=False)
class Layout:
    """How FSDP shards a parameter: its spec, dim and gradient divide factor.

    Args:
        spec: of the DTensor.
        part: the spec of the DTensor of parallelize_module that the module computes with, or None.
        dim: the dim that it shards.
        factor: that divides gradients, in place of the number of ranks.
    """

    spec: Any
    part: Any
    dim: int
    factor: float | None = None

    @property
    def mesh(self) -> Any:
        """The mesh: its axes replicate, shard, and belong to the part, in this order."""
        return self.spec.mesh


def part_of(parameter: Any) -> Any:
    """Return the spec of the DTensor of parallelize_module that a module computes with, or None.
    Dynamo reads this.
    """
    if not parameter.is_dtensor:
        return None
    return getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec


def layout_of(parameter: Any, group: Any = None) -> Layout:
    """Read the Layout of a parameter in its group."""
    part = part_of(parameter)
    factor = None if group is None else group.gradient_divide_factor
    return Layout(parameter._sharding_spec, part, parameter.fsdp_placement.dim, factor)


def dtypes_of(policy: Any, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which a policy computes with a parameter, and reduces its gradient."""
    if not own.is_floating_point:
        return own, own
    compute = policy.param_dtype or own
    return compute, policy.reduce_dtype or compute


def learned(parameter: Any) -> None:
    """Patch FSDP's refresh of a parameter that the user may have replaced: take the module's."""
    module, name = places_of(parameter)[0]
    now = module._parameters[name]
    parameter.sharded_param = now
    parameter._setattr_on_modules(now)


def all_learned(group: Any) -> None:
    """Patch FSDP's lazy initialization of a group: refresh each parameter."""
    for parameter in group.fsdp_params:
        learned(parameter)


def resharded(group: Any) -> None:
    """Patch FSDP's reshard: register the sharded parameters in the modules again."""
    for parameter in group.fsdp_params:
        parameter._setattr_on_modules(parameter.sharded_param)
        parameter.__dict__.pop("_unsharded_param", None)


def own_policy(parameter: Any, group: Any) -> Any:
    """Return the mixed-precision policy of a parameter, or of its group (before torch 2.15)."""
    own = getattr(parameter, "mp_policy", None)
    return own or group.mp_policy


def unsharded(group: Any, gathered: Callable[..., torch.Tensor]) -> None:
    """Register the gathered parameters of a group in its modules until the forward ends. A
    forward that a backward repeats may stop before its end.
    """
    for parameter in group.fsdp_params:
        layout = layout_of(parameter, group)
        policy = own_policy(parameter, group)
        x = gathered(parameter.sharded_param, layout, policy)
        parameter._unsharded_param = x  # torch 2.15 looks at it
        for module, name in places_of(parameter):
            module._parameters[name] = x
    if torch._C._current_graph_task_id() != -1:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: resharded(group))


FSDP_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam."
FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup."
CALLS: dict[str, Callable[..., Any]] = {  # each takes eager.fully_sharded, and torch's method
    f"{FSDP_PARAMETER}reset_sharded_param": lambda _, reset, parameter: learned(parameter),
    f"{FSDP_PARAMETER}_restore_spmd_types": lambda _, restore, parameter, x: None,
    f"{FSDP_GROUP}lazy_init": lambda _, init, group: all_learned(group),
    f"{FSDP_GROUP}unshard": lambda ours, unshard, group, *args, **kw: ours.unsharded(group),
    f"{FSDP_GROUP}reshard": lambda _, reshard, group: resharded(group),
    f"{FSDP_GROUP}wait_for_unshard": lambda _, wait, group: None,
    f"{FSDP_GROUP}_record_post_forward": lambda _, record, group: None,
    f"{FSDP_GROUP}_register_post_backward_hook": (
        lambda _, register, group, args, kwargs: (args, kwargs)
    ),
    f"{STATE}:FSDPState._register_pre_backward_hook": lambda _, register, state, output: output,
}
