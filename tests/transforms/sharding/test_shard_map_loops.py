"""Loops and branches in per-rank code, and per-rank code in loops: equal to whole arrays in
plain torch, under transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(3)
W, XS = (torch.randn(3, 3, generator=G, dtype=F64), torch.randn(5, 6, 3, generator=G, dtype=F64))
Two = Callable[[Tensor, Tensor], Any]
RANKS = 2


def close(got: Any, wanted: Any) -> None:
    assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def written_out(f: Callable[..., Any], init: Tensor, xs: Tensor) -> Any:
    carry, ys = init, []
    for x in xs:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def per_rank(body: Two, out: Any) -> Two:
    """Per-rank code of a shared matrix and of rows that are cut over a."""
    return sf.shard_map(body, in_placements=(P(), P(None, "a")), out_placements=out)


def zeros() -> Tensor:
    return torch.zeros(3, dtype=F64)


def gradients(w: Tensor, xs: Tensor) -> Tensor:
    step = sf.grad(lambda w, x: (x @ w).sin().sum())
    return sf.scan(lambda g, x: (g + step(w, x), None), torch.zeros_like(w), xs)[0]


def growing(w: Tensor, xs: Tensor) -> Tensor:
    return sf.psum(
        sf.while_loop(lambda c: c.abs().sum() < 30, lambda c: c * 1.5 + w[0], xs[0]).sum(), "a"
    )


def grown(w: Tensor, xs: Tensor) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for c in xs[0].chunk(RANKS):
        for _ in range(40):
            c = torch.where(c.abs().sum() < 30, c * 1.5 + w[0], c)
        total = total + c.sum()
    return total


def chunks(f: Two) -> Callable[[Tensor, Tensor], list[Any]]:
    return lambda w, xs: [f(w, x) for x in xs.chunk(RANKS, 1)]


def stacked(found: list[Any]) -> Any:
    return torch.cat([c for c, _ in found]), torch.stack([y.sum() for _, y in found])


def added_once(w: Tensor, xs: Tensor) -> Any:
    c, ys = added(w, xs)
    return c, ys.sum()[None]


def added(w: Tensor, xs: Tensor) -> Any:
    return sf.scan(lambda c, x: (c * 0.5 + x @ w, c.sum()), xs[0] * 2, xs)


@sf.custom_vjp
def doubled(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()


doubled.defvjp(
    lambda x, w: ((x @ w).sin(), (x, w)),
    lambda r, g: (g @ r[1].T * 2, r[0].mT @ (g * (r[0] @ r[1]).cos())),
)


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.mT * 2, x.mT @ (g * (x @ w).cos())


CASES: dict[str, tuple[Two, Two]] = {
    "a sum over ranks in every run": (
        per_rank(
            lambda w, xs: sf.scan(
                lambda c, x: (torch.tanh(c @ w + sf.psum(x.sum(0), "a")), c.sum()), zeros(), xs
            ),
            (P(), P()),
        ),
        lambda w, xs: written_out(
            lambda c, x: (torch.tanh(c @ w + x.sum(0)), c.sum()), zeros(), xs
        ),
    ),
    "a gradient in every run": (
        per_rank(gradients, P()),
        lambda w, xs: sum(torch.func.grad(lambda w, x=x: (x @ w).sin().sum())(w) for x in xs),
    ),
    "a branch that all ranks take, with a sum in it": (
        per_rank(
            lambda w, xs: sf.cond(
                w.sum() > 0, lambda: torch.sin(xs @ w), lambda: sf.psum(xs, "a") * 0 + xs * w.sum()
            ),
            P(None, "a"),
        ),
        lambda w, xs: torch.where(w.sum() > 0, (xs @ w).sin(), xs * w.sum()),
    ),
    "a branch of each rank's own": (
        per_rank(
            lambda w, xs: sf.cond(xs.sum() > 0, lambda: torch.sin(xs @ w), lambda: xs * w.sum()),
            P(None, "a"),
        ),
        lambda w, xs: torch.cat(
            chunks(lambda w, x: torch.where(x.sum() > 0, (x @ w).sin(), x * w.sum()))(w, xs), 1
        ),
    ),
    "a carry of each rank's own": (
        per_rank(added_once, (P("a"), P("a"))),
        lambda w, xs: stacked(
            chunks(lambda w, x: written_out(lambda c, x: (c * 0.5 + x @ w, c.sum()), x[0] * 2, x))(
                w, xs
            )
        ),
    ),
    "per-rank code in every run": (
        lambda w, xs: sf.scan(
            lambda c, x: (
                c
                + sf.shard_map(
                    lambda x, w: sf.psum((x @ w).sin().sum(0), "a"),
                    in_placements=(P("a"), P()),
                    out_placements=P(),
                )(x, w),
                c.sum(),
            ),
            zeros(),
            xs,
        ),
        lambda w, xs: written_out(lambda c, x: (c + (x @ w).sin().sum(0), c.sum()), zeros(), xs),
    ),
    "each rank as often as it likes": (per_rank(growing, P()), grown),
    "a rule of the user's": (
        per_rank(lambda w, xs: sf.psum(doubled(xs[0], w).sum(0), "a"), P()),
        lambda w, xs: Doubled.apply(xs[0], w).sum(0),
    ),
}


def summed(f: Two) -> Callable[..., Tensor]:
    def loss(w: Tensor, xs: Tensor) -> Tensor:
        out = f(w, xs)
        return sum(x.sin().sum() for x in out) if isinstance(out, tuple) else (out**2).sum()

    return loss


TRANSFORMS: dict[str, Callable[[Any, Two], Any]] = {
    "plain": lambda m, f: f,
    "grad": lambda m, f: m.grad(summed(f), argnums=(0, 1)),
    "jvp": lambda m, f: lambda w, xs: m.jvp(f, (w, xs), (w.cos(), xs.sin())),
    "vmap": lambda m, f: (
        lambda w, xs: m.vmap(f, **{"in_axes" if m is sf else "in_dims": (0, None)})(
            torch.stack([w, -w]), xs
        )
    ),
    "grad of grad": lambda m, f: m.grad(lambda w, xs: m.grad(summed(f))(w, xs).square().sum()),
}
NOT = {
    ("each rank as often as it likes", "grad"),
    ("each rank as often as it likes", "grad of grad"),
    ("a rule of the user's", "jvp"),
}
PAIRS = [(case, t) for case in CASES for t in TRANSFORMS if (case, t) not in NOT]


@pytest.mark.parametrize(("case", "transform"), PAIRS)
def test_per_rank_loops_equal_whole_arrays(case: str, transform: str) -> None:
    ours, plain = CASES[case]
    wanted = TRANSFORMS[transform](torch.func, plain)(W, XS)
    sizes, names = (((2,), ("a",)), ((2, 2), ("a", "b")))[PAIRS.index((case, transform)) % 2]
    with sf.fake_world(torch.Size(sizes).numel()):
        fn = sf.shard(
            TRANSFORMS[transform](sf, ours),
            sf.make_mesh(sizes, names),
            (P(), P(None, "a")),
            backend="aten",
        )
        close(sf.full(fn(W, XS)), wanted)


def test_what_a_scan_shares_is_summed_once_behind_it() -> None:
    def loss(w: Tensor, xs: Tensor) -> Tensor:
        local = lambda w, xs: sf.psum(
            sf.scan(lambda c, x: (c + ((x @ w) ** 2).sum(), None), torch.zeros((), dtype=F64), xs)[
                0
            ],
            "a",
        )
        return per_rank(local, P())(w, xs)

    with simulated(a=2) as mesh:
        low = sf.shard(sf.grad(loss), mesh, (P(), P(None, "a")), backend="aten").lower(W, XS)
    assert [(c.kind, c.nbytes) for c in low.collectives if c.nbytes > 8] == [("all_reduce", 72)]


def test_a_collective_where_ranks_choose_apart_is_refused() -> None:
    fn = per_rank(
        lambda w, xs: sf.cond(xs.sum() > 0, lambda: sf.psum(xs, "a"), lambda: xs), P(None, "a")
    )
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as error:
        sf.shard(fn, sf.make_mesh((2,), ("a",)), (P(), P(None, "a")), backend="aten")(W, XS)
    first, _, fix = str(error.value).splitlines()
    assert first == "cond: the body calls psum, and the condition varies over a"
    assert fix == (
        "  try: call the collective before or after the branch or loop, or make the condition "
        "equal on all ranks of a by psum or pmax"
    )


def test_a_collective_in_a_function_with_a_rule_of_its_own() -> None:
    made = sf.custom_vjp(lambda x: sf.psum(x, "a"))
    made.defvjp(lambda x: (sf.psum(x, "a"), None), lambda _, g: (3 * g,))
    with sf.fake_world(2):
        loss = summed(per_rank(lambda w, xs: made(xs), P()))
        mesh = sf.make_mesh((2,), ("a",))
        both = sf.value_and_grad(loss, argnums=1)
        step = sf.shard(both, mesh, (P(), P(None, "a")), backend="aten")
        value, gradient = sf.full(step(W, XS))
    left, right = XS.chunk(2, dim=1)
    plain = torch.func.grad_and_value(lambda x: (x**2).sum())
    one, wanted = plain(left + right)
    assert_close(value, wanted)
    assert_close(gradient, torch.cat([3 * one, 3 * one], dim=1))


def test_a_test_may_read_any_carry_and_vary_over_other_axes_than_the_first() -> None:
    def body(x: Tensor) -> Tensor:
        limit = x.sum() + 4  # each rank's own
        go_on = lambda c: c[2] < limit
        step = lambda c: (c[0] + 1, c[1] * 2, c[2] + c[1].abs().sum())
        n, y, _ = sf.while_loop(go_on, step, (torch.tensor(0), x, x.sum()))
        return y + n

    x = torch.arange(1.0, 9.0, dtype=F64).view(4, 2)
    wanted = []
    for c in x.chunk(RANKS):
        n, y, total = 0, c, c.sum()
        while total < c.sum() + 4:
            n, y, total = n + 1, y * 2, total + y.abs().sum()
        wanted.append(y + n)
    with simulated(a=RANKS) as mesh:
        mapped = sf.shard_map(body, mesh, P("a"), P("a"), backend="aten")
        close(sf.full(mapped(x)), torch.cat(wanted))


def test_a_collective_of_a_number_that_is_a_constant() -> None:
    def body(x: Tensor) -> Tensor:
        one = torch.tensor(1.0, dtype=F64)
        many = sf.psum(one, "a") + sf.all_gather(one, "a").sum()
        return x * many + sf.psum(torch.tensor(True).to(F64), "a")

    x = torch.arange(4.0, dtype=F64)
    with simulated(a=RANKS) as mesh:
        mapped = sf.shard_map(body, mesh, P("a"), P("a"), backend="aten")
        close(sf.full(mapped(x)), x * 2 * RANKS + RANKS)
