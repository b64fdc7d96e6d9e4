"""A step run with tensors where torch reads numbers: equal to the step with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.capture.optimizers.mode import Stepping, writes

X, Y, Z = (torch.tensor([a, b]) for a, b in ((1.0, 2.0), (3.0, 5.0), (2.0, 4.0)))
ALPHA = torch.tensor(0.25, dtype=torch.float64)


def stepping(*numbers: torch.Tensor, is_torchs: bool = True, replaced: Any = None) -> Stepping:
    return Stepping(numbers, is_torchs, replaced or {})


CALLS = {
    "add": lambda a: X.clone().add_(Y, alpha=a),
    "sub": lambda a: torch.sub(X, Y, alpha=a),
    "addcmul": lambda a: X.clone().addcmul_(Y, Z, value=a),
    "addcdiv": lambda a: torch.addcdiv(X, Y, Z, value=a),
    "lerp": lambda a: X.lerp(Y, a),
    "full_like": lambda a: torch.full_like(X, a),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_in_the_place_of_a_number_gives_the_same(name: str) -> None:
    wanted = CALLS[name](0.25)
    with stepping():
        got = CALLS[name](ALPHA)
        again = CALLS[name](0.25)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(again, wanted)
    assert got.dtype == wanted.dtype


def test_a_count_is_read_in_float64_and_written_in_its_own_dtype() -> None:
    step = torch.tensor(3.0)
    with stepping(step):
        step += 1
        assert (0.9**step).dtype == torch.float64
        assert step.item().dtype == torch.float64
        power = 0.9**step
    assert step.dtype == torch.float32 and float(step) == 4.0
    assert float(power) == pytest.approx(0.9**4, rel=1e-15)


def test_a_step_keeps_its_derivatives() -> None:
    w = torch.ones(2, requires_grad=True)
    with stepping():
        with torch.no_grad():
            out = (w * 2).sum()
        assert w.detach().requires_grad
    assert out.requires_grad


def test_an_option_is_compared_with_zero_by_its_first_value() -> None:
    decay = torch.tensor(0.0)
    with stepping(replaced={id(decay): 0.1}):
        assert (decay != 0) is True
    with stepping(is_torchs=False, replaced={id(decay): 0.1}):
        assert isinstance(decay != 0, torch.Tensor)


def test_functions_that_write() -> None:
    assert all(map(writes, ("add_", "__iadd__", "copy_")))
    assert not any(map(writes, ("add", "__add__", "__setitem__")))
