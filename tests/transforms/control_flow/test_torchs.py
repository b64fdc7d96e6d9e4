"""torch's own cond, scan, while_loop and map inside captured functions: as loops in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop
from torch.utils._pytree import tree_leaves
from worlds import simulated

import shardfn as sf
from shardfn import P, random

Fn = Callable[..., Any]
X = torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3)
W = torch.linspace(0.5, 1, 3, dtype=torch.float64)


def _cond(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x * w).sin(), lambda x: x - w, (x,))


def _branch(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x * w).sin() if x.sum() > 0 else x - w


def _scan(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch_scan(lambda c, r: (c * w + r, c * r), x[0] * w, x)


def _backwards(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch_scan(lambda c, r: (c + r, c * r), x[:, 0] * w[0], x, dim=1, reverse=True)


def _last_dim(w: torch.Tensor, x: torch.Tensor) -> Any:
    def step(c: Any, r: torch.Tensor) -> Any:  # a result with more dims than its input
        return c + r, torch.outer(c, r)

    return torch_scan(step, x[:, 0] * w[0], x, dim=-1)


def _last_steps(w: torch.Tensor, x: torch.Tensor) -> Any:
    carry, found = x[:, 0] * w[0], []
    for r in x.unbind(1):
        found.append(torch.outer(carry, r))
        carry = carry + r
    return carry, torch.stack(found, 1)


def _steps(w: torch.Tensor, x: torch.Tensor) -> Any:
    carry, rows = x[0] * w, []
    for r in x:
        carry, row = carry * w + r, carry * r
        rows.append(row)
    return carry, torch.stack(rows)


def _steps_back(w: torch.Tensor, x: torch.Tensor) -> Any:
    carry, columns = x[:, 0] * w[0], []
    for r in reversed(x.unbind(1)):
        carry, column = carry + r, carry * r
        columns.insert(0, column)
    return carry, torch.stack(columns, 1)


def _map(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda r, w: r * w + r.sum(), x, w)


def _rows(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([r * w + r.sum() for r in x])


def _while(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64), x
    return torch_while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * w + 1), start)[1]


def _three_times(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x * w + 1
    return x


CASES: dict[str, tuple[Fn, Fn]] = {
    "cond": (_cond, _branch),
    "scan": (_scan, _steps),
    "scan, backwards over columns": (_backwards, _steps_back),
    "scan, over the last dim": (_last_dim, _last_steps),
    "map": (_map, _rows),
    "while_loop": (_while, _three_times),
}


def _loss(fn: Fn) -> Fn:
    return lambda w, x: sum(y.square().sum() for y in tree_leaves(fn(w, x)))


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, plain = CASES[name]
    close(sf.jit(fn, backend="aten")(W, X), plain(W, X))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    fn, plain = map(_loss, CASES[name])
    got = sf.jit(sf.grad(fn, argnums=(0, 1)), backend="aten")(W, X)
    close(got, torch.func.grad(plain, argnums=(0, 1))(W, X))


@pytest.mark.parametrize("name", CASES)
def test_batches(name: str) -> None:
    fn, plain = CASES[name]
    xs = torch.stack([X, X - 1, -X])
    got = sf.jit(sf.vmap(fn, in_axes=(None, 0)), backend="aten")(W, xs)
    each = [plain(W, x) for x in xs]
    wanted = sf.tree_map(lambda *rows: torch.stack(rows), *each)
    close(got, wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_shards(name: str, shape: tuple[int, ...]) -> None:
    fn, plain = map(_loss, CASES[name])
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, ("dp", "tp")[: len(shape)])
        step = sf.shard(sf.value_and_grad(fn), mesh, (P(), P("dp")), backend="aten")
        value, gradient = sf.full(step(W, X))
    gradients, wanted = torch.func.grad_and_value(plain)(W, X)
    close((value, gradient), (wanted, gradients))


def _noisy(x: torch.Tensor) -> torch.Tensor:
    y = torch.cond(x.sum() > 0, lambda x: torch.dropout(x, 0.5, True), torch.sin, (x,))
    return torch_map(lambda r: r * torch.rand_like(r), y)


def test_random_calls_inside_are_those_of_our_loops() -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        y = sf.cond(x.sum() > 0, lambda x: torch.dropout(x, 0.5, True), torch.sin, x)
        return sf.map(lambda r: r * torch.rand_like(r), y)

    random.state.seed(3)
    wanted = sf.jit(ours, backend="aten")(X)
    random.state.seed(3)
    assert torch.equal(sf.jit(_noisy, backend="aten")(X), wanted)
    with simulated(dp=3) as mesh:
        random.state.seed(3)
        got = sf.shard(_noisy, mesh, (P("dp"),), backend="aten")(X)
        assert torch.equal(sf.full(got), wanted)


def test_a_scan_of_nothing_returns_its_carry() -> None:
    carry, rows = sf.jit(lambda x: torch_scan(lambda c, _: (c, c), x, []), backend="aten")(X)
    assert torch.equal(carry, X) and rows == []
