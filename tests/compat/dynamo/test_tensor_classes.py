"""Subclasses of tensors: which are plain, and which are foreign."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import _compat
from shardfn._compat.dynamo.tensor_classes import (
    class_name,
    holds_tensors,
    is_foreign,
    is_foreign_class,
    reads_calls,
)
from tests.compat.dynamo.test_shells import Scaled

HELD = Scaled(torch.ones(2), torch.ones(1), None)


class Named(torch.nn.Parameter):
    """A parameter of another name."""


class Reading(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def test_plain_tensors_are_not_foreign() -> None:
    x = torch.ones(2)
    fake = _compat.FakeTensorMode().from_tensor(x)
    plain = (x, torch.nn.Parameter(x), torch.nn.Buffer(x), Named(x), fake, 3)
    assert not any(map(is_foreign, plain))


def test_other_classes_are() -> None:
    assert is_foreign(HELD) and is_foreign(torch.ones(2).as_subclass(Reading))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        x = sf.distribute(torch.ones(2), mesh, sf.P())
        assert is_foreign(x) and class_name(x) == "DTensor" and not holds_tensors(x)
    assert class_name(HELD) == "Scaled"


def test_a_class_that_holds_tensors_is_no_foreign_class() -> None:
    assert holds_tensors(HELD) and not holds_tensors(torch.ones(2))
    assert is_foreign_class(Reading) and not is_foreign_class(Scaled)
    assert not is_foreign_class(torch.nn.Parameter) and not is_foreign_class(int)


def test_a_torch_function_of_its_own_is_seen() -> None:
    assert reads_calls(torch.ones(2).as_subclass(Reading))
    assert not reads_calls(torch.ones(2)) and not reads_calls(torch.nn.Parameter(torch.ones(2)))
