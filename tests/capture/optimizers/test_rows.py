"""A parameter beside its gradient and its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from shardfn.capture.optimizers.layout import STARTED
from shardfn.capture.optimizers.rows import Row

X, G, M = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)


def row(grad: Any = G, *, is_late: bool = True) -> Row:
    layout: Any = SimpleNamespace(is_late=is_late)
    state = {"moment": M, STARTED: torch.tensor(True)}
    return Row("w", X, grad, state, layout)


def test_the_flag_of_the_first_step_is_not_the_optimizers_own() -> None:
    assert list(row().own) == ["moment"]
    assert set(row().tensors) == {"param", "grad", "state.moment"}
    assert set(row(None).tensors) == {"param", "state.moment"}


def test_a_first_step_is_told_where_there_is_a_gradient() -> None:
    assert row().is_late and not row(None).is_late
    assert not row(is_late=False).is_late


def test_a_row_of_other_tensors_has_the_same_path() -> None:
    others = {name: x + 1 for name, x in row().tensors.items()}
    made = row().like(others)
    assert made.path == "w" and torch.equal(made.param, X + 1)
    assert torch.equal(made.grad, G + 1) and torch.equal(made.state["moment"], M + 1)
    assert row().fresh().state == {}
