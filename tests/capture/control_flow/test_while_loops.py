"""The op of while_loop and its derivatives, over bodies made without Dynamo, against Python's own
loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import close

import shardfn as sf
from shardfn import P, random
from shardfn.capture.control_flow.while_loops import CHUNKS
from tests.support.ranks import run_ranks

F64 = torch.float64
X = torch.tensor([0.3, 0.7, 1.1], dtype=F64)


# whole programs: a state that grows until it is large, and the number of its steps


def grown(w: Any, x: Any, limit: Any) -> Any:
    def step(c: Any) -> Any:
        y, n = c
        return (y * w).sin() + y * 1.2 + y.sum() / 100, n + 1

    go_on = lambda c: c[0].sum() < limit
    y, n = sf.while_loop(go_on, step, (x, torch.tensor(0)))
    return (y * y).sum() + n * w.sum()


def written(w: Any, x: Any, limit: Any) -> Any:
    n = 0
    while x.sum().item() < float(limit):
        x, n = (x * w).sin() + x * 1.2 + x.sum() / 100, n + 1
    return (x * x).sum() + n * w.sum()


WS = torch.tensor([0.9, 0.5, 0.3], dtype=F64)
# no step, a few, and more than there are chunks
LIMITS = [torch.tensor(x, dtype=F64) for x in (1.0, 20.0, 1e14)]
XS = torch.stack([X, X * 3, X / 9])


def gradients(fn: Any, w: Any, x: Any, limit: Any) -> Any:
    """The value and its gradients in eager torch."""
    primals = w.clone().requires_grad_(), x.clone().requires_grad_()
    value = fn(*primals, limit)
    return value.detach(), torch.autograd.grad(value, primals)


BOTH = sf.value_and_grad(grown, argnums=(0, 1))


@pytest.mark.parametrize("limit", LIMITS, ids=lambda x: f"{x:.0e}")
def test_whatever_the_number_of_steps(limit: Any) -> None:
    program = sf.jit(BOTH, backend="aten")
    close(program(WS, X, limit), gradients(written, WS, X, limit))


def test_the_largest_case_has_chunks_of_more_than_one_step() -> None:
    count = sf.while_loop(
        lambda c: c[0].sum() < LIMITS[-1],
        lambda c: ((c[0] * WS).sin() + c[0] * 1.2 + c[0].sum() / 100, c[1] + 1),
        (X, torch.tensor(0)),
    )[1]
    assert int(count) > 2 * CHUNKS


def test_samples_with_steps_of_their_own() -> None:
    limit = LIMITS[1]
    batched = sf.vmap(BOTH, in_axes=(None, 0, None))
    value, (of_w, of_x) = sf.jit(batched, backend="aten")(WS, XS, limit)
    for k in range(3):
        wanted = gradients(written, WS, XS[k], limit)
        close((value[k], (of_w[k], of_x[k])), wanted)
    of_batch = lambda w, xs: sf.vmap(grown, (None, 0, None))(w, xs, limit).sum()
    got = sf.jit(sf.grad(of_batch, argnums=(0, 1)), backend="aten")(WS, XS)
    close(got, (of_w.sum(0), of_x))


@pytest.mark.parametrize(
    ("outer", "inner"), [("jacrev", "grad"), ("jacfwd", "grad"), ("jacrev", "jacfwd")]
)
def test_second_derivatives(outer: str, inner: str) -> None:
    limit = LIMITS[1]
    n = 6

    def fixed(w: Any, x: Any) -> Any:
        for _ in range(n):
            x = (x * w).sin() + x * 1.2 + x.sum() / 100
        return (x * x).sum() + n * w.sum()

    run = lambda w, x: grown(w, x, limit)
    close(run(WS, X), fixed(WS, X))
    made = lambda m, fn: getattr(m, outer)(getattr(m, inner)(fn))
    got = sf.jit(made(sf, run), backend="aten")(WS, X)
    close(got, made(torch.func, fixed)(WS, X))


@pytest.mark.parametrize("shape", [(2,), (5,), (2, 2)], ids=str)
def test_shards(shape: tuple[int, ...]) -> None:
    wanted = gradients(written, WS, X, LIMITS[1])
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)])
        places = P(), P("a"), P()
        step = sf.shard(BOTH, mesh, places, backend="aten")
        close(sf.full(step(WS, X, LIMITS[1])), wanted)
        w, x = WS.clone().requires_grad_(), X.clone().requires_grad_()
        sf.shard(grown, mesh, places, backend="aten")(w, x, LIMITS[1]).backward()
        close((w.grad, x.grad), wanted[1])


def of_ranks() -> Any:
    mesh = sf.make_mesh((2,), ("a",))
    places = P(), P("a"), P()
    step = sf.shard(BOTH, mesh, places, backend="aten")
    each = sf.shard_map(own_steps, mesh, (P(), P("a")), P())
    alone = sf.shard(sf.grad(each, argnums=(0, 1)), mesh, backend="aten")
    return sf.full(step(WS, X, LIMITS[1])), sf.full(alone(WS[:2], FOUR))


FOUR = torch.tensor([0.3, 0.7, 9.0, 5.0], dtype=F64)


def own_steps(w: Any, x: Any) -> Any:
    """The code of one rank: each takes steps of its own, and another loop communicates."""
    y = sf.while_loop(lambda y: y.sum() < 20, lambda y: (y * w).sin() + y * 1.2, x)
    more = lambda c: (c[0] * w + sf.psum(c[0], "a") / 3, c[1] + 1)
    z, _ = sf.while_loop(lambda c: c[1] < 3, more, (y, torch.tensor(0)))
    return sf.psum((z * z).sum(), "a")


def of_all(w: Any, x: Any, _: Any = None) -> Any:
    ends = []
    for y in x.split(2):
        while y.sum().item() < 20:
            y = (y * w).sin() + y * 1.2
        ends.append(y)
    z = torch.stack(ends)
    for _ in range(3):
        z = z * w + z.sum(0, keepdim=True) / 3
    return (z * z).sum()


def assert_as_one_device(got: Any) -> None:
    sharded, alone = got
    close(sharded, gradients(written, WS, X, LIMITS[1]))
    close(alone, gradients(of_all, WS[:2], FOUR, None)[1])


def test_ranks_with_steps_of_their_own() -> None:
    with sf.fake_world(2):
        assert_as_one_device(of_ranks())


def test_real_ranks_with_steps_of_their_own() -> None:
    for got in run_ranks(2, of_ranks):
        assert_as_one_device(got)


def test_the_steps_of_a_gradient_draw_the_numbers_of_the_loop() -> None:
    def run(w: Any) -> Any:
        step = lambda c: (torch.dropout(c[0], 0.3, True) * w + 0.1, c[1] + 1)
        start = w, torch.tensor(0)
        return sf.while_loop(lambda c: c[1] < 5, step, start)[0].sum()

    def seeded(fn: Any, w: Any) -> Any:
        random.state.seed(3)
        return sf.jit(fn, backend="aten")(w)

    w = torch.linspace(0.5, 1.5, 40, dtype=F64)
    gradient = seeded(sf.grad(run), w)
    dot = torch.linspace(-1, 1, 40, dtype=F64)
    push = lambda w: sf.jvp(run, (w,), (dot,))[1]
    close((gradient * dot).sum(), seeded(push, w))
