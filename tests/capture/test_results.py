"""The results of a captured function: their tree, their paths, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.results import Result, program_of
from shardfn.types import TENSOR

GRAPH = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
X = torch.ones(2)


def program(out: Any) -> Any:
    return program_of("f", GRAPH, ("x",), Result.of(out))


def test_constants_are_kept_and_tensors_have_paths() -> None:
    found = program({"a": X, "n": 3, "b": [X, None]})
    assert found.out_paths == ("result['a']", "result['b'][0]")
    assert found.out_leaves.count(TENSOR) == 2 and 3 in found.out_leaves


def test_gradients_stand_beside_the_value() -> None:
    out = Result.of(({"loss": X, "k": 1}, [X, X])).beside(("w", "b"))
    found = program_of("f", GRAPH, (), out)
    assert found.out_paths == ("result['loss']", "gradient of w", "gradient of b")
    assert len(found.out_leaves) == 2


def test_an_object_cannot_be_a_result() -> None:
    with pytest.raises(sf.CaptureError) as caught:
        program({"a": X, "o": object()})
    assert "result['o']" in str(caught.value) or "['o']" in str(caught.value)


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
    said = f"jit(<lambda>): {place} is a text of a tensor's value"
    assert str(caught.value).splitlines()[0] == said
    assert caught.value.fix == "return the tensor, and write the text outside: f'{x}'"
