"""Closed-over tensors as inputs: stand-ins for them, and those that cannot be one."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture.closure.entering import refuse_closed_over, stand_in
from tests.compat.dynamo.test_shells import Scaled

X = torch.ones(2, 3).t()


def test_a_stand_in_has_the_layout_and_requires_grad_of_its_tensor() -> None:
    mode = _compat.FakeTensorMode()
    for x in (X, X.clone().requires_grad_()):
        fake = stand_in(x, mode)
        assert _compat.is_fake(fake) and fake.stride() == x.stride()
        assert fake.requires_grad is x.requires_grad


def test_plain_tensors_and_parameters_may_be_closed_over() -> None:
    refuse_closed_over([X, torch.nn.Parameter(X)], "f")


def test_a_tensor_that_holds_others_is_an_argument() -> None:
    with pytest.raises(sf.CaptureError) as caught:
        refuse_closed_over([X, Scaled(X, X, None)], "f")
    text = str(caught.value)
    assert text.startswith("f: it closes over a Scaled\n")
    assert "pass it as an argument" in text
