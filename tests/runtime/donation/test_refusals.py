"""Tensors of one rank that cannot be donated are refused before anything runs."""

from __future__ import annotations

import weakref

import pytest
import torch

import shardfn as sf
from shardfn.runtime.donation import check_own, take_own


def test_shared_held_and_gone_tensors_are_named() -> None:
    x, y = torch.ones(3), torch.ones(3)
    check_own("f", [("x", x)], [("y", y)])
    with pytest.raises(sf.ShardError, match="shares memory with argument y"):
        check_own("f", [("x", x)], [("y", x[:1])])
    look = weakref.ref(x)
    with pytest.raises(sf.ShardError, match="something else refers to it"):
        check_own("f", [("x", x)], [("y", y)])
    assert look() is x
    take_own("f", [("y", y)])
    with pytest.raises(sf.ShardError, match="was donated to that call"):
        check_own("f", [("y", y)], [])
