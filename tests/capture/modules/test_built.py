"""A module that is built inside a capture: without values, and what it may not hold."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture.modules.built import Building


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.inner.table = torch.ones(2)


def test_the_empty_module_has_shapes_and_no_values() -> None:
    module = Building("f", lambda: torch.nn.Linear(3, 5), "cpu").empty()
    assert module.weight.shape == (5, 3) and _compat.is_fake(module.weight)
    assert str(module.weight.device) == "cpu"


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(sf.TreeError, match="f: it returns a int"):
        Building("f", lambda: 3, "cpu").empty()  # type: ignore[arg-type, return-value]


def test_a_tensor_without_a_name_is_refused_by_its_place() -> None:
    with pytest.raises(sf.TreeError) as caught:
        Building("f", Odd, "cpu").empty()
    text = str(caught.value)
    assert "inner.table is a tensor, but neither a parameter nor a buffer" in text
    assert "self.register_buffer('table', value, persistent=False)" in text
    assert caught.value.arg_path == "inner.table"


def test_an_error_of_ours_passes_as_it_is() -> None:
    error = sf.ShardError("as it is")

    def raising() -> torch.nn.Module:
        raise error

    with pytest.raises(sf.ShardError) as caught:
        Building("f", raising, "cpu").empty()
    assert caught.value is error
