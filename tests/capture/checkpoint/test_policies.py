"""Policies: which values each saves, and which texts are none."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.checkpoint.policies import check, read
from tests.support.stages.graphs import graph_of

A, B = torch.ones(2, 3, 3), torch.ones(2, 3, 3)


def saved(policy: str, names: tuple[str, ...] = ()) -> list[str]:
    """The ops whose values a policy saves, all of them with these names."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a @ b)[0] @ b[0]).tanh()

    keep = read(policy)
    nodes = [n for n in graph_of(fn, A, B).nodes if n.op == "call_function"]
    return [n.name for n in nodes if keep(n, frozenset(names))]


def test_products_are_told_from_other_ops_and_those_with_batch_dims_from_others() -> None:
    assert {"bmm", "mm"} <= set(saved("dots_saveable"))
    assert "tanh" not in saved("dots_saveable")
    plain = saved("dots_with_no_batch_dims_saveable")
    assert "mm" in plain and "bmm" not in plain
    assert saved("checkpoint_dots") == saved("dots_saveable")


def test_everything_and_nothing() -> None:
    assert saved("nothing_saveable") == []
    assert "tanh" in saved("everything_saveable")


@pytest.mark.parametrize(
    ("policy", "names", "wanted"),
    [
        ("save_only_these_names('q', 'k')", ("k",), True),
        ("save_only_these_names('q')", ("k",), False),
        ("save_only_these_names('q')", (), False),
        ("save_anything_except_these_names('q')", (), True),
        ("save_anything_except_these_names('q')", ("q", "k"), False),
        ("save_any_names_but_these('q')", (), False),
        ("save_any_names_but_these('q')", ("q",), False),
        ("save_any_names_but_these('q')", ("q", "k"), True),
    ],
)
def test_policies_by_name(policy: str, names: tuple[str, ...], wanted: bool) -> None:
    assert bool(saved(policy, names)) is wanted


def test_two_policies_save_what_either_does() -> None:
    both = "save_from_both_policies(dots_saveable, save_only_these_names('h'))"
    assert set(saved(both)) == set(saved("dots_saveable"))
    assert "tanh" in saved(both, ("h",))


BROKEN = [
    "dots",
    "nothing_saveable()",
    "save_only_these_names",
    "save_only_these_names(3)",
    "save_only_these_names(names='q')",
    "save_from_both_policies(dots_saveable)",
    "__import__('os').system('true')",
    "dots_saveable +",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_text_that_is_no_policy_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        check("checkpoint", text)
    said = str(caught.value)
    assert said.startswith(f"checkpoint: the policy is {text}")
    assert "needed: one of checkpoint_policies" in said
