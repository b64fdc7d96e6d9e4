"""A name that was absent when a function was captured, and is added later, is read from then on:
no call runs the program of before.
"""

from __future__ import annotations

import builtins
import collections
import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.tensor([2.0, 3.0], dtype=torch.float64)
Change = Callable[[], Any]
Program = tuple[Callable[[torch.Tensor], torch.Tensor], list[Change]]


class Holder:
    """An object of a class of the user's."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


class Meta(type):
    k = 2.0


class Made(metaclass=Meta):
    pass


def caught(error: type[Exception], read: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    """A function that takes 1 where a value is missing."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * read()
        except error:
            return x

    return fn


def programs() -> dict[str, Program]:
    """Functions, and changes of what they read."""

    class Base:
        k = 1.0

    class Middle(Base):
        pass

    class Lower(Middle):
        pass

    class Open:
        def __getattr__(self, name: str) -> float:
            return 1.0

    class Called:
        pass

    lower, opened, called, holder = Lower(), Open(), Called(), Holder()
    plain = types.SimpleNamespace()
    items: dict[str, float] = {}
    below = {"k": 1.0}
    chain = collections.ChainMap({}, below)
    view = types.MappingProxyType(below)
    objects = {Holder(k=2.0)}
    (member,) = objects
    frozen = frozenset([Holder(k=2.0)])
    (inner,) = frozen
    target = Holder(k=2.0)
    reference: Any = weakref.ref(target)
    table = torch.arange(6.0).reshape(2, 3)

    def largest(x: torch.Tensor) -> torch.Tensor:
        return x * max(1.0, 2.0)

    # a function with globals of its own
    scope = {**globals(), "__name__": "a_module_of_its_own"}
    largest = types.FunctionType(largest.__code__, scope)

    def product(x: torch.Tensor) -> torch.Tensor:
        for value in view.values():
            x = x * value
        return x

    def of_members(x: torch.Tensor) -> torch.Tensor:
        for each in objects:
            x = x * each.k
        return x

    def of_frozen(x: torch.Tensor) -> torch.Tensor:
        for each in frozen:
            x = x * each.k
        return x

    def named() -> None:
        pass

    return {
        "a class before the base": (
            lambda x: x * lower.k,
            [lambda: setattr(Lower, "k", 3.0), lambda: setattr(lower, "k", 5.0)],
        ),
        "a class in the middle": (lambda x: x * lower.k, [lambda: setattr(Middle, "k", 4.0)]),
        "a metaclass": (
            lambda x: x * Made.k,
            [lambda: setattr(Meta, "k", 5.0), lambda: setattr(Made, "k", 6.0)],
        ),
        "__getattr__": (
            lambda x: x * opened.k,
            [lambda: setattr(opened, "k", 2.0), lambda: setattr(Open, "j", 1.0)],
        ),
        "__getattr__, in the class": (lambda x: x * opened.k, [lambda: setattr(Open, "k", 4.0)]),
        "a missing item": (
            caught(KeyError, lambda: items["r"]),
            [lambda: items.update(r=2.0), items.clear],
        ),
        "a missing attribute": (
            caught(AttributeError, lambda: plain.zz),
            [lambda: setattr(plain, "zz", 2.0)],
        ),
        "a missing attribute of an object": (
            caught(AttributeError, lambda: holder.zz),
            [lambda: setattr(holder, "zz", 2.0), lambda: delattr(holder, "zz")],
        ),
        "an attribute by vars": (
            lambda x: x * vars(holder).get("m", 1.0),
            [lambda: setattr(holder, "m", 2.0)],
        ),
        "names by __dict__": (
            lambda x: x * (1 + len(holder.__dict__)),
            [lambda: setattr(holder, "n", 2.0)],
        ),
        "an attribute of a function": (
            lambda x: x * getattr(named, "scale", 1.0),
            [lambda: setattr(named, "scale", 2.0)],
        ),
        "callable": (
            lambda x: x * 2 if callable(called) else x,
            [lambda: setattr(Called, "__call__", lambda self: None)],
        ),
        "the first map of a chain": (lambda x: x * chain["k"], [lambda: chain.update(k=3.0)]),
        "a view of a dict": (product, [lambda: below.update(k=2.0), lambda: below.update(j=5.0)]),
        "a builtin": (largest, [lambda: scope.update(max=min), lambda: scope.pop("max")]),
        "an object in a set": (of_members, [lambda: setattr(member, "k", 3.0)]),
        "an object in a frozenset": (of_frozen, [lambda: setattr(inner, "k", 3.0)]),
        "a weak reference": (lambda x: x * reference().k, [lambda: setattr(target, "k", 7.0)]),
        "strides": (
            lambda x: x * (2 if table.is_contiguous() else 1),
            [lambda: setattr(table, "data", torch.ones(3, 2).t())],
        ),
    }


@pytest.mark.parametrize("name", list(programs()))
def test_what_is_added_is_read(name: str) -> None:
    fn, changes = programs()[name]
    call = sf.jit(fn, backend="aten")
    with sf.fake_world(2):
        sharded = sf.shard(fn, sf.make_mesh((2,), ("dp",)), backend="aten")
        for change in (lambda: None, *changes):
            change()
            expected = fn(X)
            torch.testing.assert_close(call(X), expected)
            torch.testing.assert_close(sf.full(sharded(X)), expected)


def test_names_that_nothing_asks_for_are_no_retrace() -> None:
    holder, items = Holder(k=2.0), {"k": 3.0}
    call = sf.jit(lambda x: x * holder.k * items["k"] * max(1.0, 2.0), backend="aten")
    call(X)
    holder.other, items["other"] = 1.0, 1.0
    assert "already exists: no retrace" in call.explain_retrace(X)


def test_an_equal_object_in_place_of_another_is_no_retrace() -> None:
    class Base:
        k = 2.0

    class Derived(Base):
        pass

    box = [Derived()]
    call = sf.jit(lambda x: x * box[0].k, backend="aten")
    call(X)
    box[0] = copy.copy(box[0])
    assert "already exists: no retrace" in call.explain_retrace(X)


def test_the_retrace_names_what_has_other_names() -> None:
    holder = Holder()
    call = sf.jit(lambda x: x * getattr(holder, "scale", 1.0), backend="aten")
    call(X)
    holder.scale = 2.0
    assert "closed-over holder: " in call.explain_retrace(X)
    assert not hasattr(builtins, "scale")


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_another_memory_layout_of_a_module(backend: str) -> None:
    net = torch.nn.Conv2d(3, 4, 3).double().eval()
    image = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    call = sf.jit(lambda x: net(x), backend=backend)
    call(image)
    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(call(image), net(image))


def test_a_list_with_items_of_its_own() -> None:
    class Scaled(list[float]):
        def __getitem__(self, i: Any) -> Any:
            return super().__getitem__(i) * 2.0

    values = Scaled([3.0])
    torch.testing.assert_close(sf.jit(lambda x: x * values[0], backend="aten")(X), 6 * X)
