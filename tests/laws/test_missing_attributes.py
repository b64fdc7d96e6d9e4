"""An attribute that an object does not have raises AttributeError in a captured function, for the
`except` of the function, as in Python. An attribute that the object has is read.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed import _functional_collectives as functional

import shardfn as sf

X = torch.tensor([2.0, 3.0], dtype=torch.float64)


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: int


class Slots:
    __slots__ = ("first", "missing")

    def __init__(self) -> None:
        self.first = 1


class ByName:
    def __getattr__(self, name: str) -> int:
        if name == "missing":
            raise AttributeError(name)
        return 5


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)


class Own(list[int]):
    pass


def tagged(x: Any) -> Any:
    return x


vars(tagged)["missing_too"] = 1
CLOSED_OVER: dict[str, Any] = {
    "a list": [1],
    "a tuple": (1,),
    "a dict": {"a": 1},
    "a set": {1},
    "a frozen set": frozenset([1]),
    "a range": range(2),
    "a deque": collections.deque([1]),
    "a view of a dict": types.MappingProxyType({"a": 1}),
    "a size": torch.Size([2]),
    "an object": object(),
    "an int": 3,
    "a text": "q",
    "None": None,
    "an exception": ValueError("x"),
    "a dtype": torch.float32,
    "an enum": Color.RED,
    "a named tuple": Pair(1),
    "slots": Slots(),
    "a __getattr__": ByName(),
    "a subclass of list": Own([1]),
    "a function": tagged,
    "a partial": functools.partial(tagged),
    "a module": Layer(),
    "a tensor": torch.ones(2),
    "an array": np.ones(2),
    "a scalar of NumPy": np.float32(1.0),
    "len": len,
    "sum": sum,
    "a method": [].append,
    **{f"the type {cls.__name__}": cls for cls in (int, str, list, dict, tuple, set, range, type)},
    "the type of an exception": ValueError,
    "the type of a module": Layer,
}
MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda x: [x],
    "a dict": lambda x: {"a": x},
    "a set": lambda _: {1},
    "an iterator": lambda _: iter([1]),
    "a zip": lambda _: zip([1], [2], strict=True),
    "a map": lambda _: map(tagged, [1]),
    "a generator": lambda _: (n for n in [1]),
    "keys": lambda x: {"a": x}.keys(),
    "a count": lambda _: itertools.count(),
    "a shape": lambda x: x.shape,
    "a size": lambda x: x.shape[0],
    "an exception": lambda _: KeyError("q"),
    "a result": lambda x: x + 1,
    "an argument": lambda x: x,
    "a method": lambda x: x.sum,
    "a type": lambda _: type([1]),
    "a named tuple": lambda _: Pair(1),
    "slots": lambda _: Slots(),
}


def loaded(x: Any) -> float:
    try:
        x.missing  # noqa: B018
    except AttributeError:
        return 5.0
    return 7.0


def asked(x: Any) -> float:
    try:
        getattr(x, "missing")  # noqa: B009
    except AttributeError:
        return 5.0
    return 7.0


def called(x: Any) -> float:
    try:
        return x.missing(1)
    except AttributeError:
        return 5.0


def got(x: Any) -> float:
    try:
        operator.attrgetter("missing")(x)
    except AttributeError:
        return 5.0
    return 7.0


@pytest.mark.parametrize("read", [loaded, asked, called, got])
def test_an_attribute_that_an_object_lacks_raises(read: Callable[[Any], float]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        of_closed_over = {name: read(value) for name, value in CLOSED_OVER.items()}
        return x * 2, {
            **of_closed_over,
            **{f"{name}, made": read(f(x)) for name, f in MADE.items()},
        }

    want = fn(X)[1]
    assert {*want.values()} == {5.0}
    assert sf.jit(fn, backend="aten")(X)[1] == want


@pytest.mark.parametrize("value", [[1], {"a": 1}, len, int])
def test_the_text_of_the_error_is_that_of_python(value: Any) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        try:
            return x * value.missing(1), ""
        except AttributeError as error:
            return x * 2, str(error)

    assert sf.jit(fn, backend="aten")(X)[1] == fn(X)[1]


def test_values_and_derivatives_are_those_of_the_path_that_python_takes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x) * loaded([x]) * asked(int) * called(x.shape)).sum()

    torch.testing.assert_close(sf.jit(fn)(X), fn(X))
    torch.testing.assert_close(sf.grad(fn)(X), torch.func.grad(fn)(X))


def test_attributes_that_objects_have_are_read() -> None:
    items, counts = [1, 2], {"a": 1}

    def fn(x: torch.Tensor) -> Any:
        made = [3]
        add, get = made.append, getattr(counts, "get")  # noqa: B009
        add(4)
        values = [getattr(items, "index")(2), get("a"), Color.RED.value]  # noqa: B009
        names = [ByName().other, Slots().first, Pair(3).first, vars(tagged)["missing_too"]]
        return x * 2, made, values, names, float.fromhex("0x1p1"), x.shape.numel()

    assert sf.jit(fn, backend="aten")(X)[1:] == fn(X)[1:]


def test_a_collective_by_hand_is_awaited() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        reduced = lambda x: functional.all_reduce(x, "sum", mesh).wait() + 1
        lowered = sf.jit(reduced, backend="aten").lower(X)
        assert [c.kind for c in lowered.collectives] == ["all_reduce"]


def test_hasattr_and_defaults_are_those_of_python() -> None:
    values = [[1], (1,), {"a": 1}, len, int, Color.RED, Slots(), tagged, torch.Size([1])]

    def fn(x: torch.Tensor) -> Any:
        absent = [getattr(value, "missing", 3) for value in values]
        names = [hasattr(x, name) for name in ("missing", "shape", "sum")]
        return x * 2, absent, [hasattr(value, "append") for value in values], names

    assert sf.jit(fn, backend="aten")(X)[1:] == fn(X)[1:]


@pytest.mark.parametrize("value", [[1], {"a": 1}, len, int])
def test_an_error_that_nobody_catches_is_that_of_python(value: Any) -> None:
    with pytest.raises(AttributeError) as expected:
        value.missing(1)
    with pytest.raises(AttributeError) as raised:
        sf.jit(lambda x: x * value.missing(1), backend="aten")(X)
    assert str(raised.value) == str(expected.value)
