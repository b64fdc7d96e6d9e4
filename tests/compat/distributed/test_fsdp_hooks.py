"""Functions have keys in a table: themselves, or the names of hooks of fully_shard."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_state

from shardfn._compat.distributed.fsdp_hooks import (
    POST_FORWARD,
    PRE_FORWARD,
    STATE,
    key_of,
)


def test_the_hooks_of_fully_shard_have_names() -> None:
    state: Any = _fsdp_state.FSDPState
    assert _fsdp_state.__name__ == STATE
    assert key_of(state._pre_forward) == PRE_FORWARD
    assert key_of(state._post_forward) == POST_FORWARD


def test_other_functions_are_their_own_keys() -> None:
    assert key_of(len) is len
    assert key_of(None) is None
    assert key_of([]) is None
