"""A function that a transform calls with other arguments than it takes raises Python's TypeError,
as it does where the function itself calls it. The error names the transform in a note.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf

X = torch.ones(3)


def none() -> Tensor:
    return X


def two(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def with_vjp(fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    fn = sf.custom_vjp(lambda x: x * 2)
    fn.defvjp(fwd, bwd)
    return sf.grad(lambda x: fn(x).sum())


def with_jvp(rule: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    fn = sf.custom_jvp(lambda x: x * 2)
    fn.defjvp(rule)
    return sf.grad(lambda x: fn(x).sum())


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "cond": lambda x: sf.cond(x.sum() > 0, none, lambda x: x, x),
    "scan": lambda x: sf.scan(none, x, x),
    "map": lambda x: sf.map(two, x),
    "condition of a while_loop": lambda x: sf.while_loop(two, lambda c: c, x),
    "body of a while_loop": lambda x: sf.while_loop(lambda c: c.sum() < 9, two, x),
    "fwd": with_vjp(two, lambda kept, g: (g,)),
    "bwd": with_vjp(lambda x: (x, x), none),
    "rule": with_jvp(none),
    "jvp": lambda x: sf.jvp(two, (x,), (x,)),
}
INSIDE: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: sf.grad(two)(x),
    "vjp": lambda x: sf.vjp(two, x)[0],
    "linearize": lambda x: sf.linearize(two, x)[0],
    "hessian": lambda x: sf.hessian(two)(x),
    "vmap": lambda x: sf.vmap(two)(x),
    "checkpoint": lambda x: sf.checkpoint(two)(x),
    "in a body of a scan": lambda x: sf.scan(lambda c, u: (sf.map(two, c), u), x, x),
}


def check(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"^(none|two)\(\) (takes|missing) ") as info:
        call()
    files = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
    assert not any("/shardfn/" in file or "/torch/" in file for file in files), files
    (note,) = info.value.__notes__
    assert note.startswith("shardfn: raised inside ")


@pytest.mark.parametrize("name", CALLS)
def test_outside(name: str) -> None:
    check(lambda: CALLS[name](X))


@pytest.mark.parametrize("name", [*CALLS, *INSIDE])
def test_inside_a_capture(name: str) -> None:
    fn = (CALLS | INSIDE)[name]
    check(lambda: sf.jit(lambda x: fn(x), backend="aten")(X))


def test_a_function_that_shardfn_calls_wrongly_is_no_fault_of_the_users() -> None:
    """An error of binding is the user's only where the function is."""
    from shardfn.capture.reading import python_rerun

    def of_shardfn() -> Exception:
        fn = sf.make_mesh
        try:
            fn(1, 2, 3, 4, 5)  # type: ignore[call-arg]
        except TypeError as error:
            return error
        raise AssertionError

    assert not python_rerun.is_users_error(of_shardfn(), "elsewhere.py:1", is_known=False)
