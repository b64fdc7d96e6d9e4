"""A function may store constants in attributes of objects: its later calls do the same as the plain
function's, whatever happens to the attributes in between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.tensor([1.0, 2.0], dtype=torch.float64)


class Box:
    """An object with attributes."""

    def __init__(self) -> None:
        self.mode = "x"
        self.count = 0
        self.kept: Any = None


def jitted(fn: Any) -> Any:
    return sf.jit(fn, backend="aten")


def test_a_lazy_default_is_stored_once() -> None:
    box = Box()

    def fn(x: torch.Tensor) -> torch.Tensor:
        if box.kept is None:
            box.kept = "set"
        return x * 2

    call = jitted(fn)
    for _ in range(2):
        torch.testing.assert_close(call(X), X * 2)
        assert box.kept == "set"
    box.kept = None
    call(X)
    assert box.kept == "set"


def test_stores_of_two_functions_come_in_the_order_of_their_calls() -> None:
    box = Box()

    def first(x: torch.Tensor) -> torch.Tensor:
        box.mode = "a"
        return x + 1

    def second(x: torch.Tensor) -> torch.Tensor:
        box.mode = "b"
        return x + 2

    def reader(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if box.mode == "a" else 100.0)

    calls = jitted(first), jitted(second)
    read = jitted(reader)
    for number in (0, 1, 0, 0, 1, 1, 0):
        calls[number](X)
        assert box.mode == "ab"[number]
        torch.testing.assert_close(read(X), reader(X))


def test_an_attribute_that_is_set_and_reset_may_differ_between_calls() -> None:
    box = Box()

    def fn(x: torch.Tensor) -> torch.Tensor:
        before = box.mode
        box.mode = "inside"
        out = x * (2.0 if before == "x" else 3.0)
        box.mode = before
        return out

    call = jitted(fn)
    for mode in ("x", "y", "x"):
        box.mode = mode
        torch.testing.assert_close(call(X), fn(X))
        assert box.mode == mode


def test_a_counter_is_refused_and_stays_as_it_was() -> None:
    box = Box()

    def fn(x: torch.Tensor) -> torch.Tensor:
        box.count += 1
        return x * box.count

    for _ in range(2):
        with pytest.raises(sf.CaptureError, match="changes an object outside of itself"):
            jitted(fn)(X)
        assert box.count == 0


def test_a_tensor_beside_a_constant_is_stored_and_a_nonlocal_refuses_both() -> None:
    box, held = Box(), None

    def fn(x: torch.Tensor, also: bool = False) -> torch.Tensor:
        nonlocal held
        box.mode = "stored"
        box.kept = x
        if also:
            held = x
        return x

    with pytest.raises(sf.CaptureError, match="changes an object outside of itself"):
        jitted(fn)(X, True)
    assert box.mode == "x" and box.kept is None and held is None
    jitted(fn)(X)
    assert box.mode == "stored" and torch.equal(box.kept, X)


def test_parameters_of_a_module_that_is_closed_over_name_functionalize() -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(sf.CaptureError) as error:
        sf.jit(lambda x: model.weight.detach().mul_(x), backend="aten")(torch.ones(3))
    message = str(error.value)
    assert "a closed-over tensor: the function writes to this tensor" in message
    assert "fn, params, buffers = sf.functionalize(module)" in message
