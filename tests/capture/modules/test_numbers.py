"""Numbers that a module's constructor computes and reads, while tensors have no values."""

from __future__ import annotations

import pytest
import torch

from shardfn.capture.modules.numbers import LARGEST, Numbers


def test_rates_that_grow_with_depth_are_read() -> None:
    with torch.device("meta"), Numbers():
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
    assert rates == [0.0, 0.25, 0.5]


def test_what_follows_from_numbers_is_known() -> None:
    with torch.device("meta"), Numbers():
        x = torch.arange(4) * 2 + 1
        assert x.tolist() == [1, 3, 5, 7]
        assert int(x.sum()) == 16 and bool((x > 0).all())
        assert x.is_meta, "the tensor itself has no values"


def test_a_tensor_that_was_written_to_is_no_longer_known() -> None:
    with torch.device("meta"), Numbers():
        x = torch.ones(2)
        x.add_(1)
        with pytest.raises((RuntimeError, NotImplementedError)):
            x.tolist()


def test_random_numbers_and_large_tensors_are_not_known() -> None:
    with torch.device("meta"), Numbers():
        for x in (torch.rand(2), torch.ones(LARGEST + 1)):
            with pytest.raises((RuntimeError, NotImplementedError)):
                x.tolist()
