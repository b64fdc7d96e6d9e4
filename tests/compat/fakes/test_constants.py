"""Fake tensors keep the values of small integers and bools, until unknown values are written."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfn import _compat
from shardfn._compat.fakes import answers, constants


@torch.library.custom_op("shardfn_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a capture runs no op of a user")


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def read(x: Any) -> list[Any] | None:
    """The known values of a fake tensor."""
    return None if x.constant is None else x.constant.tolist()


def test_known_values_are_followed_and_forgotten() -> None:
    answers._ANSWERS.clear()
    FakeTensorMode.cache_clear()
    mode = _compat.fake_mode()
    x = mode.from_tensor(torch.rand(3, 4))
    with mode, _compat.patched("fakes"):
        numbers = torch.arange(4)
        assert read(numbers > 1) == [False, False, True, True]
        assert read(torch.arange(constants.MOST + 1)) is None
        assert read(torch.ones(3)) is None
        view = numbers[1:]
        view += 1
        assert read(numbers) == [0, 2, 3, 4] and read(view) == [2, 3, 4]
        for _ in range(2):  # computed, remembered
            assert read(numbers + x) is None
            assert read(doubled(numbers)) is None
            assert x[:, numbers > 2].shape == (3, 2)
            assert x[:, numbers > 3].shape == (3, 1)
        assert read(numbers) == [0, 2, 3, 4]
        view.copy_(x[0, 1:])
        assert read(numbers) is None and read(view) is None
