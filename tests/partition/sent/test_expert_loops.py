"""A Python loop over experts whose weights are sharded: tokens are sent, no weights of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks
from stagings import counts
from torch.utils._pytree import tree_map

import shardfn as sf
from shardfn import P

TOKENS, E, K = 13, 6, 2  # tokens; experts; of each token
D, HIDDEN = 6, 10
Params = dict[str, torch.Tensor]
Form = Callable[[Params, torch.Tensor], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64) / 2


X = drawn(TOKENS, D)
PARAMS = {
    "router": drawn(D, E),
    "up": drawn(E, D, HIDDEN),
    "down": drawn(E, HIDDEN, D),
    "wide": drawn(E, D, 2 * HIDDEN),
    "bias": drawn(E, HIDDEN),
    "norm": drawn(E, D),
}


def gate(p: Params, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ p["router"], -1)


def ffn(p: Params, x: torch.Tensor, e: int) -> torch.Tensor:
    return torch.relu(x @ p["up"][e]) @ p["down"][e]


def added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


def gated(expert: Callable[[Params, torch.Tensor, int], torch.Tensor]) -> Form:
    """The sum over experts, each with its share of the gate."""

    def layer(p: Params, x: torch.Tensor) -> torch.Tensor:
        y, share = torch.zeros_like(x), gate(p, x)
        for e in range(E):
            y = y + share[..., e, None] * expert(p, x, e)
        return y

    layer.__name__ = expert.__name__
    return layer


def by_masks(p: Params, x: torch.Tensor) -> torch.Tensor:
    weights, ids = torch.topk(gate(p, x), K, -1)
    y = torch.zeros_like(x)
    for e in range(E):
        y = y + (weights * (ids == e)).sum(-1, keepdim=True) * ffn(p, x, e)
    return y


def by_where(p: Params, x: torch.Tensor) -> torch.Tensor:
    weights, ids = torch.topk(gate(p, x), K, -1)
    y = torch.zeros_like(x)
    for e in reversed(range(E)):
        here = ids.int() == e
        y += torch.where(here.any(-1, keepdim=True), ffn(p, x, e), 0.0) * (weights * here).sum(
            -1, keepdim=True
        )
    return y


def by_sum(p: Params, x: torch.Tensor) -> torch.Tensor:
    every = zip(gate(p, x).unbind(-1), p["up"], p["down"], strict=True)
    return added(g[:, None] * (torch.tanh(x @ up) @ down) for g, up, down in every)


def by_slices(p: Params, x: torch.Tensor) -> torch.Tensor:
    y: Any = 1.5
    share = gate(p, x)
    for e in range(E):
        h = torch.einsum("td,kdf->tf", x, p["up"][e : e + 1])
        y = y + share[:, e : e + 1] * (h @ p["down"][e])
    return y


def stacked(p: Params, x: torch.Tensor) -> torch.Tensor:
    ys = torch.stack([ffn(p, x, e) for e in range(E)], 1)
    return torch.einsum("te,ted->td", gate(p, x), ys) + ys.amax(1)


def joined(p: Params, x: torch.Tensor) -> torch.Tensor:
    ys = torch.cat([ffn(p, x, e) for e in range(E)], -1).view(x.shape[0], E, -1)
    return (ys * gate(p, x)[..., None]).sum(1)


def with_loads(p: Params, x: torch.Tensor) -> torch.Tensor:
    weights, ids = torch.topk(gate(p, x), K, -1)
    y, loss, loads = torch.zeros_like(x), 0.0, []
    for e in range(E):
        here = ids == e
        loads.append(here.double().mean())
        out = ffn(p, x, e)
        loss = loss + out.square().mean()
        y = y + (weights * here).sum(-1, keepdim=True) * out
    return y + torch.stack(loads).square().sum() * x + loss


@gated
def linear(p: Params, x: torch.Tensor, e: int) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, p["up"][e].t(), p["bias"][e])), p["down"][e].mT)


@gated
def swiglu(p: Params, x: torch.Tensor, e: int) -> torch.Tensor:
    a, b = (x @ p["wide"][e]).chunk(2, -1)
    return (F.silu(a) * b) @ p["down"][e]


@gated
def normed(p: Params, x: torch.Tensor, e: int) -> torch.Tensor:
    return F.layer_norm(ffn(p, x, e), (D,), p["norm"][e])


@gated
def recomputed(p: Params, x: torch.Tensor, e: int) -> torch.Tensor:
    return sf.checkpoint(lambda up, down, x: torch.relu(x @ up) @ down)(p["up"][e], p["down"][e], x)


@gated
def tokens_in_batches(p: Params, x: torch.Tensor, e: int) -> torch.Tensor:
    return ffn(p, x.unsqueeze(0), e).squeeze(0)


def all_recomputed(p: Params, x: torch.Tensor) -> torch.Tensor:
    return sf.checkpoint(by_masks)(p, x)


def two_layers(p: Params, x: torch.Tensor) -> torch.Tensor:
    return by_masks(p, torch.tanh(by_sum(p, x)))


def over_samples(p: Params, x: torch.Tensor) -> torch.Tensor:
    return sf.vmap(by_masks, (None, 0))(p, torch.stack([x, x.cos()])).sum(0)


FORMS = [
    by_masks, by_where, by_sum, by_slices, stacked, joined, with_loads, linear, swiglu, normed,
    recomputed, tokens_in_batches, all_recomputed, two_layers, over_samples,
]  # fmt: skip


# Where one expert counts by itself, or turns depend on each other, weights are gathered.


def all_but_one(p: Params, x: torch.Tensor) -> torch.Tensor:
    return added(gate(p, x)[:, e, None] * ffn(p, x, e) for e in range(E - 1))


def one_alone(p: Params, x: torch.Tensor) -> torch.Tensor:
    ys = [ffn(p, x, e) for e in range(E)]
    return torch.stack(ys).sum(0) + ys[2].sin()


def another_op(p: Params, x: torch.Tensor) -> torch.Tensor:
    ys = [torch.sin(y) if e == 3 else torch.cos(y) for e in range(E) for y in [ffn(p, x, e)]]
    return torch.stack(ys).sum(0)


def another_order(p: Params, x: torch.Tensor) -> torch.Tensor:
    ys = [ffn(p, x, e) for e in range(E)]
    ys[0], ys[1] = ys[1], ys[0]
    return torch.einsum("te,ted->td", gate(p, x), torch.stack(ys, 1))


def one_twice(p: Params, x: torch.Tensor) -> torch.Tensor:
    return added(ffn(p, x, e) for e in [*range(E), 0])


def in_a_row(p: Params, x: torch.Tensor) -> torch.Tensor:
    for e in range(E):
        x = x + ffn(p, x, e)
    return x


def other_numbers(p: Params, x: torch.Tensor) -> torch.Tensor:
    return added(ffn(p, x, e) * (e + 1.0) for e in range(E))


def matrices_of_others(p: Params, x: torch.Tensor) -> torch.Tensor:
    return added(torch.relu(x @ p["up"][e]) @ p["down"][e - 1] for e in range(E))


GATHERED = [
    all_but_one, one_alone, another_op, another_order, one_twice, in_a_row, other_numbers,
    matrices_of_others,
]  # fmt: skip

# sizes of the axes dp and ep; placements of the experts and of the tokens
MESHES = [
    ((1, 4), P("ep"), P("ep")),
    ((1, 4), P("ep"), P()),
    ((2, 2), P("ep"), P(("dp", "ep"))),
    ((2, 2), P(("dp", "ep")), P(("dp", "ep"))),
    ((2, 2), P("ep", "dp"), P("dp")),
    ((3, 1), P("ep"), P("dp")),
]


def step(form: Form) -> Callable[..., Any]:
    def loss_and_gradients(p: Params, x: torch.Tensor) -> Any:
        return sf.value_and_grad(lambda p, x: form(p, x).square().sum(), argnums=(0, 1))(p, x)

    return loss_and_gradients


def placed(form: Form, mesh: Any, experts: P, tokens: P) -> Any:
    vectors = P("ep") if experts == P("ep", "dp") else experts
    params = {"router": P(), "bias": vectors, "norm": vectors}
    params |= dict.fromkeys(("up", "down", "wide"), experts)
    return sf.shard(step(form), mesh, (params, tokens))


def whole(results: Any) -> Any:
    return tree_map(sf.full, results)


def weights_sent(lowered: Any) -> Iterator[Any]:
    """The gathers of weights; those of tokens have fewer bytes."""
    least = PARAMS["up"].nbytes
    return (c for c in lowered.collectives if c.kind == "all_gather" and c.nbytes >= least)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_experts_stay_on_their_ranks(form: Form) -> None:
    with sf.fake_world(4):
        fn = placed(form, sf.make_mesh((2, 2), ("dp", "ep")), P("ep"), P(("dp", "ep")))
        equal(whole(fn(PARAMS, X)), step(form)(PARAMS, X))
        assert not [*weights_sent(fn.lower(PARAMS, X))]


@pytest.mark.parametrize("form", GATHERED, ids=lambda form: form.__name__)
def test_turns_that_differ_are_no_loop(form: Form) -> None:
    with sf.fake_world(4):
        fn = placed(form, sf.make_mesh((2, 2), ("dp", "ep")), P("ep"), P(("dp", "ep")))
        equal(whole(fn(PARAMS, X)), step(form)(PARAMS, X))
        assert [*weights_sent(fn.lower(PARAMS, X))]


@pytest.mark.parametrize("form", [by_masks, swiglu, joined], ids=lambda form: form.__name__)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_placement(form: Form, mesh: tuple[tuple[int, ...], P, P]) -> None:
    sizes, experts, tokens = mesh
    with sf.fake_world(math.prod(sizes)):
        fn = placed(form, sf.make_mesh(sizes, ("dp", "ep")), experts, tokens)
        equal(whole(fn(PARAMS, X)), step(form)(PARAMS, X))


def test_global_tensors_and_dtensors_of_one_placement_share_a_program() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "ep"))
        fn = placed(by_masks, mesh, P("ep"), P(("dp", "ep")))
        fn.compile(PARAMS, X)
        before = counts["partitions"]
        fn(PARAMS, sf.distribute(X, mesh, P(("dp", "ep"))))
        assert counts["partitions"] == before


def _on_ranks() -> None:
    fn = placed(by_masks, sf.make_mesh((2, 2), ("dp", "ep")), P("ep"), P(("dp", "ep")))
    equal(whole(fn(PARAMS, X)), step(by_masks)(PARAMS, X))


def test_on_four_real_ranks() -> None:
    run_ranks(4, _on_ranks)
