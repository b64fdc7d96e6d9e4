"""The hooks of fully_shard, which gather the parameters of a module around its forward, and what
they say of it.
"""

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
    """The key of a function in a table of functions: for a hook of fully_shard its name, since its
    module takes long to import. None for what has no hash.
    """
    if getattr(called, "__hash__", None) is None:
        return None
    if getattr(called, "__module__", None) != STATE:
        return called
    name = called.__qualname__
    return OF_GROUPS.get(name, name) if _is_of_group(called) else name


def takes_itself(key: Any) -> bool:
    """Whether our function for a key takes the called function first."""
    return key in OF_GROUPS.values()


def _is_of_group(called: Any) -> bool:
    """Whether a hook closes over its state, in place of being called with it."""
    inner = called
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
        if hasattr(inner, "__self__"):
            return True
    return False


def state_of(hook: Any) -> Any:
    """The state that a hook closes over: its wrappers refuse Dynamo, and count the modules. Dynamo
    reads this.
    """
    inner = hook
    while not hasattr(inner, "__self__"):
        inner = inner.__wrapped__
    return inner.__self__


def policy_of(state: Any) -> Any:
    """The MixedPrecisionPolicy of a module's state. Dynamo reads this."""
    return state._mp_policy


def groups_of(state: Any) -> Any:
    """The groups of parameters of a module's state. Dynamo reads this."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = state._fsdp_param_group  # until torch 2.12
    return [] if group is None else [group]


def of_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A tree with a function of each of its tensors, as FSDP goes through the arguments of a
    module. Dynamo reads this.
    """
    return torch.distributed.utils._apply_to_tensors(fn, tree)


def has_hook(group: Any) -> bool:
    """Whether the user has set a hook for the reduced gradients. Dynamo reads this."""
    return group._all_reduce_hook is not None


def places_of(parameter: Any) -> list[tuple[Any, str]]:
    """The modules that have a parameter, each with its name there. Dynamo reads this."""
    info = parameter._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def sharded(parameter: Any, now: Any) -> Any:
    """The tensor of a module for a parameter: another one that torch.func.functional_call gives
    it, or the DTensor. After a forward outside of functions the module may still have the
    gathered one. Dynamo reads this.
    """
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.sharded_param if now is gathered else now


def parameter_at(module: Any, name: str) -> Any:
    """The parameter of a module. Dynamo reads this."""
    return module._parameters[name]


def replaced(module: Any, name: str, x: Any) -> Any:
    """The parameter of a module, which has a tensor in its place now. Dynamo reads this."""
    before = module._parameters[name]
    module._parameters[name] = x
    return before


@attrs.frozen(eq=False)
class Layout:
    """How FSDP places a parameter.

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


def layout_of(parameter: Any, group: Any = None) -> Layout:
    """How FSDP places a parameter of a group."""
    part = None
    if parameter.is_dtensor:
        part = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec
    factor = None if group is None else group.gradient_divide_factor
    return Layout(parameter._sharding_spec, part, parameter.fsdp_placement.dim, factor)


def dtypes_of(policy: Any, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which a module computes with a parameter, and reduces its gradient."""
    if not own.is_floating_point:
        return own, own
    compute = policy.param_dtype or own
    return compute, policy.reduce_dtype or compute


def learned(parameter: Any) -> None:
    """FSDP's look at a parameter that the user may have replaced: it is what the module has."""
    module, name = places_of(parameter)[0]
    now = module._parameters[name]
    parameter.sharded_param = now
    parameter._setattr_on_modules(now)


def all_learned(group: Any) -> None:
    """FSDP's first look at the parameters of a group."""
    for parameter in group.fsdp_params:
        learned(parameter)


def resharded(group: Any) -> None:
    """Give the modules of a group their parameters back."""
    for parameter in group.fsdp_params:
        parameter._setattr_on_modules(parameter.sharded_param)
        parameter.__dict__.pop("_unsharded_param", None)


def own_policy(parameter: Any, group: Any) -> Any:
    """How a parameter is cast. It has a policy of its own from torch 2.15 on."""
    own = getattr(parameter, "mp_policy", None)
    return own or group.mp_policy


def unsharded(group: Any, gathered: Callable[..., torch.Tensor]) -> None:
    """Give the modules of a group the tensors that they compute with, until the forward ends. A
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
