"""An error of a program that runs: torch's own, with the function, the op and the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from worlds import simulated

import shardfn as sf
from shardfn import P

W, I, WRONG = torch.ones(5, 3), torch.tensor([1, 2]), torch.tensor([1, 7])


def look_up(w: Any, i: Any) -> Any:
    h = F.embedding(i, w)
    return (h * 2).sum()


LINE = look_up.__code__.co_firstlineno + 1
NOTE = "shardfn: raised while {} ran, by aten.embedding.default at " + f"{__file__}:{LINE}; "
CALLS: dict[str, Callable[[], Any]] = {
    "jit(look_up)": lambda: sf.jit(look_up, backend="aten"),
    "jit(value_and_grad(look_up))": lambda: sf.jit(sf.value_and_grad(look_up)),
    "linearize": lambda: lambda w, i: sf.linearize(lambda x: look_up(x, i), w)[0],
}


def error_of(call: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as info:
        call(*args)
    return info.value


def check(error: Exception, name: str) -> None:
    assert type(error) is IndexError
    assert str(error) == "index out of range in self"
    (note,) = error.__notes__
    assert note.startswith(NOTE.format(name))
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    assert not any("/shardfn/" in file or "/torch/" in file for file in files), files
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("name", CALLS)
def test_the_first_and_each_later_call_name_the_op_and_its_line(name: str) -> None:
    fn = CALLS[name]()
    check(error_of(fn, W, WRONG), name)
    fn(W, I)
    check(error_of(fn, W, WRONG), name)


def test_compiled_code_names_them_too() -> None:
    fn = sf.jit(look_up, backend="inductor")
    fn(W, I)
    check(error_of(fn, W, WRONG), "jit(look_up)")
    check(error_of(fn.compile(W, I), W, WRONG), "jit(look_up)")


def test_compiled_code_that_cannot_run_again_names_the_function() -> None:
    def f(w: Any, i: Any) -> Any:
        sf.debug.callback(lambda x: None, i)
        return look_up(w, i)

    error = error_of(sf.jit(f, backend="inductor"), W, WRONG)
    (note,) = error.__notes__
    assert note.startswith("shardfn: raised while jit(f) ran; ")


@pytest.mark.parametrize("spec", [P("dp"), P(None, "tp"), P()])
def test_so_do_simulated_ranks(spec: P) -> None:
    with simulated(dp=2, tp=2) as mesh:
        check(error_of(sf.shard(look_up, mesh, (spec, P())), W, WRONG), "shard(look_up)")


def test_the_body_of_a_loop_has_lines() -> None:
    def f(w: Any, i: Any) -> Any:
        return sf.scan(lambda c, k: (c + look_up(w, k), None), torch.zeros(()), i)[0]

    for fn in (sf.jit(f, backend="aten"), sf.jit(f)):
        error = error_of(fn, W, WRONG)
        assert "raised while jit(f) ran, by " in error.__notes__[0]
        assert __file__ in error.__notes__[0]
    with simulated(dp=2) as mesh:
        check(error_of(sf.shard(f, mesh, (P("dp"), P())), W, WRONG), "shard(f)")


def test_an_error_of_an_op_of_the_users_keeps_its_frames() -> None:
    @torch.library.custom_op("failed_runs::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise KeyError("mine")
        return x.clone()

    odd.register_fake(torch.empty_like)
    fn = sf.jit(lambda x: odd(x) + 1, backend="aten")
    fn(W)
    error = error_of(fn, -W)
    assert type(error) is KeyError
    assert error.args == ("mine",)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "odd"
    assert "by failed_runs.odd.default at " in error.__notes__[0]
