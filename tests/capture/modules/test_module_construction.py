"""A module that is built inside a capture: without values, and what it may not hold."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.modules.module_construction import Building


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.inner.table = torch.ones(2)


def test_a_tensor_without_a_name_is_refused_by_its_place() -> None:
    with pytest.raises(sf.TreeError) as caught:
        Building("f", Odd, "cpu").empty()
    text = str(caught.value)
    assert "inner.table is a tensor, but neither a parameter nor a buffer" in text
    assert "self.register_buffer('table', value, persistent=False)" in text
    assert caught.value.arg_path == "inner.table"
