"""Compiled gradients of a tensor that lookups and other ops read are those of eager torch: a kernel
that reads the result of a scatter runs after the scatter (wrong in torch.compile of torch 2.13).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(5)
X = torch.randn(6, 4, dtype=torch.float64, generator=G)
AT = torch.randint(0, 6, (9,), generator=G)
ROWS = torch.randint(0, 6, (5, 4), generator=G)
MASK = torch.rand(6, 4, generator=G) > 0.5
ZEROS = torch.zeros(3, 4, dtype=torch.float64)

LOOKUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda x: F.embedding(AT, x),
    "index": lambda x: x[AT].tanh(),
    "two indices": lambda x: x[AT, AT % 4],
    "gather": lambda x: x.gather(0, ROWS[:, :3]),
    "index_select": lambda x: x.index_select(1, AT % 4),
    "take": lambda x: x.take(AT),
    "index_add": lambda x: ZEROS.index_add(0, AT[:6] % 3, x),
    "index_put": lambda x: x.index_put((AT, AT % 4), x[AT, 0], accumulate=True),
    "scatter": lambda x: ZEROS.scatter_reduce(0, ROWS[:3] % 3, x[:3], "sum"),
    "bag": lambda x: F.embedding_bag(AT, x, torch.tensor([0, 4]), mode="sum"),
    "pad": lambda x: F.pad(x[None, None], (1, 2, 1, 0), "reflect"),
    "sorted": lambda x: x[x[:, 0].argsort()],
    "pool": lambda x: F.max_pool2d(x[None], 2, 1),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(0).square(),
    "logsumexp": lambda x: x.logsumexp(0),
    "slice": lambda x: x[1:3],
    "square": lambda x: x * x,
    "sum": lambda x: x.sum(0).square(),
    "relu": lambda x: x.relu(),
    "roll": lambda x: x.roll(1, 0) * x,
    "where": lambda x: torch.where(MASK, x, x.flip(0)),
    "cumsum": lambda x: x.cumsum(0),
    "product": lambda x: x @ x.T,
    "max": lambda x: x.max(1).values,
}


def loss_of(names: Any) -> Callable[[Tensor], Tensor]:
    every = LOOKUPS | OTHERS

    def loss(x: Tensor) -> Tensor:
        total = x.sum() * 0
        for name in names:
            out = every[name](x)
            weight = torch.arange(1, out.numel() + 1, dtype=out.dtype).reshape(out.shape)
            total = total + (out * (0.37 * weight).cos()).sum()
        return total

    return loss


def drawn(seed: int) -> list[str]:
    """Some lookups and some other ops, in an order."""
    draw = random.Random(seed)
    lookups, others = draw.randint(1, 5), draw.randint(3, 9)
    names = draw.sample([*LOOKUPS], lookups) + draw.sample([*OTHERS], others)
    return draw.sample(names, len(names))


KNOWN = [
    ["embedding", "softmax", "slice", "square", "sum", "relu", "roll"],
    ["index_select", "logsumexp", "where", "pad", "index_add"],
]
PROGRAMS = [*KNOWN, *map(drawn, range(40))]


@pytest.mark.parametrize("k", range(len(PROGRAMS)))
def test_compiled_gradients_are_those_of_eager_torch(k: int) -> None:
    loss = loss_of(PROGRAMS[k])
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    assert_close(sf.grad(sf.jit(loss, backend="aten"))(X), wanted)
    assert_close(sf.jit(sf.grad(loss), backend="inductor")(X), wanted)
    if k < len(KNOWN):
        x.grad = None
        sf.jit(loss, backend="inductor")(x).backward()
        assert_close(x.grad, wanted)


@pytest.mark.parametrize("names", KNOWN, ids=", ".join)
def test_on_a_mesh(names: list[str]) -> None:
    loss = loss_of(names)
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        grad = sf.shard(sf.grad(loss), mesh, (P("dp"),), backend="inductor")
        assert_close(sf.full(grad(X)), wanted)
