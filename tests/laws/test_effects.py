"""Every change of what lives outside of a function is done or refused, whatever object does it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import shardfn as sf

X = torch.arange(5.0, dtype=torch.float64)
Body = Callable[[torch.Tensor], torch.Tensor]


def programs(log: list[Any]) -> dict[str, Body]:
    """Functions that change a list through an object or a call that Python makes by itself."""

    class Tape:
        def __init__(self) -> None:
            self.items = log

        def __enter__(self) -> Tape:
            log.append("entered")
            return self

        def __exit__(self, *_: object) -> None:
            self.items.append("left")

        def push(self, item: object) -> None:
            self.items.append(item)

        def by_default(self, items: list[Any] = log) -> None:
            items.append(1)

        def by_keyword(self, *, items: list[Any] = log) -> None:
            items.append(1)

        def by_bound_method(self, push: Callable[[object], None] = log.append) -> None:
            push(1)

        @property
        def size(self) -> int:
            log.append(1)
            return 2

        def __setattr__(self, name: str, value: object) -> None:
            if name == "late":
                log.append(1)
            object.__setattr__(self, name, value)

        def __str__(self) -> str:
            log.append(1)
            return "tape"

        def __hash__(self) -> int:
            log.append(1)
            return 1

        def __mul__(self, n: int) -> int:
            log.append(1)
            return n

        def __iter__(self) -> Iterator[int]:
            log.append(1)
            return iter([2])

    class Open:
        def __getattr__(self, name: str) -> int:
            log.append(name)
            return 2

    class Items(list[Any]):
        def append(self, item: object) -> None:
            log.append(item)

    class Table(dict[Any, Any]):
        def __missing__(self, key: object) -> int:
            log.append(key)
            return 2

    @dataclasses.dataclass
    class Record:
        items: list[Any] = dataclasses.field(default_factory=lambda: log)

        def __post_init__(self) -> None:
            self.items.append(1)

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log.append(1)
            return x * 2

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            log.append(1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 2

    class Meta(type):
        def __call__(cls, *args: Any) -> Any:
            log.append(1)
            return super().__call__(*args)

    class Made(metaclass=Meta):
        pass

    class Deleted:
        def __del__(self) -> None:
            log.append(1)

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        log.append(1)
        yield

    def within(context: Callable[[], Any]) -> Body:
        def body(x: torch.Tensor) -> torch.Tensor:
            with context():
                return x * 2

        return body

    def after(act: Callable[[], Any]) -> Body:
        def body(x: torch.Tensor) -> torch.Tensor:
            act()
            return x * 2

        return body

    def inside(x: torch.Tensor) -> torch.Tensor:
        with Tape():
            return torch.func.grad(lambda y: (Tape() * 2 * y).sum())(x)

    return {
        "with": within(Tape),
        "a decorated generator": within(entered),
        "a method": after(lambda: Tape().push(1)),
        "a method with a tensor": lambda x: (Tape().push(x.sum()), x * 2)[1],
        "itself": after(lambda: (tape := Tape()).push(tape)),
        "a default": after(lambda: Tape().by_default()),
        "a keyword's default": after(lambda: Tape().by_keyword()),
        "a bound method": after(lambda: Tape().by_bound_method()),
        "a property": lambda x: x * Tape().size,
        "__setattr__": after(lambda: setattr(Tape(), "late", 1)),
        "__getattr__": lambda x: x * Open().unknown,
        "__str__": after(lambda: str(Tape())),
        "__hash__": after(lambda: {Tape(): 1}),
        "__mul__": lambda x: x * (Tape() * 2),
        "__iter__": lambda x: x * sum(Tape()),
        "a list of its own class": after(lambda: Items().append(1)),
        "a dict of its own class": lambda x: x * Table()["key"],
        "__post_init__": after(Record),
        "a module": lambda x: Net()(x),
        "a module, called with parameters": lambda x: torch.func.functional_call(Net(), {}, (x,)),
        "an autograd.Function": lambda x: Double.apply(x),
        "a metaclass": after(Made),
        "__del__": after(Deleted),
        "a derivative": inside,
    }


@pytest.mark.parametrize("name", list(programs([])))
def test_what_an_object_made_inside_changes_outside_is_done_or_refused(name: str) -> None:
    plain: list[Any] = []
    programs(plain)[name](X)
    assert plain
    log: list[Any] = []
    body = programs(log)[name]
    with pytest.raises(sf.CaptureError) as error:
        sf.jit(body, backend="aten")(X)
    reasons = ("changes an object outside", "is not read", "has a __del__, or a metaclass")
    assert any(reason in str(error.value) for reason in reasons)
    log.clear()  # Dynamo makes such an object, and looks at it
    with sf.fake_world(2), pytest.raises(sf.CaptureError):
        sf.shard(lambda x: sf.grad(lambda y: body(y).sum())(x), sf.make_mesh((2,), ("a",)))(X)
    assert not log or name in ("__del__", "__getattr__", "a metaclass")


def test_an_object_made_inside_may_change_what_is_made_inside() -> None:
    class Tape:
        def __init__(self) -> None:
            self.items: list[torch.Tensor] = []

        def __enter__(self) -> Tape:
            return self

        def __exit__(self, *_: object) -> None:
            self.items.append(self.items[0] * 3)

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        with Tape() as tape:
            tape.items.append(x * 2)
        return tape.items

    assert_close(sf.jit(body, backend="aten")(X), body(X))


def test_what_a_method_of_an_object_made_inside_closes_over_is_looked_at_in_each_call() -> None:
    factor = 2.0

    class Scale:
        def of(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    scaled = sf.jit(lambda x: Scale().of(x), backend="aten")
    assert_close(scaled(X), X * 2)
    factor = 5.0
    assert_close(scaled(X), X * 5)


ARRAY_WRITES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "item": lambda a, _: a.__setitem__(1, 5.0),
    "in place": lambda a, _: a.__iadd__(1),
    "method": lambda a, _: a.fill(3),
    "sort": lambda a, _: a.sort(),
    "out": lambda a, _: np.add(a, 1, out=a),
    "view": lambda a, _: a[1:].__imul__(2),
    "resize": lambda a, _: a.resize(4, refcheck=False),
    "of a tensor": lambda a, x: a.__setitem__(slice(3), x.detach()[:3].numpy()),
    "by torch": lambda a, _: torch.from_numpy(a).add_(1),
}


@pytest.mark.parametrize("write", ARRAY_WRITES)
def test_a_write_to_a_closed_over_array_is_refused(write: str) -> None:
    array = np.array([3.0, 1.0, 2.0])
    held = {"array": array}

    def body(x: torch.Tensor) -> torch.Tensor:
        ARRAY_WRITES[write](held["array"], x)
        return x * 2

    looped = lambda x: sf.scan(lambda c, _: (body(c), None), x, length=2)[0]
    for fn in (body, looped, sf.grad(lambda x: body(x).sum())):
        with pytest.raises(sf.CaptureError) as error:
            sf.jit(fn, backend="aten")(X)
        assert "writes to this array in place" in str(error.value)
        assert "at: " + __file__ in str(error.value)
        assert array.tolist() == [3.0, 1.0, 2.0]


def test_an_array_may_be_read_and_a_copy_may_be_written() -> None:
    array = np.array([3.0, 1.0, 2.0, 0.0, 4.0])

    def body(x: torch.Tensor) -> torch.Tensor:
        own = array.copy()
        own.sort()
        own[0] = 7
        return x * torch.from_numpy(own) + torch.from_numpy(array)

    assert_close(sf.jit(body, backend="aten")(X), body(X))


def test_a_logger_is_not_configured_inside() -> None:
    logger = logging.getLogger("tests.laws.effects")

    def body(x: torch.Tensor) -> torch.Tensor:
        logger.setLevel(35)
        return x * 2

    with pytest.raises(sf.CaptureError, match="^logging.Logger.setLevel: the function configures"):
        sf.jit(body, backend="aten")(X)
    assert logger.level == 0
