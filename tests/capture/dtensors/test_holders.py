"""Tensors that hold others, in the code of one rank."""

from __future__ import annotations

import torch

from shardfn.capture.dtensors.holders import held, shell
from tests.compat.dynamo.test_shells import Scaled

HELD = Scaled(torch.ones(2, 3), torch.ones(1), None)


def test_names_of_what_a_tensor_holds() -> None:
    assert held(HELD) == ["data_", "scale"] and held(torch.ones(2)) == []


def test_a_shell_of_another_shape_is_contiguous() -> None:
    other = shell(HELD, (4, 5))
    assert (other.shape, other.stride) == ((4, 5), (5, 1))
    assert other.names == ("data_", "scale")
