"""custom_vjp and custom_jvp: the rule counts, under every transform; an autograd.Function with
the same rule is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(11)
X, Y = (torch.randn(5, 3, generator=G, dtype=F64), torch.randn(3, 3, generator=G, dtype=F64))


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
    "vmap": lambda m, f: lambda x, y: over(m, f, (1, None))(torch.stack([x, -x], 1), y),
    "vmap of grad": lambda m, f: (
        lambda x, y: over(m, m.grad(square(f), argnums=(0, 1)), (1, None))(
            torch.stack([x, -x], 1), y
        )
    ),
    "grad of vmap": lambda m, f: m.grad(
        lambda x, y: square(over(m, f, (1, None)))(torch.stack([x, -x], 1), y), argnums=(0, 1)
    ),
    "jacrev": lambda m, f: m.jacrev(f, argnums=(0, 1)),
    "grad of grad": lambda m, f: m.grad(
        lambda x, y: m.grad(lambda *a: f(*a).sin().sum())(x, y).square().sum(), argnums=(0, 1)
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
CASES = [(kind, t) for kind in PAIRS for t in TRANSFORMS if not (kind == "vjp" and t in FORWARD)]


@pytest.mark.parametrize(("kind", "transform"), CASES)
def test_the_rule_counts_under_every_transform(kind: str, transform: str) -> None:
    ours, theirs = PAIRS[kind]
    wanted = TRANSFORMS[transform](torch.func, theirs)(X, Y)
    transformed = TRANSFORMS[transform](sf, ours)  # the meshes share its captures
    close(transformed(X, Y), wanted)
    close(
        TRANSFORMS[transform](torch.func, ours)(X, Y), wanted
    )  # under a transform that is not captured
    for sizes, placements in (((3,), (P("a"), P())), ((2, 2), (P("a", "b"), P("b", "a")))):
        with sf.fake_world(torch.Size(sizes).numel()):
            mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
            close(sf.full(sf.shard(transformed, mesh, placements, backend="aten")(X, Y)), wanted)


def test_a_custom_function_inside_a_scan() -> None:
    ours = lambda x: sf.scan(
        lambda c, r: (c + doubled(x, Y).sum() * r.sum(), None), torch.tensor(0.0, dtype=F64), X
    )[0]
    plain = lambda x: sum(Doubled.apply(x, Y).sum() * r.sum() for r in X)
    close(sf.grad(ours)(X), torch.func.grad(plain)(X))


K = torch.arange(1.0, 6.0, dtype=F64)


def scaled(x: Tensor, y: Any = 2.0, *, negated: bool = False) -> Tensor:
    return -x * y if negated else x * y


def by_vjp(fn: Callable[..., Any]) -> Any:
    ruled = sf.custom_vjp(fn)
    ruled.defvjp(
        lambda x, y: (x * y, (x, y)),
        lambda r, g: (g * r[1] * 10, None if isinstance(r[1], float) else g * r[0] * 10),
    )
    return ruled


def by_jvp(fn: Callable[..., Any]) -> Any:
    ruled = sf.custom_jvp(fn)
    ruled.defjvp(lambda p, t: (p[0] * p[1], 10 * (p[0] * t[1] + t[0] * p[1])))
    return ruled


class Scaled:
    def method(self, x: Tensor, y: Any = 2.0) -> Tensor:
        return x * y


def outer(fn: Callable[..., Any]) -> Callable[..., Any]:
    return sf.grad(lambda x: (fn(x) * torch.arange(5.0, dtype=F64)).sum())


@pytest.mark.parametrize("make", [by_vjp, by_jvp])
@pytest.mark.parametrize("fn", [scaled, Scaled().method, lambda x, y=2.0: x * y])
@pytest.mark.parametrize("staged", [False, True])
def test_rules_receive_keywords_and_default_values_by_position(
    make: Callable[..., Any], fn: Callable[..., Any], staged: bool
) -> None:
    ruled = make(fn)
    weights = torch.arange(5.0, dtype=F64)
    cases = [
        (lambda x: ruled(x, y=x + 1), 10 * weights * (2 * K + 1)),
        (lambda x: ruled(y=x + 1, x=x), 10 * weights * (2 * K + 1)),
        (lambda x: ruled(x, y=K), 10 * weights * K),
    ]
    cases.append((ruled, 20 * weights))
    for call, expected in cases:
        found = outer(call)
        close(sf.jit(found, backend="aten")(K) if staged else found(K), expected)
    close(ruled(K, y=3.0), 3 * K)


@pytest.mark.parametrize("make", [by_vjp, by_jvp])
def test_a_keyword_without_a_position_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(sf.TreeError, match="the keywords negated are not among the arguments"):
        make(scaled)(K, K, negated=True)
