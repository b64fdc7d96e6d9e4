"""explain_retrace of any transformed function, and of no other."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

import shardfn as sf


class Model(NamedTuple):
    by: float

    @functools.partial(sf.jit, backend="aten")
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_a_function_that_was_never_called() -> None:
    fn = sf.jit(lambda x, by: x * by, backend="aten")
    assert "jit(<lambda>)" in sf.explain_retrace(fn, torch.ones(2), 3)


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(sf.ShardError) as caught:
        sf.explain_retrace(abs, 1)
    assert str(caught.value).startswith("explain_retrace: abs is not a transformed function")


def test_a_bound_method_is_asked_about_its_last_call_or_with_its_self() -> None:
    model = Model(3.0)
    model.scale(torch.ones(2))
    assert sf.explain_retrace(model.scale) == sf.explain_retrace(Model.scale)
    said = sf.explain_retrace(model.scale, torch.ones(5))
    assert said.endswith("x: f32[5], was f32[2]")
