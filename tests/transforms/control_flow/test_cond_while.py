"""cond and while_loop called on their own, next to Python's if and while."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import shardfn as sf
from shardfn.ops.loops import Branch, While

F64 = torch.float64
X = torch.tensor([1.0, 2.0], dtype=F64)


def chosen(x: torch.Tensor) -> torch.Tensor:
    return sf.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), x)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return sf.while_loop(lambda c: c.sum() < 20, lambda c: c * 2, x)


def targets(fn, x: torch.Tensor) -> list[type]:
    nodes = sf.jit(fn, backend="aten").trace(x).program.graph.graph.nodes
    return [type(n.target) for n in nodes if isinstance(n.target, (Branch, While))]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_chooses_when_the_program_runs(sign: int) -> None:
    fn = sf.jit(chosen, backend="aten")
    wanted = X.sin() if sign > 0 else (-X).cos()
    assert_close(fn(sign * X), wanted)
    assert_close(sf.grad(lambda x: chosen(x).sum())(sign * X), X.cos() if sign > 0 else X.sin())


def test_each_is_one_op_of_the_program() -> None:
    assert targets(chosen, X) == [Branch] and targets(doubled, X) == [While]


def test_a_loop_may_run_not_at_all() -> None:
    fn = sf.jit(doubled, backend="aten")
    assert fn(X).tolist() == [8.0, 16.0] and fn(100 * X).tolist() == [100.0, 200.0]


def test_a_tangent_goes_through_a_loop() -> None:
    _, tangent = sf.jvp(doubled, (X,), (torch.ones(2, dtype=F64),))
    assert tangent.tolist() == [8.0, 8.0]


def test_numbers_and_none_are_results_of_branches() -> None:
    fn = lambda x: sf.cond(x.sum() > 0, lambda x: (x, 1, None), lambda x: (-x, 2, None), x)
    value, number, none = fn(-X)
    assert torch.equal(value, X) and int(number) == 2 and none is None
