"""The results of a captured function: their tree, their paths, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.ones(2)


@pytest.mark.parametrize(
    ("fn", "place"),
    [
        (lambda x: (x, f"a sum of {x.sum()}"), "result[1]"),
        (lambda x: {"a": {f"{x}": x}}, "result['a']"),
        (lambda x: (x, sf.grad(lambda x: (x.sum(), f"{x}"), has_aux=True)(x)), "result[1][1]"),
    ],
)
def test_a_text_of_a_tensor_is_refused(fn: Any, place: str) -> None:
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(X)
    said = f"jit(<lambda>): {place} is text made from a tensor's value"
    assert str(caught.value).splitlines()[0] == said
    assert caught.value.fix == "return the tensor, and write the text outside: f'{x}'"
