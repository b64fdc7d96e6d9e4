"""torch's flex attention under derivatives and vmap, next to attention written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

DRAW = torch.Generator().manual_seed(3)
Q, K, V = (torch.randn(2, 4, 7, 5, generator=DRAW, dtype=torch.float64) for _ in range(3))
SLOPE = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
AT = torch.arange(7)
CAUSAL = AT[:, None] >= AT


def masked(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


BLOCKS = create_block_mask(masked, None, None, 7, 7, device="cpu")


def written(q: Any, k: Any, v: Any, bias: Any = 0.0, mask: Any = None) -> Any:
    """Attention of (batch, heads, length, features), score by score."""
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def sloped(slope: Any) -> Any:
    return slope[:, None, None] * (AT[:, None] - AT)


def with_slope(q: Any, k: Any, v: Any, slope: Any) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j))


def of_two_heads(q: Any, k: Any, v: Any, slope: Any) -> Any:
    return flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plain": (
        lambda q, k, v, slope: flex_attention(q, k, v),
        lambda q, k, v, slope: written(q, k, v),
    ),
    "a learned bias": (with_slope, lambda q, k, v, slope: written(q, k, v, sloped(slope))),
    "a block mask": (
        lambda q, k, v, slope: flex_attention(q, k, v, block_mask=BLOCKS),
        lambda q, k, v, slope: written(q, k, v, mask=CAUSAL),
    ),
    "grouped heads": (
        of_two_heads,
        lambda q, k, v, slope: written(q, *(x[:, :2].repeat_interleave(2, 1) for x in (k, v))),
    ),
}


def of_scale(q: Any, k: Any, v: Any, slope: Any) -> Any:
    y, scale = flex_attention(q, k, v, return_lse=True)
    return y * scale[..., None]


def written_scale(q: Any, k: Any, v: Any, slope: Any) -> Any:
    scale = (q @ k.mT / q.shape[-1] ** 0.5).logsumexp(-1)
    return written(q, k, v) * scale[..., None]


PAIRS["the logarithm of the sums"] = of_scale, written_scale
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fn(*args).square().sum()


@pytest.mark.parametrize("name", PAIRS)
def test_gradients(name: str) -> None:
    fn, plain = PAIRS[name]
    args, numbers = (Q, K, V, SLOPE), (0, 1, 2, 3)
    wanted = torch.func.grad(loss_of(plain), numbers)(*args)
    assert_close(sf.grad(loss_of(fn), numbers)(*args), wanted)


def test_forward_mode_second_derivatives_and_vmap() -> None:
    plain = PAIRS["a learned bias"][1]
    q = Q[:1, :, :3]
    args = (q, K[:1, :, :3], V[:1, :, :3])
    short = lambda slope, f: f(*args, slope).square().sum()
    steep = lambda slope: short(slope, with_slope)
    hand = lambda slope: (
        (q @ args[1].mT / 5**0.5 + slope[:, None, None] * (AT[:3, None] - AT[:3]))
        .softmax(-1)
        .matmul(args[2])
        .square()
        .sum()
    )
    assert_close(sf.hessian(steep)(SLOPE), torch.func.hessian(hand)(SLOPE))
    got = sf.jit(lambda x: sf.jvp(steep, (x,), (x,)), backend="aten")(SLOPE)
    assert_close(got, torch.func.jvp(hand, (SLOPE,), (SLOPE,)))
    rows = sf.vmap(lambda q, k, v: with_slope(q[None], k[None], v[None], SLOPE))
    wanted = plain(Q, K, V, SLOPE)[:, None]
    assert_close(rows(Q, K, V), wanted)


@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp"), P(None, None, "dp")])
def test_in_shard(spec: Any) -> None:
    fn, plain = PAIRS["a block mask"]
    gradient = sf.grad(lambda q, k, v: loss_of(fn)(q, k, v, SLOPE), (0, 1, 2))
    wanted = torch.func.grad(lambda q, k, v: loss_of(plain)(q, k, v, SLOPE), (0, 1, 2))(Q, K, V)
    with simulated(dp=3) as mesh:
        out = sf.shard(gradient, mesh, spec, backend="aten")(Q, K, V)
        assert_close(sf.full(out), wanted)


def test_s9_6_in_a_loop_and_in_a_branch() -> None:
    def step(x: Any, _: Any) -> Any:
        y = flex_attention(
            x, x, x, score_mod=lambda s, b, h, i, j: s + SLOPE[h] * (i - j), block_mask=BLOCKS
        )
        return x + y, y.sum()

    def looped(x: Any) -> Any:
        x, sums = sf.scan(step, x, None, length=2)
        x = sf.cond(x.sum() > 1e9, lambda x: x, lambda x: step(x, None)[0], x)
        return x.square().sum() + sums.sum()

    def unrolled(x: Any) -> Any:
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(2):
            y = written(x, x, x, sloped(SLOPE), CAUSAL)
            x, total = x + y, total + y.sum()
        x = x + written(x, x, x, sloped(SLOPE), CAUSAL)
        return x.square().sum() + total

    wanted = torch.func.grad(unrolled)(Q)
    with simulated(dp=2) as mesh:
        for spec in (P("dp"), P(None, "dp")):
            out = sf.shard(sf.grad(looped), mesh, spec, backend="aten")(Q)
            assert_close(sf.full(out), wanted)


class Block(torch.nn.Module):
    """Attention whose scores have a parameter, a buffer and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(5, 5, dtype=torch.float64)
        self.slope = torch.nn.Parameter(SLOPE + 1)
        self.register_buffer("scale", SLOPE)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        slope, scale = self.slope, self.scale

        def score(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return x + slope[h] * scale[h] * (i - j)

        return flex_attention(self.proj(q), k, v, score_mod=score, block_mask=BLOCKS).sin()


class Written(Block):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return written(self.proj(q), k, v, sloped(self.slope * self.scale), CAUSAL).sin()


def in_modules() -> list[Any]:
    """The losses of both modules, as functions of the same parameters; and these."""
    ours, theirs = Block(), Written()
    theirs.load_state_dict(ours.state_dict())
    losses = []
    for module in (ours, theirs):
        pure, params, buffers = sf.functionalize(module)
        losses.append(lambda p, *x, f=pure, b=buffers: f(p, b, *x)[0].sum())
    return [*losses, params]


AROUND: dict[str, Callable[..., Any]] = {
    "jit": lambda f: sf.jit(f, backend="aten"),
    "grad": lambda f: sf.grad(f, argnums=(0, 1, 2, 3)),
    "second": lambda f: sf.grad(lambda p, *x: sf.grad(f)(p, *x)["slope"].sum()),
    "jvp": lambda f: lambda p, q, k, v: sf.jvp(lambda q: f(p, q, k, v), (q,), (q,)),
    "vmap": lambda f: (
        lambda p, q, k, v: sf.vmap(sf.grad(f), in_axes=(None, 0, None, None))(
            p, torch.stack([q, 2 * q]), k, v
        )
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_in_a_functionalized_module(name: str) -> None:
    ours, theirs, params = in_modules()
    around = AROUND[name]
    assert_close(around(ours)(params, Q, K, V), around(theirs)(params, Q, K, V))


def test_in_a_functionalized_module_of_a_shard() -> None:
    ours, theirs, params = in_modules()
    with simulated(a=2) as mesh:
        placed = (P(), *[P("a")] * 3)
        sharded = sf.shard(sf.grad(ours), mesh, placed, backend="aten")
        assert_close(sf.full(sharded(params, Q, K, V)), sf.grad(theirs)(params, Q, K, V))
