"""An einsum of vectors with several matrices each: torch's values and derivatives, and a layer of
experts that is written so sends tokens, not weights.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.capture.rewrites.einsum_batches import Product

SIZES = {"t": 5, "s": 3, "k": 2, "d": 4, "f": 7, "g": 6}
PRODUCTS = (
    "td,tkdf->tkf",
    "tkfd,td->tkf",
    "tkf,tkfd->tkd",
    "td,tkfd->kft",
    "dt,tksdf->fskt",
    "tsd,tskdf->tskf",
)
OTHERS = (
    "td,dkf->tkf",
    "td,tkdf->kf",
    "td,tdf->tf",
    "tgd,tkdf->tgkf",
    "tkd,tk->td",
    "td,tkdf->td",
    "td,tkd->tk",
    "td,tkdf->tkdf",
    "d,kdf->kf",
    "kt,tkdf->tdf",
    "td,ktdf->ktf",
)


def operands(equation: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sides = equation.partition("->")[0].split(",")
    make = lambda labels: torch.randn(*(SIZES[x] for x in labels), generator=generator, dtype=dtype)
    return tuple(map(make, sides))


@pytest.mark.parametrize("equation", [*PRODUCTS, *OTHERS])
def test_values_and_derivatives_are_torchs(equation: str) -> None:
    args = operands(equation)
    assert (Product.of(equation, *args) is not None) == (equation in PRODUCTS)
    fn = functools.partial(torch.einsum, equation)
    squared = lambda x, w: fn(x, w).pow(3).sum()
    both = lambda grad, hessian, jvp: (
        lambda x, w: (
            fn(x, w),
            grad(squared, (0, 1))(x, w),
            hessian(squared)(x, w),
            jvp(fn, (x, w), (w.sum() + x, w)),
        )
    )
    wanted = both(torch.func.grad, torch.func.hessian, torch.func.jvp)(*args)
    found = sf.jit(both(sf.grad, sf.hessian, sf.jvp), backend="aten")(*args)
    assert_close(found, wanted)
    mapped = sf.jit(sf.vmap(fn), backend="aten")(*(torch.stack([x, 2 * x]) for x in args))
    assert_close(mapped, torch.stack([fn(*args), 4 * fn(*args)]))


REFUSED = {
    "sizes": ("td,tkdf->tkf", (5, 3), (5, 2, 4, 7)),
    "dims": ("td,tkdf->tkf", (5, 4), (5, 4, 7)),
    "labels": ("td,tkdf->tkq", (5, 4), (5, 2, 4, 7)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_torchs(name: str) -> None:
    equation, *shapes = REFUSED[name]
    args = [torch.ones(shape) for shape in shapes]
    with pytest.raises(RuntimeError) as wanted:
        torch.einsum(equation, *args)
    with pytest.raises(RuntimeError) as caught:
        sf.jit(lambda *args: torch.einsum(equation, *args), backend="aten")(*args)
    assert str(wanted.value).split("\n")[0] in str(caught.value)


EXPERTS, CHOSEN, WIDTH, HIDDEN, TOKENS = 8, 2, 6, 10, 24


class Layer(torch.nn.Module):
    """Experts whose weights have the rows of the result first, with biases."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda *shape: torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64) / 3)
        self.router, self.up = make(WIDTH, EXPERTS), make(EXPERTS, HIDDEN, WIDTH)
        self.bias, self.down = make(EXPERTS, HIDDEN), make(EXPERTS, WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(CHOSEN, -1)
        h = torch.einsum("beck,bk->bec", self.up[ids, ...], x) + self.bias[ids, ...]
        y = torch.einsum("beck,bek->bec", self.down[ids, ...], h.relu())
        return torch.einsum("bec,be->bc", y, weights)


@pytest.mark.parametrize("is_module", [False, True])
def test_experts_are_sent_their_tokens(is_module: bool) -> None:
    torch.manual_seed(0)
    model = Layer()
    run, params, _ = sf.functionalize(model)
    call = torch.func.functional_call
    forward = (lambda p, x: run(p, {}, x)[0]) if is_module else (lambda p, x: call(model, p, x))
    loss = lambda p, x: forward(p, x).square().sum()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    wanted = torch.func.grad(lambda p, x: call(model, p, x).square().sum())(params, x)
    places = {name: P() if name == "router" else P("ep") for name in params}
    with simulated(ep=4) as mesh:
        step = sf.shard(sf.grad(loss), mesh, (places, P("ep")), backend="aten", rows={"ep": "4x"})
        assert_close(sf.full(step(params, x)), wanted)
        kinds = Counter(record.kind for record in step.lower(params, x).collectives)
    assert kinds == {"ragged_all_to_all": 3, "all_gather": 1, "all_reduce": 1}
