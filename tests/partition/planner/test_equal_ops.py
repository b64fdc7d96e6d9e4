"""Ops that look alike with their surroundings have one number."""

from __future__ import annotations

import pytest
import torch

from shardfn.partition.planner import observed_walk as module
from shardfn.partition.planner.equal_ops import kinds_of
from tests.partition.planner.test_observed_walk import observed

LAYERS = 13


def deep(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(LAYERS):
        x = (x @ w).tanh()
    return [x]


@pytest.fixture(name="numbers")
def _numbers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(module, "FEW", 0)
    found = observed(deep, (torch.ones(8, 4), torch.ones(4, 4)), [(0,), ("R",)])
    return {n.name: k for n, k in kinds_of(found, lambda node: 0).items()}


def test_layers_in_the_middle_are_alike_and_those_at_the_ends_are_not(
    numbers: dict[str, int],
) -> None:
    middle = {numbers[f"mm_{i}"] for i in range(4, 9)}
    assert len(middle) == 1
    assert numbers["mm"] not in middle and numbers[f"mm_{LAYERS - 1}"] not in middle
    assert numbers["tanh_5"] not in middle


def test_placements_that_are_decided_tell_ops_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW", 0)
    found = observed(deep, (torch.ones(8, 4), torch.ones(4, 4)), [(0,), ("R",)])
    numbers = kinds_of(found, lambda node: node.name)
    assert len(set(numbers.values())) == len(found.nodes)


def test_in_a_small_program_every_op_is_its_own() -> None:
    found = observed(deep, (torch.ones(8, 4), torch.ones(4, 4)), [(0,), ("R",)])
    numbers = kinds_of(found, lambda node: 0)
    assert sorted(numbers.values()) == list(range(len(found.nodes)))
