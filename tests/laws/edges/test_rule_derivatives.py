"""Derivatives of derivatives: any nest of transforms equals torch.func on the plain function.

The nests are all orders up to depth three, over functions with rules of their own, loops, branches.
CI tries a fixed sample of those that take two or three derivatives, and SHARDFN_EFFORT more, up to
six. A custom_vjp is refused where forward mode meets its rule; a function of torch's own that
torch.func cannot differentiate so often is refused too; nothing else is.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import effort
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(5)
X = torch.randn(2, generator=G, dtype=F64) / 2
A = torch.randn(2, 2, generator=G, dtype=F64) / 3 + 2 * torch.eye(2, dtype=F64)
Fn = Callable[[Tensor], Tensor]  # of a vector of two


def wavy(x: Tensor) -> Tensor:
    return torch.sin(x) * x


def slope(x: Tensor) -> Tensor:
    return torch.cos(x) * x + torch.sin(x)


forward_rule = sf.custom_jvp(wavy)
forward_rule.defjvp(lambda xs, ts: (wavy(*xs), slope(*xs) * ts[0]))
forward_again = sf.custom_jvp(torch.exp)
forward_again.defjvp(lambda xs, ts: (forward_again(*xs), forward_again(*xs) * ts[0]))
reverse_rule = sf.custom_vjp(wavy)
reverse_rule.defvjp(lambda x: (wavy(x), x), lambda x, g: (slope(x) * g,))
reverse_again = sf.custom_vjp(wavy)
reverse_again.defvjp(lambda x: (reverse_again(x), x), lambda x, g: (slope(x) * g,))


def scanned(x: Tensor) -> Tensor:
    return sf.scan(lambda c, r: (torch.sin(c) * r + x, c * r), x, torch.stack([x, x * 2]))[0]


def chosen(x: Tensor) -> Tensor:
    return sf.cond(x.sum() > 0, wavy, lambda y: torch.cos(y) * y, x)


def solved(x: Tensor) -> Tensor:
    return torch.linalg.solve(A.to(x.dtype) + torch.outer(x, x), x)


def normed(x: Tensor) -> Tensor:
    return x / (1 + x.norm())


FUNCTIONS: dict[str, tuple[Fn, Fn]] = {  # ours, and the plain one
    "custom_jvp": (forward_rule, wavy),
    "custom_jvp that calls itself": (forward_again, torch.exp),
    "custom_vjp": (reverse_rule, wavy),
    "custom_vjp that calls itself": (reverse_again, wavy),
    "custom_jvp in scan": (
        lambda x: sf.scan(lambda c, r: (forward_rule(c) * r, None), x, torch.stack([x, x]))[0],
        lambda x: wavy(wavy(x) * x) * x,
    ),
    "scan": (scanned, lambda x: torch.sin(torch.sin(x) * x + x) * x * 2 + x),
    "map": (lambda x: sf.map(lambda r: torch.sin(r) * x[0], x), lambda x: torch.sin(x) * x[0]),
    "cond": (chosen, lambda x: torch.where(x.sum() > 0, wavy(x), torch.cos(x) * x)),
    "solve": (solved, solved),
    "norm": (normed, normed),
    "checkpoint": (sf.checkpoint(wavy), wavy),
}


def grad(m: Any, f: Fn) -> Fn:
    return m.grad(lambda x: f(x).square().sum())


def jvp(m: Any, f: Fn) -> Fn:
    return lambda x: m.jvp(f, (x,), (x.cos(),))[1]


def vmap(m: Any, f: Fn) -> Fn:
    return lambda x: m.vmap(f)(torch.stack([x, x.cos()]))


TRANSFORMS: dict[str, Callable[[Any, Fn], Fn]] = {
    "grad": grad,
    "jvp": jvp,
    "jacfwd": lambda m, f: m.jacfwd(f),
    "jacrev": lambda m, f: m.jacrev(f),
    "hessian": lambda m, f: m.hessian(f),
    "vmap": vmap,
    "jit": lambda m, f: sf.jit(f, backend="aten") if m is sf else f,
    "shard": lambda m, f: sf.shard(f, in_placements=P("a"), backend="aten") if m is sf else f,
}
MODES = {"grad": "r", "jvp": "f", "jacfwd": "f", "jacrev": "r", "hessian": "fr"}  # outermost first
NESTS = [nest for depth in (1, 2, 3) for nest in itertools.product(TRANSFORMS, repeat=depth)]


def modes(nest: tuple[str, ...]) -> str:
    return "".join(MODES.get(name, "") for name in nest)


ONE_MODE = "the function has only a reverse-mode rule, and is differentiated in forward mode"
TANGENT = "a derivative of the op's tangent"


def refusal(name: str, nest: tuple[str, ...]) -> str | None:
    """Why a nest is refused: a rule for reverse mode only is asked for forward mode, or torch
    computes the derivative of a tangent wrongly.
    """
    order = modes(nest)
    if name == "solve" and "f" in order[1:]:
        return TANGENT
    is_one_mode = (name == "custom_vjp" and order.endswith("f")) or (
        name == "custom_vjp that calls itself" and "f" in order
    )
    return ONE_MODE if is_one_mode else None


def by_hash(case: Any) -> str:
    return hashlib.sha256(str(case).encode()).hexdigest()


def sampled(each: int) -> list[tuple[str, tuple[str, ...]]]:
    """So many nests of each function."""
    small = [nest for nest in NESTS if 2 <= len(modes(nest)) <= (3 if effort.EFFORT == 1 else 6)]
    return [
        (name, nest)
        for name in FUNCTIONS
        for nest in sorted(small, key=lambda n: by_hash((name, n)))[: each * effort.EFFORT]
    ]


def composed(m: Any, nest: tuple[str, ...], f: Fn) -> Fn:
    for name in reversed(nest):
        f = TRANSFORMS[name](m, f)
    return f


def called(f: Fn, nest: tuple[str, ...], x: Tensor, placed: bool) -> Tensor:
    if not placed and "shard" not in nest:
        return f(x)
    with simulated(a=2) as mesh:
        return sf.full(sf.shard(f, mesh, P("a"), backend="aten")(x))


@pytest.mark.parametrize(
    ("name", "nest"), sampled(2), ids=lambda x: x if isinstance(x, str) else " of ".join(x)
)
def test_any_nest_equals_torch_func_on_the_plain_function(name: str, nest: tuple[str, ...]) -> None:
    ours, plain = FUNCTIONS[name]
    placed = int(by_hash((nest, name)), 16) % 3 == 0
    if why := refusal(name, nest):
        with pytest.raises(sf.CaptureError, match=why):
            called(composed(sf, nest, ours), nest, X, placed)
        return
    try:
        wanted = composed(torch.func, nest, plain)(X)
    except RuntimeError:  # the third derivative of a norm (torch 2.13)
        with pytest.raises(sf.CaptureError, match="modified by an inplace operation"):
            called(composed(sf, nest, ours), nest, X, placed)
        return
    got = called(composed(sf, nest, ours), nest, X, placed)
    assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def scalar(x: Tensor) -> Tensor:
    """Python's numbers beside scalars: torch makes zero tangents of another dtype of them."""
    total = torch.zeros((), dtype=x.dtype)
    return sf.scan(
        lambda c, r: (torch.sin(c * x) + r * 2.0, c / 3), total, torch.stack([x, x * 0.5]).detach()
    )[0]


SECOND: dict[str, Callable[[Fn], Fn]] = {
    "jvp of grad": lambda f: lambda x: sf.jvp(sf.grad(f), (x,), (x,))[1],
    "jacfwd of jacfwd": lambda f: sf.jacfwd(sf.jacfwd(f)),
    "hessian": sf.hessian,
}
KEPT = [(dtype, "jvp of grad") for dtype in (torch.float32, torch.bfloat16, torch.float64)]
KEPT += [(torch.float32, "jacfwd of jacfwd"), (torch.float32, "hessian")]


@pytest.mark.parametrize(("dtype", "second"), KEPT)
def test_a_derivative_has_the_dtype_of_its_primal(dtype: torch.dtype, second: str) -> None:
    assert SECOND[second](scalar)(torch.tensor(0.4, dtype=dtype)).dtype == dtype
