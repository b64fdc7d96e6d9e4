"""What loops and branches share: carries as tensors, and kinds of leaves."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.transforms.control_flow._controlled import carried, leaf_kinds

X = torch.ones(2, dtype=torch.float64)


def test_a_carry_is_its_tensors_in_the_order_in_which_it_entered() -> None:
    init = {"b": X, "a": torch.zeros(()), "n": None}
    a = torch.ones(())
    found = carried("f", {"a": a, "n": None, "b": X}, init)
    assert found[0] is X and found[1] is a and len(found) == 2


def test_a_number_takes_the_dtype_of_the_carry_that_entered() -> None:
    (number,) = carried("f", [3], [torch.zeros((), dtype=torch.float64)])
    assert number.dtype == torch.float64 and float(number) == 3.0


def test_a_carry_of_another_tree_is_refused() -> None:
    with pytest.raises(sf.TreeError, match="the carries that leave lack"):
        carried("f", [X], [X, X])


def test_leaves_of_nothing() -> None:
    assert leaf_kinds(None, "xs") == ((), ())
    assert leaf_kinds({"a": X, "n": 3}, "xs") == (
        ("xs['a']", "xs['n']"),
        (((2,), torch.float64), "int"),
    )
