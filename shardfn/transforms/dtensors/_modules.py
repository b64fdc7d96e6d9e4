"""Calls of modules of fully_shard: their parameters are DTensors that the function closes over, and
propagation gathers them where it is due.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

from ... import _compat
from ..._compat.distributed import fsdp_hooks
from ...capture.dtensors import checks, table


@_compat.read_by_dynamo
def pre_forward(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """The hook before the forward, which gathers the parameters."""
    policy = state._mp_policy
    if policy.param_dtype is not None or policy.output_dtype is not None:
        checks.refuse_option(
            "fully_shard",
            "a module with a policy of mixed precision",
            "sf.mixed_precision(fn, compute=torch.bfloat16), of fully_shard without mp_policy",
        )
    return args, kwargs


@_compat.read_by_dynamo
def post_forward(state: Any, module: Any, input: Any, output: Any) -> Any:
    """The hook after the forward, which frees the gathered parameters."""
    return output


table.FUNCTIONS[fsdp_hooks.PRE_FORWARD] = pre_forward
table.FUNCTIONS[fsdp_hooks.POST_FORWARD] = post_forward
