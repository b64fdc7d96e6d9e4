"""Keys of constants: equal only if no program can tell the constants apart."""

from __future__ import annotations

import enum
import functools
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardfn.capture.closure.constants import constant_key, is_constant


class Colour(enum.Enum):
    RED = 1


class Text(str):
    """A str with attributes."""


@attrs.define
class Config:
    scale: Any


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def same(a: Any, b: Any) -> bool:
    return constant_key(a) == constant_key(b)


DIFFERENT = [
    (0.0, -0.0),
    (1, True),
    (1, 1.0),
    ((1,), [1]),
    ("a", b"a"),
    (1j, 1 - 0j + 0j - 1 + 1j * -1),
    (torch.float32, torch.float64),
    (Shard(0), Replicate()),
    (slice(1, 2), slice(1, 3)),
    (range(3), range(0, 3, 2)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1}, {True}),
    (np.float32(1), np.float64(1)),
    (np.array([0.0]), np.array([-0.0])),
    (Config(1), Config(1.0)),
    (Slotted(1), Slotted(2)),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (print, max),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_what_a_program_can_tell_apart_has_two_keys(pair: Any) -> None:
    assert not same(*pair)


EQUAL = [
    (float("nan"), float("nan")),
    ([1, (2.0, "x")], [1, (2.0, "x")]),
    ({"a": [1]}, {"a": [1]}),
    (Shard(1), Shard(1)),
    (Config([1, 2]), Config([1, 2])),
    (Colour.RED, Colour.RED),
    (np.array([1, 2]), np.array([1, 2])),
    (functools.partial(max, 1), functools.partial(max, 1)),
    (frozenset({1, 2}), frozenset({2, 1})),
]


@pytest.mark.parametrize("pair", EQUAL, ids=range(len(EQUAL)))
def test_equal_constants_have_one_key(pair: Any) -> None:
    assert same(*pair)


def test_attributes_of_a_subclass_count() -> None:
    first, second = Text("a"), Text("a")
    assert same(first, second)
    second.note = "other"
    assert not same(first, second)


def test_a_class_whose_equality_raises_is_told_by_identity() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise TypeError("not comparable")

        __hash__ = None  # type: ignore[assignment]

    odd = Odd()
    assert same(odd, odd) and not same(odd, Odd())


def test_tensors_functions_and_methods_are_told_by_identity() -> None:
    x = torch.ones(1)
    assert same(x, x) and not same(x, torch.ones(1))
    config = Config(1)
    assert same(config.__repr__, config.__repr__)
    assert not same(config.__repr__, Config(1).__repr__)


def test_immutable_values_are_constants() -> None:
    assert all(map(is_constant, (1, "a", (1, (2.0,)), torch.float32, Shard(0), range(2))))
    assert is_constant(np.float32(1)) and not is_constant(np.array([1]))
    assert not any(map(is_constant, ([1], (1, [2]), {}, torch.ones(1), Config(1))))
