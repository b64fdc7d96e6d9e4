"""Steps, arguments and layouts for comparisons: pairs that are equal, and pairs with one op that is
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P

COLUMNS, ROWS, BATCH = P(None, "tp"), P("tp"), P("dp")
GRID = {"dp": 2, "tp": 2}


class Case(NamedTuple):
    """A step with its arguments' shapes, and a layout."""

    step: Callable[..., Any]
    shapes: tuple[Any, ...]  # a tuple of sizes; an int is a number of classes, for (7,) labels
    layout: Mapping[str, Any]

    def arguments(self, dtype: torch.dtype, seed: int = 0) -> list[Any]:
        """Arguments of these shapes."""
        source = torch.Generator().manual_seed(seed)
        return [
            torch.randint(0, x, (7,), generator=source)
            if isinstance(x, int)
            else torch.randn(x, generator=source).to(dtype)
            for x in self.shapes
        ]


def mlp(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x @ w) @ v


def train(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(p: Any) -> Tensor:
        return F.mse_loss(mlp(*p, x), y)

    value, grads = sf.value_and_grad(loss)((w, v))
    return w - 0.1 * grads[0], v - 0.1 * grads[1], value


def bucketed(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
    return sf.bucketed_grad(lambda p: F.mse_loss(mlp(*p, x), y), cap=200)((w, v))


def checkpointed(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
    inner = sf.checkpoint(lambda p: mlp(*p, x))
    return sf.value_and_grad(lambda p: F.mse_loss(inner(p), y))((w, v))


def attention(w: Tensor, v: Tensor, x: Tensor) -> Any:
    rows, length, width = x.shape

    def loss(p: Any) -> Tensor:
        heads = [y.view(rows, length, 2, -1).transpose(1, 2) for y in (x @ p[0]).split(width, -1)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return (out.transpose(1, 2).reshape(x.shape) @ p[1]).square().mean()

    return sf.value_and_grad(loss)((w, v))


def norm(w: Tensor, x: Tensor) -> Any:
    return sf.value_and_grad(lambda w: F.layer_norm(x, x.shape[-1:], w).pow(3).mean())(w)


def batch_norm(x: Tensor) -> Any:
    return sf.value_and_grad(lambda x: F.batch_norm(x, None, None, training=True).pow(3).sum())(x)


def labels(w: Tensor, x: Tensor, t: Tensor) -> Any:
    return sf.value_and_grad(lambda w: F.cross_entropy(x @ w, t))(w)


def lookup(e: Tensor, t: Tensor) -> Any:
    return sf.value_and_grad(lambda e: F.embedding(t, e).square().sum())(e)


def conv(w: Tensor, x: Tensor) -> Any:
    return sf.value_and_grad(lambda w: F.gelu(F.conv2d(x, w, padding=1)).square().sum())(w)


def recurrent(w: Tensor, x: Tensor) -> Any:
    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(carry @ w + row)
        return carry, carry.sum(-1)

    return sf.scan(body, torch.zeros_like(x[0]), x)


def orders(x: Tensor) -> Any:
    return *x.topk(3, -1), x.argmax(-1), x.sort(0)[0], x.cumsum(0), x.logsumexp(0), x.std(0)


def experts(r: Tensor, w: Tensor, x: Tensor) -> Any:
    def loss(p: Any) -> Tensor:
        values, chosen = torch.softmax(x @ p[0], -1).topk(2, -1)
        every = torch.einsum("td,edf->tef", x, p[1])
        rows = torch.gather(every, 1, chosen[..., None].expand(-1, -1, every.shape[-1]))
        return (rows * values[..., None]).sum(1).square().mean()

    return sf.value_and_grad(loss)((r, w))


def random(x: Tensor) -> Any:
    return F.dropout(x, 0.5).sum(0), sf.random.normal(sf.random.key(3), x.shape).to(x.dtype) * x


def branch(x: Tensor) -> Any:
    return sf.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, x).sum(0)


def extremes(x: Tensor) -> Any:
    return x.amax(0), x.amin(1), torch.softmax(x, 0), x.prod(0), torch.linalg.vector_norm(x)


def momentum(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v.abs() + 0.01 * g * g
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def pieces(w: Tensor, x: Tensor) -> Any:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return sf.psum(torch.tanh(x @ w), "tp")

    specs = (P("dp", "tp"), P("tp", None))
    return sf.shard_map(body, sf.current_mesh(), specs, P("dp", None))(x, w).sum(0)


TRAINED = ((7, 8), (8, 5), (7, 7), (7, 5))
ATTENDED = ((8, 24), (8, 8), (2, 8, 8))


def over(mesh: Mapping[str, int], *placements: Any, **options: Any) -> dict[str, Any]:
    return {"mesh": mesh, "in_placements": placements, **options}


EQUAL = {
    "data parallel": Case(train, TRAINED, over({"dp": 3}, None, None, BATCH, BATCH)),
    "tensor parallel": Case(train, TRAINED, over(GRID, COLUMNS, ROWS, BATCH, BATCH)),
    "fully sharded": Case(train, TRAINED, over({"dp": 3}, BATCH, BATCH, BATCH, BATCH)),
    "greedy": Case(train, TRAINED, over(GRID, ROWS, COLUMNS, None, BATCH, planner="greedy")),
    "buckets": Case(bucketed, TRAINED, over(GRID, COLUMNS, ROWS, BATCH, BATCH)),
    "sharded buckets": Case(bucketed, TRAINED, over({"dp": 2}, BATCH, BATCH, BATCH, BATCH)),
    "checkpoint": Case(checkpointed, TRAINED, over(GRID, COLUMNS, ROWS, BATCH, BATCH)),
    "heads": Case(attention, ATTENDED, over(GRID, P(None, "tp*3"), ROWS, BATCH)),
    "sequence": Case(attention, ATTENDED, over({"cp": 4}, None, None, P(None, "cp"))),
    "ring": Case(
        attention,
        ATTENDED,
        over({"cp": 2}, None, None, P(None, sf.zigzag("cp")), attention={"cp": "ring"}),
    ),
    "ulysses": Case(
        attention, ATTENDED, over({"cp": 2}, None, None, P(None, "cp"), attention={"cp": "ulysses"})
    ),
    "layer norm": Case(norm, ((6,), (5, 6)), over(GRID, None, P("dp", "tp"))),
    "batch norm": Case(batch_norm, ((7, 6),), over(GRID, P("dp", "tp"))),
    "labels": Case(labels, ((6, 10), (7, 6), 10), over(GRID, COLUMNS, BATCH, BATCH)),
    "lookup": Case(lookup, ((10, 4), 10), over(GRID, ROWS, BATCH)),
    "convolution": Case(conv, ((4, 3, 3, 3), (3, 3, 6, 5)), over(GRID, None, P("dp", None, "tp"))),
    "scan": Case(recurrent, ((4, 4), (5, 6, 4)), over(GRID, COLUMNS, P(None, "dp"))),
    "orders": Case(orders, ((7, 6),), over(GRID, P("dp", "tp"))),
    "experts": Case(experts, ((6, 4), (4, 6, 5), (7, 6)), over(GRID, None, ROWS, BATCH)),
    "random": Case(random, ((7, 6),), over(GRID, P("dp", "tp"))),
    "branch": Case(branch, ((7, 6),), over(GRID, P("dp", "tp"))),
    "extremes": Case(extremes, ((7, 6),), over(GRID, P("dp", "tp"))),
    "momentum": Case(momentum, ((7, 6),) * 4, over(GRID, *(P("dp", "tp"),) * 4)),
}


def planted(
    scale: float = 1.0,
    act: Callable[[Tensor], Tensor] = torch.relu,
    axis: int = -1,
    mask: int = 0,
    last: Callable[[Tensor], Tensor] = lambda h: h,
    count: float = 1.0,
    eps: float = 1e-5,
    sign: float = 1.0,
    rate: float = 0.1,
    power: float = 0.5,
    hidden: float = 1.0,
) -> Callable[..., Any]:
    """A training step with one number or op to be changed, each on a line of its own."""

    def step(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            h = x @ p[0]
            h = act(h)  # act
            h = h * scale  # scale
            mean = h.mean(axis, keepdim=True)  # axis
            variance = (h - mean).square().mean(-1, keepdim=True)
            variance = variance + eps  # eps
            h = (h - mean) / variance**power  # power
            scores = h @ h.T
            seen = torch.ones_like(scores).tril(mask)  # mask
            h = torch.softmax(torch.where(seen > 0, scores, -1e9), -1) @ h
            h = last(h)  # last

            def body(carry: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
                carry = torch.tanh(carry)
                carry = carry * hidden  # hidden
                return carry, carry.sum()

            h, _ = sf.scan(body, h, torch.zeros(2))
            out = h @ p[1]
            return (out - y).square().sum() / (out.numel() * count)  # count

        value, (g, k) = sf.value_and_grad(loss)((w, v))
        g = g * rate  # rate
        k = k * (0.1 * sign)  # sign
        return w - g, v - k, value

    return step


PLANTS: dict[str, dict[str, Any]] = {
    "act": {"act": F.gelu},
    "scale": {"scale": 1.02},
    "axis": {"axis": 0},
    "eps": {"eps": 0.1},
    "power": {"power": 0.45},
    "mask": {"mask": 1},
    "mask, one less": {"mask": -1},
    "last": {"last": torch.abs},
    "hidden": {"hidden": 1.05},
    "count": {"count": 1.05},
    "rate": {"rate": 0.11},
    "sign": {"sign": -1.0},
}
