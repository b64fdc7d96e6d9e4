"""The arguments of make_mesh, checked before any process talks to another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import mesh_arguments as checks


@pytest.mark.parametrize("timeout", [0, -1, "8", True, float("nan"), torch.ones(1)])
def test_a_timeout_is_a_positive_number(timeout: Any) -> None:
    with sf.fake_world(2), pytest.raises(sf.PlacementError, match="make_mesh, timeout"):
        sf.make_mesh((2,), ("a",), timeout=timeout)


def test_a_timeout_is_in_seconds() -> None:
    assert checks.checked_timeout(None) is None
    assert checks.checked_timeout(3) == 3.0
    assert checks.checked_timeout(timedelta(minutes=2)) == 120.0
    with pytest.raises(sf.PlacementError):
        checks.checked_timeout(float("inf"))


def refused(check: Any, *args: Any) -> str:
    with pytest.raises(sf.PlacementError) as caught:
        check(*args)
    return str(caught.value)


def test_shapes_and_names_are_sequences() -> None:
    checks.check_tuples((2, 3), ["a", "b"])
    for shape, names in ((2, ("a",)), ((2,), "a"), (torch.ones(1), None)):
        text = refused(checks.check_tuples, shape, names)
        assert "a tuple of sizes and a tuple of axis names" in text


SHAPES: dict[str, tuple[Any, Any]] = {
    "shape (2, 0)": ((2, 0), ("a", "b")),
    "shape (True,)": ((True,), ("a",)),
    "shape (2.0,)": ((2.0,), ("a",)),
    "axis names ['1a', 3]": ((2, 3), ("1a", 3)),
    "shape (2,), axis names ('a', 'b')": ((2,), ("a", "b")),
    "shape (2, 3), axis names ('a', 'a')": ((2, 3), ("a", "a")),
}


@pytest.mark.parametrize("got", SHAPES)
def test_sizes_are_positive_and_each_axis_has_its_name(got: str) -> None:
    checks.check_shape((2, 3), ("a", "b"))
    assert got in refused(checks.check_shape, *SHAPES[got])


def test_a_device_type_has_no_number() -> None:
    assert checks.checked_type("cpu") == "cpu"
    for wrong in ("cpu:0", "no_such", 3, None):
        text = refused(checks.checked_type, wrong)
        assert f"device_type is {wrong!r}" in text and "without a number" in text


def test_a_device_that_the_machine_does_not_have() -> None:
    checks.refuse_absent("cpu")
    for device_type in ("mps", "xpu", "privateuseone"):
        if not torch.accelerator.is_available():
            text = refused(checks.refuse_absent, device_type)
            assert f"torch finds no device of type {device_type!r}" in text
            assert "device_type='cpu'" in text
