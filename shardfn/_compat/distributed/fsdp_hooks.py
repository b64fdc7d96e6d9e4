"""The hooks of fully_shard, which gather the parameters of a module around its forward."""

from __future__ import annotations

from typing import Any

STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
PRE_FORWARD = "FSDPState._pre_forward"
POST_FORWARD = "FSDPState._post_forward"


def key_of(called: Any) -> Any:
    """The key of a function in a table of functions: for a hook of fully_shard its name, since its
    module takes long to import. None for what has no hash.
    """
    if getattr(called, "__hash__", None) is None:
        return None
    if getattr(called, "__module__", None) == STATE:
        return getattr(called, "__qualname__", None)
    return called
