"""isinstance of a Protocol, or of a class whose metaclass decides, is that of Python in a captured
function, also of objects that the function makes or changes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat, SupportsIndex, runtime_checkable

import pytest
import torch

import shardfn as sf

X = torch.tensor([2.0, 3.0], dtype=torch.float64)


@runtime_checkable
class HasName(Protocol):
    name: str


@runtime_checkable
class HasScale(Protocol):
    scale: float


@runtime_checkable
class Runs(Protocol):
    def run(self) -> int: ...


@runtime_checkable
class NamedRuns(HasName, Runs, Protocol):
    pass


@runtime_checkable
class HasShape(Protocol):
    shape: Any


@runtime_checkable
class HasInner(Protocol):
    inner: torch.nn.Module


class NotRuntime(Protocol):
    name: str


class Named:
    def __init__(self) -> None:
        self.name = "a"


class NamedRunner(Named):
    def run(self) -> int:
        return 1


class NotARunner(NamedRunner):
    run: Any = None


class RunnerByAttribute:
    def __init__(self) -> None:
        self.run = lambda: 1


class Lost(Named):
    def __init__(self) -> None:
        super().__init__()
        del self.name


class ByProperty:
    @property
    def name(self) -> str:
        return "x"


class ByName:
    def __getattr__(self, name: str) -> int:
        if name != "name":
            raise AttributeError(name)
        return 1


class Slots:
    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name = 1


class Declared(HasName):
    pass


class Registered:
    pass


HasName.register(Registered)


@dataclasses.dataclass
class Data:
    name: str = "a"


@dataclasses.dataclass
class Other:
    scale: float = 2.0


class Own(list[int]):
    def __init__(self) -> None:
        super().__init__()
        self.name = "a"


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)


class Meta(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return getattr(x, "flag", 0) == 1


class Flagged(metaclass=Meta):
    pass


class Flag:
    def __init__(self, flag: int) -> None:
        self.flag = flag


class Super(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return super().__instancecheck__(x) or getattr(x, "flag", 0) == 1


class FlaggedOrOwn(metaclass=Super):
    pass


LAYER = Layer()
OBJECTS: dict[str, Callable[[], Any]] = {
    **{
        cls.__name__: cls
        for cls in (
            Named,
            NamedRunner,
            NotARunner,
            RunnerByAttribute,
            Lost,
            ByProperty,
            ByName,
            Slots,
            Declared,
            Registered,
            Data,
            Other,
            Own,
        )
    },
    "Layer": lambda: LAYER,
    "a set flag": lambda: Flag(1),
    "another flag": lambda: Flag(0),
    "a list": lambda: [1],
    "a dict": lambda: {"name": 1},
    "an int": lambda: 3,
    "a text": lambda: "a",
    "None": lambda: None,
    "a class": lambda: ByProperty,
    "a function": lambda: test_tensors_have_the_members_of_protocols,
}
CLASSES: dict[str, Any] = {
    **{
        cls.__name__: cls
        for cls in (
            HasName,
            HasScale,
            Runs,
            NamedRuns,
            HasShape,
            HasInner,
            Flagged,
            SupportsFloat,
            SupportsIndex,
            collections.abc.Iterable,
        )
    },
    "a union": HasName | HasScale,
    "a tuple": (HasScale, HasName),
    "a class and a Protocol": (int, HasScale),
    "a tuple with a union": (list, (HasScale, Runs | None)),
    "a tuple with a metaclass": (int, Flagged),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_check_is_that_of_python(name: str) -> None:
    closed_over = {name: make() for name, make in OBJECTS.items()}

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, bool], dict[str, bool]]:
        of_made = {key: isinstance(make(), CLASSES[name]) for key, make in OBJECTS.items()}
        return (
            x * sum(of_made.values()),
            of_made,
            {key: isinstance(value, CLASSES[name]) for key, value in closed_over.items()},
        )

    result, *checks = sf.jit(fn, backend="aten")(X)
    expected, *of_python = fn(X)
    assert checks == of_python
    torch.testing.assert_close(result, expected)


def test_tensors_have_the_members_of_protocols() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        classes = HasShape, HasName, Runs, HasShape | Runs
        return x * 2, [isinstance(x + 1, cls) for cls in classes]

    assert sf.jit(fn, backend="aten")(X)[1] == fn(X)[1]


def test_a_check_follows_changes_of_an_object() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        data, other = Data(), Other()
        checks = [isinstance(data, HasName), isinstance(other, HasName)]
        del data.name
        other.name = "b"  # type: ignore[attr-defined]
        return x * 2, [*checks, isinstance(data, HasName), isinstance(other, HasName)]

    assert sf.jit(fn, backend="aten")(X)[1] == fn(X)[1]


def test_a_check_of_a_closed_over_object_is_read_again() -> None:
    value = Other()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (3.0 if isinstance(value, HasName) else 5.0)

    call = sf.jit(fn, backend="aten")
    torch.testing.assert_close(call(X), X * 5)
    vars(value)["name"] = "a"
    torch.testing.assert_close(call(X), X * 3)
    del vars(value)["name"]
    torch.testing.assert_close(call(X), X * 5)


@pytest.mark.parametrize("value", [[1], 3, Named()])
def test_a_protocol_that_is_not_of_the_runtime_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match="@runtime_checkable"):
        sf.jit(lambda x: x * isinstance(value, NotRuntime), backend="aten")(X)  # type: ignore[misc]


def test_a_metaclass_that_asks_its_base_is_refused_for_an_object_made_inside() -> None:
    with pytest.raises(sf.CaptureError, match="__instancecheck__"):
        sf.jit(lambda x: x * isinstance(Flag(1), FlaggedOrOwn), backend="aten")(X)
