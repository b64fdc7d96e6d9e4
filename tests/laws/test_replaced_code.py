"""A call runs the code of its function, and of what that calls, as it is now."""

from __future__ import annotations

from collections.abc import Callable
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
