"""A call runs the code of its function, and of what that calls, as it is now."""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import shardfn as sf

X = torch.arange(3.0, dtype=torch.float64)


def programs() -> dict[str, tuple[Callable[[Any], Any], Callable[[], None]]]:
    """Functions, and what replaces code of them."""

    def callee(x: Any, k: float = 2.0, *, j: float = 1.0) -> Any:
        return x * k + j

    class Part(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Any) -> Any:
            return self.part(x) * 2

    class Base:
        def go(self, x: Any) -> Any:
            return x * 2

    class Derived(Base):
        pass

    class Other(Part):
        def forward(self, x: Any) -> Any:
            return x - 3

    class Named:
        @classmethod
        def go(cls, x: Any) -> Any:
            return x * 2

        @staticmethod
        def at(x: Any) -> Any:
            return x * 2

        @property
        def size(self) -> float:
            return 2.0

    class Read:
        def __get__(self, instance: Any, owner: Any = None) -> float:
            return 2.0

    class Meta(type):
        def of(cls, x: Any) -> Any:
            return x * 2

    class Made(metaclass=Meta):
        size = Read()

    class Sized:
        k = 5.0

    class Derived2(Base):
        pass

    class Base2(Base):
        def go(self, x: Any) -> Any:
            return x * 4

    relu, named_, made, sized = torch.nn.ReLU(), Named(), Made(), Made()
    moved, tanh = Derived2(), torch.nn.Sequential(torch.nn.Tanh())
    net, derived = Net(), Derived()
    code = (lambda x, k=2.0, *, j=1.0: x * 9).__code__

    def other(self: Any, x: Any) -> Any:
        return x * 7

    return {
        "code": (lambda x: callee(x), lambda: setattr(callee, "__code__", code)),
        "its own code": (callee, lambda: setattr(callee, "__code__", code)),
        "defaults": (lambda x: callee(x), lambda: setattr(callee, "__defaults__", (5.0,))),
        "keyword": (lambda x: callee(x), lambda: setattr(callee, "__kwdefaults__", {"j": 5.0})),
        "a forward": (net, lambda: setattr(Net, "forward", other)),
        "a part's forward": (lambda x: net(x), lambda: setattr(Part, "forward", other)),
        "a method": (lambda x: derived.go(x), lambda: setattr(Base, "go", other)),
        "a nearer method": (lambda x: derived.go(x), lambda: setattr(Derived, "go", other)),
        "a classmethod": (
            lambda x: named_.go(x),
            lambda: setattr(Named, "go", classmethod(lambda cls, x: x * 9)),
        ),
        "a staticmethod": (
            lambda x: named_.at(x),
            lambda: setattr(Named, "at", staticmethod(lambda x: x * 9)),
        ),
        "a property": (
            lambda x: x * named_.size,
            lambda: setattr(Named, "size", property(lambda self: 9.0)),
        ),
        "a property's code": (
            lambda x: x * named_.size,
            lambda: setattr(Named.size.fget, "__code__", (lambda self: 9.0).__code__),
        ),
        "a descriptor": (
            lambda x: x * made.size,
            lambda: setattr(Read, "__get__", lambda self, instance, owner=None: 9.0),
        ),
        "a metaclass": (lambda x: Made.of(x), lambda: setattr(Meta, "of", lambda cls, x: x * 9)),
        # as autoreload does, for each object of a class that was loaded again
        "the class of a part": (net, lambda: setattr(net.part, "__class__", Other)),
        "the class of torch's part": (tanh, lambda: setattr(tanh[0], "__class__", Other)),
        "the class of an object": (
            lambda x: x * sized.size,
            lambda: setattr(sized, "__class__", type("Sized", (Sized,), {"size": 7.0})),
        ),
        "the class of the function": (relu, lambda: setattr(relu, "__class__", Other)),
        "bases": (lambda x: moved.go(x), lambda: setattr(Derived2, "__bases__", (Base2,))),
        "of an object made inside": (lambda x: Base().go(x), lambda: setattr(Base, "go", other)),
    }


@pytest.mark.parametrize("name", list(programs()))
def test_a_call_runs_code_that_was_replaced(name: str) -> None:
    fn, replace = programs()[name]
    call = sf.jit(fn, backend="aten")
    before = call(X)
    call(X)
    replace()
    assert_close(call(X), fn(X))
    assert not torch.equal(call(X), before)


SETTINGS = """
import torch
import shardfn as sf

class Part(torch.nn.Module):
    def forward(self, x):
        return x * w

w = torch.full((3,), {value}, dtype=torch.float64)
part = Part()

def f(x):
    return (part(x) * w).sum() * {value}

def imports(x):
    import settings
    return (settings.part(x) * settings.w).sum()

def compute(x):
    return [g(x) for h in (f, imports) for g in (h, sf.jit(h, backend="aten"), sf.grad(h))]
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Any]]:
    """Write a module of a value and import it under one name, in place of the last."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported(value: float) -> types.ModuleType:
        (tmp_path / "settings.py").write_text(SETTINGS.format(value=value))
        sys.modules.pop("settings", None)
        importlib.invalidate_caches()
        return importlib.import_module("settings")

    yield imported
    sys.modules.pop("settings", None)


def agrees(module: Any) -> bool:
    plain, compiled, gradient, _, compiled_importing, _ = module.compute(X)
    x = X.clone().requires_grad_()
    wanted = torch.autograd.grad(module.f(x), x)[0]
    is_right = torch.equal(plain, compiled) and torch.equal(gradient, wanted)
    return is_right and torch.equal(compiled_importing, sys.modules["settings"].imports(X))


def test_a_module_that_is_imported_again_is_the_new_one(load: Callable[[float], Any]) -> None:
    first = load(2.0)
    assert agrees(first)
    second = load(3.0)
    assert agrees(second)
    assert first.w is not second.w
    for module in (first, second, first):  # the first is in sys.modules no longer
        assert torch.equal(sf.jit(module.f, backend="aten")(X), module.f(X))


def test_scripts_that_run_one_after_the_other_have_globals_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    source = SETTINGS.replace("import settings\n", "").format(value="value")
    script.write_text(source.replace("settings.", "") + "\nresults = compute(x)\n")
    for value in (2.0, 3.0, 2.0):
        given = {"value": value, "x": X}
        found = runpy.run_path(str(script), given, run_name="__main__")["results"]
        assert torch.equal(found[0], found[1]) and torch.equal(found[3], found[4])
        assert torch.equal(found[2], torch.full_like(X, value**3))
        assert torch.equal(found[5], torch.full_like(X, value**2))


def test_a_class_without_a_module_is_read() -> None:
    scope: dict[str, Any] = {"__name__": None}
    exec(  # as a configuration file is run
        "class Scale:\n    def of(self, x):\n        return x * 3\nscale = Scale()\n"
        "def f(x):\n    return scale.of(x)",
        scope,
    )
    assert_close(sf.jit(scope["f"], backend="aten")(X), X * 3)
