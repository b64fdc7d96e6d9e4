"""Functions have keys in a table: themselves, or the names of hooks of fully_shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_state

from shardfn._compat.distributed.fsdp_hooks import (
    POST_FORWARD,
    PRE_FORWARD,
    STATE,
    key_of,
    own_policy,
    state_of,
    takes_itself,
)


def test_the_hooks_of_fully_shard_have_names() -> None:
    state: Any = _fsdp_state.FSDPState
    assert _fsdp_state.__name__ == STATE
    assert key_of(state._pre_forward) == PRE_FORWARD
    assert key_of(state._post_forward) == POST_FORWARD
    assert not takes_itself(PRE_FORWARD)


def test_the_hooks_of_a_group_of_modules_take_themselves() -> None:
    record: Any = _fsdp_state.FSDPState()
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    _fsdp_state._register_group_forward_hooks(
        layers, record._pre_forward, record._post_forward, set(), record._cast_output_dtype
    )
    for layer in layers:
        (before,), (after,) = layer._forward_pre_hooks.values(), layer._forward_hooks.values()
        assert takes_itself(key_of(before))
        assert takes_itself(key_of(after))
        assert key_of(before) != key_of(after)
        assert state_of(before) is record


def test_other_functions_are_their_own_keys() -> None:
    assert key_of(len) is len
    assert key_of(None) is None
    assert key_of([]) is None


def test_a_parameter_may_have_a_policy_of_its_own() -> None:
    group = SimpleNamespace(mp_policy="the group's")
    assert own_policy(SimpleNamespace(), group) == "the group's"
    own = SimpleNamespace(mp_policy="its own")
    assert own_policy(own, group) == "its own"
