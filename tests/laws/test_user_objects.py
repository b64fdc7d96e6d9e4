"""Objects of a user's classes do in a capture what they do in Python: class properties, keys with
an `__eq__` of their own, special methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.tensor([2.0, 3.0], dtype=torch.float64)


class ClassProperty:
    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __get__(self, _: Any, owner: Any) -> Any:
        return self.read(owner)


class Settings:
    scale = 2.0
    doubled = ClassProperty(lambda owner: owner.scale * 2)
    is_on = ClassProperty(lambda _: False)
    weight = ClassProperty(lambda owner: torch.full((2,), owner.scale, dtype=torch.float64))


class Lower(Settings):
    scale = 5.0


class Layer(torch.nn.Module):
    factor = ClassProperty(lambda _: 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * type(self).factor * self.factor


class Key:
    """A key that equals those of the same last digit."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number % 10 == other.number % 10

    def __hash__(self) -> int:
        return self.number % 10


class SameHash:
    def __hash__(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    key: Key


def kept(keys: Any) -> int:
    found = set(keys)
    found.add(Key(14))
    found.discard(Key(23))
    return len(found)


THREE, THIRTEEN, FOUR = Key(3), Key(13), Key(4)
ONE, OTHER = SameHash(), SameHash()
TABLE, MEMBERS, LAYER = {THREE: 5.0}, {THREE}, Layer()
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a class property": lambda x: x * Settings.doubled,
    "one that is false": lambda x: x * 2 if Settings.is_on else x * 3,
    "one of a base": lambda x: x * Lower.doubled,
    "one of the class of an object": lambda x: x * type(Lower()).doubled,
    "one of an object": lambda x: x * Lower().doubled,
    "one that is asked by name": lambda x: x * getattr(Settings, "doubled", 1.0),
    "one that makes a tensor": lambda x: x * Settings.weight,
    "one of a module": LAYER,
    "a set": lambda x: x * len({THREE, THIRTEEN, FOUR}),
    "a set of objects made inside": lambda x: x * len({Key(3), Key(13), Key(4)}),
    "an element": lambda x: x * (2 if THIRTEEN in MEMBERS else 3),
    "an element made inside": lambda x: x * (2 if Key(33) in MEMBERS else 3),
    "a key": lambda x: x * TABLE[THIRTEEN],
    "a key with a default": lambda x: x * TABLE.get(Key(43), 9.0),
    "a dict": lambda x: x * len({THREE: 1, THIRTEEN: 2}),
    "a tuple as a key": lambda x: x * {(THREE, 1): 7.0}[THIRTEEN, 1],
    "a frozen dataclass": lambda x: x * {Point(1, THREE): 7.0}.get(Point(1, THIRTEEN), 8.0),
    "a union": lambda x: x * len({THREE} | {THIRTEEN}),
    "adding and discarding": lambda x: x * kept([THREE, FOUR]),
    "sets that are equal": lambda x: x * (2 if {THREE} == {THIRTEEN} else 3),
    "equal hashes alone": lambda x: x * len({ONE, OTHER}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_capture_reads_them_as_python_does(name: str) -> None:
    fn = PROGRAMS[name]
    torch.testing.assert_close(sf.jit(fn)(X), fn(X))
    cotangent = sf.grad(lambda x: fn(x).sum())(X)
    torch.testing.assert_close(cotangent, torch.func.grad(lambda x: fn(x).sum())(X))


CHANGES: list[tuple[Any, str, Any]] = [
    (Settings, "scale", 4.0),
    (Lower, "scale", 6.0),
    (Settings, "doubled", 11.0),
    (THIRTEEN, "number", 23),
    (THIRTEEN, "number", 8),
]


def test_changes_of_them_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [
        lambda x: x * Settings.doubled,
        lambda x: x * Lower.doubled,
        lambda x: x * TABLE.get(THIRTEEN, 9.0),
    ]
    captured = [sf.jit(fn) for fn in programs]
    for change in (None, *CHANGES):
        if change is not None:
            monkeypatch.setattr(*change)
        for fn, call in zip(programs, captured, strict=True):
            torch.testing.assert_close(call(X), fn(X))


class Meta(type):
    scale = 2.0

    def __iter__(cls) -> Any:
        return iter([cls.scale, 1.0])

    def __instancecheck__(cls, _: object) -> bool:
        return Meta.scale > 2.0


def closing() -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Functions that close over a class with a metaclass."""

    class Made(metaclass=Meta):
        pass

    each: Any = Made
    return [
        lambda x: x * Made.scale,
        lambda x: x * sum(each),
        lambda x: x * (3.0 if isinstance(THREE, Made) else 4.0),
    ]


def test_attributes_of_the_metaclass_of_a_closed_over_class_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = closing()
    captured = [sf.jit(fn) for fn in programs]
    for scale in (2.0, 3.0, 5.0):
        monkeypatch.setattr(Meta, "scale", scale)
        for fn, call in zip(programs, captured, strict=True):
            torch.testing.assert_close(call(X), fn(X))
