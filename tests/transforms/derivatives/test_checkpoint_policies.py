"""Policies under JAX's names: texts that are read back as policies."""

from __future__ import annotations

import pytest

import shardfn as sf
from shardfn import checkpoint_policies as cp


@pytest.mark.parametrize(
    "call",
    [
        lambda: cp.save_only_these_names(3),
        lambda: cp.save_any_names_but_these(None),
        lambda: cp.save_from_both_policies("dots", cp.nothing_saveable),
    ],
)
def test_what_is_no_policy_is_refused(call) -> None:
    with pytest.raises(sf.ShardError, match="needed: one of checkpoint_policies"):
        call()
