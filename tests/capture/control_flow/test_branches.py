"""The op of cond and of its derivatives, over bodies made without Dynamo, against Python's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.capture.control_flow.branches import branched
from shardfn.ops.loops import Branch
from tests.support.stages.bodies import body, loops, lowered

X = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)
W = torch.tensor(0.9, dtype=torch.float64)
N = torch.tensor(2)
YES, NO = torch.tensor(True), torch.tensor(False)


def yes(x: Any, n: Any) -> Any:
    return [x.sin() * x, n + 1]


def no(x: Any, n: Any, w: Any) -> Any:
    return [x * w, n * w.long()]


def choose(truth: Any, x: Any, w: Any) -> Any:
    return branched(truth, body(yes, 0, 2, [x, N]), body(no, 0, 2, [x, N, w]))


def plain(truth: Any, x: Any, w: Any) -> Any:
    return yes(x, N) if bool(truth) else no(x, N, w)


@pytest.mark.parametrize("truth", [YES, NO], ids=["yes", "no"])
def test_a_branch_has_the_closed_over_values_of_both_bodies(truth: Any) -> None:
    module = lowered(choose, truth, X, W)
    torch.testing.assert_close(module(truth, X, W), plain(truth, X, W))
    (branch,) = loops(module.graph, Branch)
    sizes = [len(g.find_nodes(op="placeholder")) for g in branch.graphs]
    assert sizes == [branch.consts] * 2


A = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
B = torch.tensor([70.0, 50.0, 30.0], dtype=torch.float64)


def test_each_body_has_constants_of_its_own() -> None:
    one, two = (body(lambda x: [x * A], 0, 1, [X]), body(lambda x: [x - B + A], 0, 1, [X]))
    for truth, wanted in ((YES, X * A), (NO, X - B + A)):
        module = lowered(lambda t: branched(t, one, two), truth)
        torch.testing.assert_close(module(truth), [wanted])


def of_list(fn: Any) -> Any:
    return lambda x, w: list(fn(x, w))


@pytest.mark.parametrize("truth", [YES, NO], ids=["yes", "no"])
def test_derivatives_of_a_branch_are_branches(truth: Any) -> None:
    def grads(fn: Any) -> Any:
        loss = lambda x, w: fn(truth, x, w)[0].square().sum()
        return torch.func.grad(loss, argnums=(0, 1))

    def push(fn: Any) -> Any:
        run = lambda x, w: fn(truth, x, w)[0]
        return lambda x, w: torch.func.jvp(run, (x, w), (x.cos(), w + 1))

    for derivative in (grads, push):
        module = lowered(of_list(derivative(choose)), X, W)
        torch.testing.assert_close(module(X, W), list(derivative(plain)(X, W)))
        assert len(loops(module.graph, Branch)) == 2


def test_samples_choose_for_themselves() -> None:
    truths = torch.tensor([True, False, True])
    rows = torch.stack([X, X + 1, X * 2], 1)  # (3, samples)
    run = lambda t, x: tuple(choose(t, x, W))
    batched = torch.func.vmap(run, (0, 1))
    module = lowered(lambda t, x: list(batched(t, x)), truths, rows)
    values, counts = module(truths, rows)
    for k in range(3):
        one, n = plain(truths[k], rows[:, k], W)
        torch.testing.assert_close(values[k], one)
        assert int(counts[k]) == int(n)
    assert not loops(module.graph, Branch), "both bodies run, and where chooses"


def test_samples_of_one_condition_share_the_branch() -> None:
    rows = torch.stack([X, X + 1])
    batched = torch.func.vmap(lambda x: tuple(choose(NO, x, W)))
    module = lowered(lambda x: list(batched(x)), rows)
    torch.testing.assert_close(module(rows)[0], rows * W)
    assert len(loops(module.graph, Branch)) == 1
