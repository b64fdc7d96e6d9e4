"""custom_vjp and custom_jvp: the rule counts, under every transform; an autograd.Function with
the same rule is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from message import without_line
from torch import Tensor

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(11)
X, Y = (
    torch.randn(5, 3, generator=G, dtype=F64),
    torch.randn(3, 3, generator=G, dtype=F64),
)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# Rules that are no derivatives (twice, three times as much), so that using the true one would show.
@sf.custom_vjp
def doubled(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x @ y)


doubled.defvjp(  # fwd calls the function, so that the rule counts at every order, as in torch
    lambda x, y: (doubled(x, y), {"c": torch.cos(x @ y), "x": x, "y": y}),
    lambda r, g: ((g * r["c"]) @ r["y"].T * 2, None),
)


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x @ y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return (g * torch.cos(x @ y)) @ y.mT * 2, None


@sf.custom_jvp
def tripled(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"s": torch.sin(x @ y)}


@tripled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return tripled(x, y), {"s": torch.cos(x @ y) * (dx @ y + 3 * x @ dy)}


class Tripled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x @ y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        g = g * torch.cos(x @ y)
        return g @ y.mT, 3 * x.mT @ g

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dy: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return torch.cos(x @ y) * (dx @ y + 3 * x @ dy)


PAIRS: dict[str, Any] = {
    "vjp": (doubled, Doubled.apply),
    "jvp": (lambda x, y: tripled(x, y)["s"], Tripled.apply),
}
FORWARD = ("jvp", "jacfwd", "hessian", "vmap of jvp")


def over(m: Any, f: Any, axes: Any) -> Any:
    return m.vmap(f, **{"in_axes" if m is sf else "in_dims": axes})


def square(f: Any) -> Callable[..., Tensor]:
    return lambda *xs: f(*xs).square().sum()


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda m, f: f,
    "grad": lambda m, f: m.grad(square(f), argnums=(0, 1)),
    "vmap": lambda m, f: (
        lambda x, y: over(m, f, (1, None))(torch.stack([x, -x], 1), y)
    ),
    "vmap of grad": lambda m, f: (
        lambda x, y: over(m, m.grad(square(f), argnums=(0, 1)), (1, None))(
            torch.stack([x, -x], 1), y
        )
    ),
    "grad of vmap": lambda m, f: m.grad(
        lambda x, y: square(over(m, f, (1, None)))(torch.stack([x, -x], 1), y),
        argnums=(0, 1),
    ),
    "jacrev": lambda m, f: m.jacrev(f, argnums=(0, 1)),
    "grad of grad": lambda m, f: m.grad(
        lambda x, y: m.grad(lambda *a: f(*a).sin().sum())(x, y).square().sum(),
        argnums=(0, 1),
    ),
    "jvp": lambda m, f: lambda x, y: m.jvp(f, (x, y), (x.cos(), y.sin())),
    "jacfwd": lambda m, f: m.jacfwd(f, argnums=1),
    "hessian": lambda m, f: m.hessian(square(f), argnums=1),
    "vmap of jvp": lambda m, f: (
        lambda x, y: over(m, lambda x: m.jvp(f, (x, y), (x.cos(), y.sin())), 1)(
            torch.stack([x, -x], 1)
        )
    ),
}
CASES = [
    (kind, t)
    for kind in PAIRS
    for t in TRANSFORMS
    if not (kind == "vjp" and t in FORWARD)
]


@pytest.mark.parametrize(("kind", "transform"), CASES)
def test_the_rule_counts_under_every_transform(kind: str, transform: str) -> None:
    ours, theirs = PAIRS[kind]
    wanted = TRANSFORMS[transform](torch.func, theirs)(X, Y)
    transformed = TRANSFORMS[transform](sf, ours)  # the meshes share its captures
    close(transformed(X, Y), wanted)
    close(
        TRANSFORMS[transform](torch.func, ours)(X, Y), wanted
    )  # under a transform that is not captured
    for sizes, placements in (
        ((3,), (P("a"), P())),
        ((2, 2), (P("a", "b"), P("b", "a"))),
    ):
        with sf.fake_world(torch.Size(sizes).numel()):
            mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
            close(
                sf.full(
                    sf.shard(transformed, mesh, placements, backend="aten")(X, Y)
                ),
                wanted,
            )


def test_a_rule_that_calls_its_function_counts_at_every_order() -> None:
    @sf.custom_jvp
    def exp(x: Tensor) -> Tensor:
        return x.exp()

    exp.defjvp(
        lambda primals, tangents: (exp(*primals), exp(*primals) * tangents[0] * 2)
    )
    zero = torch.tensor(0.0, dtype=F64)
    close(sf.grad(exp)(zero), torch.tensor(2.0, dtype=F64))
    close(sf.grad(sf.grad(sf.grad(exp)))(zero), torch.tensor(8.0, dtype=F64))


def test_a_rule_keeps_a_function_from_overflowing() -> None:
    softplus = sf.custom_jvp(lambda x: torch.log1p(torch.exp(x)))
    softplus.defjvp(
        lambda primals, tangents: (
            softplus(*primals),
            torch.sigmoid(primals[0]) * tangents[0],
        )
    )
    close(
        sf.grad(softplus)(torch.tensor(1000.0, dtype=F64)),
        torch.tensor(1.0, dtype=F64),
    )


def test_arguments_that_are_no_tensors_come_first_in_a_rule() -> None:
    @sf.custom_vjp
    def clipped(limit: float, x: Tensor) -> Tensor:
        return x

    plain = sf.custom_vjp(clipped.fn, nondiff_argnums=0)
    plain.defvjp(
        lambda limit, x: (x, None), lambda limit, _, g: (g.clamp(-limit, limit),)
    )
    close(
        sf.grad(lambda x: (plain(0.5, x) * torch.arange(3, dtype=F64)).sum())(
            X[0]
        ),
        torch.tensor([0.0, 0.5, 0.5], dtype=F64),
    )


def test_a_custom_function_inside_a_scan() -> None:
    ours = lambda x: sf.scan(
        lambda c, r: (c + doubled(x, Y).sum() * r.sum(), None),
        torch.tensor(0.0, dtype=F64),
        X,
    )[0]
    plain = lambda x: sum(Doubled.apply(x, Y).sum() * r.sum() for r in X)
    close(sf.grad(ours)(X), torch.func.grad(plain)(X))


def unruled() -> Any:
    return sf.custom_vjp(lambda x: x)


def with_rule(fwd: Any, bwd: Any) -> Any:
    made = sf.custom_vjp(lambda x: x * 2)
    made.defvjp(fwd, bwd)
    return made


def closing_over(w: Tensor) -> Tensor:
    made = sf.custom_vjp(lambda x: (x * w).sum())
    made.defvjp(lambda x: ((x * w).sum(), x), lambda r, g: (g * r,))
    return made(X)


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no rule": (
        lambda: unruled()(X),
        sf.ShardError,
        "custom_vjp(<lambda>): it has no rule\n  try: f.defvjp(fwd, bwd) before it is called",
    ),
    "a second rule": (
        lambda: doubled.defvjp(lambda x, y: (x, None), lambda _, g: (g, None)),
        sf.ShardError,
        (
            "custom_vjp(doubled): it has a rule already\n  try: custom_vjp(f) again, with "
            "the other rule"
        ),
    ),
    "fwd returns no pair": (
        lambda: sf.grad(
            lambda x: with_rule(lambda x: x * 2, lambda r, g: (g,))(x).sum()
        )(X),
        sf.TreeError,
        "custom_vjp(<lambda>): fwd returns something else\n  needed: (result, residuals)",
    ),
    "fwd returns another result": (
        lambda: sf.grad(
            lambda x: with_rule(lambda x: (x[0], x), lambda r, g: (g,))(x).sum()
        )(X),
        sf.TreeError,
        "custom_vjp(<lambda>): the results of fwd do not match those of the function\n"
        "  result is (3,) torch.float64, result is (5, 3) torch.float64\n"
        "  needed: one tree, shapes and dtypes\n  try: return the same result as the function",
    ),
    "bwd returns no tuple": (
        lambda: sf.grad(
            lambda x: with_rule(lambda x: (x * 2, x), lambda r, g: g)(x).sum()
        )(X),
        sf.TreeError,
        "custom_vjp(<lambda>): bwd returns something else\n  needed: a tuple of 1 cotangents",
    ),
    "bwd returns another shape": (
        lambda: sf.grad(
            lambda x: with_rule(lambda x: (x * 2, x), lambda r, g: (g[0],))(
                x
            ).sum()
        )(X),
        sf.TreeError,
        "custom_vjp(<lambda>): the cotangents of bwd do not match the arguments\n"
        "  cotangent[0] is (3,) torch.float64, args[0] is (5, 3) torch.float64\n"
        "  needed: one tree, shapes and dtypes\n  try: return for each argument a tree "
        "like it, or None for zero",
    ),
    "forward mode of a reverse rule": (
        lambda: sf.jvp(doubled, (X, Y), (X, Y)),
        sf.CaptureError,
        "custom_vjp(doubled): it has a rule for reverse mode only, and is differentiated "
        "in forward mode\n"
        "  try: custom_jvp, whose rule serves both modes",
    ),
    "a closed-over value that is differentiated": (
        lambda: sf.grad(closing_over)(X),
        sf.CaptureError,
        "custom_vjp(<lambda>): it closes over a value that is differentiated\n"
        "  try: pass it as an argument, for which the rule gives a derivative",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_said(name: str) -> None:
    call, kind, text = REFUSALS[name]
    with pytest.raises(kind) as error:
        call()
    assert without_line(error.value) == text
