"""Policies under JAX's names: texts that are read back as policies."""

from __future__ import annotations

import pytest

import shardfn as sf
from shardfn import checkpoint_policies as cp
from shardfn.capture.checkpoint.policies import PLAIN, read


def test_every_policy_without_arguments_is_known() -> None:
    found = {x for name, x in vars(cp).items() if isinstance(x, str) and name[0] != "_"}
    assert found - {cp.__doc__, cp.__file__, cp.__name__} >= set(PLAIN) - {
        "checkpoint_dots",
        "checkpoint_dots_with_no_batch_dims",
    }
    assert cp.checkpoint_dots == cp.dots_saveable == "dots_saveable"


def test_policies_with_arguments_are_texts_of_themselves() -> None:
    assert cp.save_only_these_names("q", "it's") == "save_only_these_names('q', \"it's\")"
    both = cp.save_from_both_policies(cp.dots_saveable, cp.save_only_these_names("h"))
    assert both == "save_from_both_policies(dots_saveable, save_only_these_names('h'))"
    assert read(both) is read(both), "read once"


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
