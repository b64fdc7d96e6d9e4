"""Bodies over tensors that hold others: opened, closed, and rows of what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.control_flow import holders
from tests.compat.dynamo.test_shells import Scaled

X, S = torch.ones(2, 3), torch.ones(1)
HELD = Scaled(X, S, "note")


def test_tensors_are_opened_in_order_and_closed_again() -> None:
    tensors, shells = holders.opened([X, HELD])
    assert [x is y for x, y in zip(tensors, [X, X, S], strict=True)] == [True] * 3
    plain, made = holders.closed("scan", shells, [2 * X, 3 * X, S])
    assert torch.equal(plain, 2 * X) and isinstance(made, Scaled)
    assert torch.equal(made.data_, 3 * X) and made.note == "note"


def test_a_transform_around_what_a_carry_holds_is_refused() -> None:
    _, shells = holders.opened([HELD])

    def look(x: torch.Tensor) -> Any:
        list(holders.closed("scan", shells, [x, S]))

    with pytest.raises(sf.CaptureError) as caught:
        torch.func.grad(look)(X)
    assert "scan: a derivative or vmap follows a Scaled in its carry" in str(caught.value)


def test_stacked_tensors_have_one_more_dim_and_plain_ones_no_shell() -> None:
    _, shells = holders.opened([HELD, X])
    first, second = holders.stacked(shells, 5)
    assert first is not None and first.shape == (5, 2, 3) and second is None
