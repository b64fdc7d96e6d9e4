"""Law: attention has derivatives of every order and mode, as its formula has. Torch's own ops of
attention have the first alone, in reverse mode, so torch.func refuses the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(3)
Q = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=G)
KV = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=G)
BIAS = torch.randn(1, 4, 5, 5, dtype=torch.float64, generator=G)
SEES = torch.ones(5, 5, dtype=torch.bool).tril()
Loss = Callable[[torch.Tensor], torch.Tensor]


def by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = SEES if is_causal else attn_mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "of itself": lambda attend, q: attend(q, q, q),
    "causal": lambda attend, q: attend(q, q.sin(), q.cos(), is_causal=True),
    "a mask of bools": lambda attend, q: attend(q, q, q, attn_mask=SEES),
    "a bias": lambda attend, q: attend(q, q, q, BIAS, scale=0.3),
    "a bias of the queries": lambda attend, q: attend(Q, Q, Q, q @ q.mT),
    "grouped heads": lambda attend, q: attend(q, KV, KV, is_causal=True, enable_gqa=True),
}
T = torch.ones_like(Q)


def hvp(f: Loss) -> Loss:
    return lambda q: sf.jvp(sf.grad(f), (q,), (T,))[1]


DERIVATIVES: dict[str, Callable[[Loss], Loss]] = {
    "jvp": lambda f: lambda q: sf.jvp(f, (q,), (T,))[1],
    "forward over reverse": hvp,
    "reverse over forward": lambda f: sf.grad(lambda q: sf.jvp(f, (q,), (T,))[1]),
    "reverse over reverse": lambda f: sf.grad(lambda q: (sf.grad(f)(q) * T).sum()),
    "hessian": sf.hessian,
    "third": lambda f: sf.grad(lambda q: (hvp(f)(q) * T).sum()),
    "linearize": lambda f: lambda q: sf.linearize(sf.grad(f), q)[1](T),
    "of a pullback": lambda f: sf.grad(lambda q: (sf.vjp(f, q)[1](q.sum())[0] * T).sum()),
    "in a loop": lambda f: sf.grad(
        lambda q: sf.scan(lambda c, _: (c + sf.grad(f)(c).sin(), None), q, length=2)[0].sum()
    ),
    "checkpointed": lambda f: hvp(sf.checkpoint(f)),
    "of samples": lambda f: lambda q: sf.vmap(lambda x: hvp(lambda q: f(q) * x.sum())(q))(Q[0]),
    "by torch.autograd.grad": lambda f: sf.grad(lambda q: (_autograd(f, q) * T).sum()),
}


def _autograd(f: Loss, q: torch.Tensor) -> torch.Tensor:
    x = q.detach() * 0 + q
    x.requires_grad_()
    return torch.autograd.grad(f(x), x, create_graph=True)[0]


def loss(call: str, attend: Any) -> Loss:
    return lambda q: CALLS[call](attend, q).square().sum()


PAIRS = [  # each derivative of two calls, each call under four derivatives
    (name, [*CALLS][(i + shift) % len(CALLS)])
    for i, name in enumerate(DERIVATIVES)
    for shift in (0, 3)
]


@pytest.mark.parametrize(("name", "call"), PAIRS)
def test_derivatives_are_those_of_the_formula(name: str, call: str) -> None:
    derive = DERIVATIVES[name]
    got, want = (
        sf.jit(derive(loss(call, attend)), backend="aten")(Q)
        for attend in (F.scaled_dot_product_attention, by_formula)
    )
    assert_close(got, want)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, None, "a")])
def test_on_a_mesh(spec: P) -> None:
    for name in ("jvp", "forward over reverse", "reverse over reverse"):
        want = DERIVATIVES[name](loss("causal", by_formula))(Q)
        with sf.fake_world(2):
            mesh = sf.make_mesh((2,), ("a",))
            fn = DERIVATIVES[name](loss("causal", F.scaled_dot_product_attention))
            equal(sf.full(sf.shard(fn, mesh, spec, backend="aten")(Q)), want)


def test_compiled() -> None:
    fn = hvp(loss("causal", F.scaled_dot_product_attention))
    assert_close(sf.jit(fn, backend="inductor")(Q), hvp(loss("causal", by_formula))(Q))


def test_a_bias_that_the_function_closes_over_has_a_gradient() -> None:
    bias = BIAS.clone().requires_grad_()
    for attend in (F.scaled_dot_product_attention, by_formula):
        fn = lambda q, attend=attend: attend(q, Q, Q, bias * 1.5).square().sum()
        for outer in (fn, sf.checkpoint(fn), lambda q, fn=fn: sf.grad(fn)(q).sum()):
            sf.jit(outer, backend="aten")(Q).backward()
    got = bias.grad
    assert got is not None and not got.isnan().any()


def test_a_gradient_penalty_has_a_gradient() -> None:
    def penalty(attend: Any, q: torch.Tensor) -> torch.Tensor:
        y = CALLS["causal"](attend, q).square().sum()
        return torch.autograd.grad(y, q, create_graph=True)[0].square().sum()

    found = []
    for attend in (F.scaled_dot_product_attention, by_formula):
        q = Q.clone().requires_grad_()
        sf.jit(lambda q, attend=attend: penalty(attend, q), backend="aten")(q).backward()
        found.append(q.grad)
    assert_close(*found)


def test_the_first_derivative_is_that_of_torchs_op() -> None:
    fn = loss("causal", F.scaled_dot_product_attention)
    for step in (sf.grad(fn), sf.vmap(sf.grad(fn)), sf.grad(sf.checkpoint(fn))):
        text = str(sf.jit(step, backend="aten").trace(Q[None] if "vmap" in step.__name__ else Q))
        assert "_scaled_dot_product_flash_attention_for_cpu_backward" in text
