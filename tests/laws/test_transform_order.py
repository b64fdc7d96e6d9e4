"""Transforms in any order: every ordered pair, and a fixed hundred of triples, equal
torch.func's composition on one device.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(9)
X = torch.randn(6, 4, generator=G, dtype=F64) / 2
WORLDS: dict[str, Any] = {
    "2": ((2,), P("a")),
    "3": ((3,), P(None, "a")),
    "2 x 4": ((2, 4), P("a", "b")),
    "8": ((8,), P("a")),
}
Shaped = Callable[[Tensor], Tensor]  # of (6, 4) tensors

OURS: dict[str, Callable[[Shaped], Shaped]] = {
    "shard": lambda f: sf.shard(f, in_placements=P("a"), backend="aten"),
    "grad": lambda f: sf.grad(lambda x: f(x).square().sum()),
    "vmap": lambda f: sf.vmap(lambda a: f(X * a)[0]),
    "jvp": lambda f: lambda x: sf.jvp(f, (x,), (x + 1,))[1],
    "checkpoint": sf.checkpoint,
    "scan": lambda f: (
        lambda x: sf.scan(
            lambda c, k: (f(c) * k / 4, c[0]), x, torch.tensor([1.0, 2.0], dtype=F64)
        )[0]
    ),
    "shard_map": lambda f: (
        lambda x: sf.shard_map(
            lambda y: y + sf.psum(y, "a"), in_placements=P(None, None), out_placements=P()
        )(f(x))
    ),
    "bucketed_grad": lambda f: lambda x: sf.bucketed_grad(lambda x: f(x).square().sum())(x)[1],
}


def repeated(f: Shaped) -> Shaped:
    return lambda x: f(f(x) * 1.0 / 4) * 2.0 / 4


PLAIN: dict[str, Callable[[Shaped, int], Shaped]] = {
    "shard": lambda f, n: f,
    "grad": lambda f, n: torch.func.grad(lambda x: f(x).square().sum()),
    "vmap": lambda f, n: torch.func.vmap(lambda a: f(X * a)[0]),
    "jvp": lambda f, n: lambda x: torch.func.jvp(f, (x,), (x + 1,))[1],
    "checkpoint": lambda f, n: f,
    "scan": lambda f, n: repeated(f),
    "shard_map": lambda f, n: lambda x: (n + 1) * f(x),  # the ranks of axis a, and the value itself
    "bucketed_grad": lambda f, n: torch.func.grad(lambda x: f(x).square().sum()),
}
FUNCTIONS: dict[str, Shaped] = {
    "pointwise": lambda x: torch.sin(x) * x / 4,
    "normalised": lambda x: torch.log_softmax(x, -1) * torch.tanh(x) / 4,
    "attending": lambda x: torch.softmax(x @ x.mT, -1) @ x / 4,
}
PAIRS = [(*pair, name) for pair in itertools.product(OURS, OURS) for name in FUNCTIONS]


def by_hash(text: Any) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


TRIPLES = sorted(itertools.product(OURS, OURS, OURS), key=by_hash)[:100]
COMBINED = [((outer, inner), name) for outer, inner, name in PAIRS]
COMBINED += [(triple, list(FUNCTIONS)[i % 3]) for i, triple in enumerate(TRIPLES)]


def composed(table: Any, order: tuple[str, ...], fn: Shaped, *rest: Any) -> Shaped:
    for name in reversed(order):
        fn = table[name](fn, *rest)
    return fn


def check(order: tuple[str, ...], function: str, sizes: tuple[int, ...], placement: Any) -> None:
    wanted = composed(PLAIN, order, FUNCTIONS[function], sizes[0])(X)
    mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
    got = sf.full(
        sf.shard(composed(OURS, order, FUNCTIONS[function]), mesh, placement, backend="aten")(X)
    )
    assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("order", "function"), COMBINED, ids=lambda x: x if isinstance(x, str) else " of ".join(x)
)
def test_any_order_equals_torch_func(order: tuple[str, ...], function: str) -> None:
    sizes, placement = WORLDS[list(WORLDS)[int(by_hash((order, function)), 16) % len(WORLDS)]]
    with sf.fake_world(torch.Size(sizes).numel()):
        check(order, function, sizes, placement)


def sampled() -> list[str]:
    """Twelve of them on real ranks; returns those that went wrong."""
    wrong = []
    for order, function in sorted(set(COMBINED), key=by_hash)[:12]:
        try:
            check(order, function, (2,), P("a"))
        except AssertionError as error:
            wrong.append(f"{order} {function}: {error}")
    return wrong


def test_a_sample_on_two_gloo_processes() -> None:
    assert run_ranks(2, sampled) == [[], []]
