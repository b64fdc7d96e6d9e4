"""Experts that read their tokens sorted by expert: each rank sorts its own, and data parallel
sends no token. Where some op tells the order of the sorted tokens, they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks

import shardfn as sf
from shardfn import P

TOKENS, E, K = 10, 4, 2  # tokens; experts; of each token
D, HIDDEN = 6, 5
Params = dict[str, torch.Tensor]
Form = Callable[[Params, torch.Tensor], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


X = drawn(TOKENS, D)
PARAMS = {
    "router": drawn(D, E),
    "up": drawn(E, D, HIDDEN),
    "down": drawn(E, HIDDEN, D),
    "bias": drawn(E, HIDDEN),
}


def chosen(p: Params, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the experts of each token, and their numbers (TOKENS * K,)."""
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
    return weights.reshape(-1), ids.reshape(-1)


def each(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The product of each row with the matrix of its expert."""
    return torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1)


def inverse(perm: torch.Tensor) -> torch.Tensor:
    inverted = torch.empty_like(perm)
    inverted[perm] = torch.arange(perm.size(0))
    return inverted


def back(rows: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Rows in their own order, those of each token added."""
    return rows[inverse(perm)].view(-1, K, rows.shape[-1]).sum(1)


def by_inverse(p: Params, x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's models have it, with a bias of each expert."""
    weights, ids = chosen(p, x)
    ids, perm = torch.sort(ids)
    h = F.silu(each(x[perm // K], p["up"], ids)) + p["bias"][ids]
    y = each(h, p["down"], ids) * weights[perm].unsqueeze(-1)
    return back(y, perm)


def by_adding(p: Params, x: torch.Tensor) -> torch.Tensor:
    weights, ids = chosen(p, x)
    ids, perm = torch.sort(ids, descending=True, stable=True)
    h = F.gelu(each(x.index_select(0, perm // K), p["up"], ids))
    h = F.layer_norm(h - h.mean(0), (HIDDEN,))
    y = each(h, p["down"], ids) * weights[perm][:, None]
    return torch.zeros_like(x).index_add(0, perm // K, y)


def by_scattering(p: Params, x: torch.Tensor) -> torch.Tensor:
    """As torchtitan has it."""
    weights, ids = chosen(p, x)
    perm = torch.argsort(ids, stable=True)
    token = (perm // K).reshape(-1, 1).expand(-1, D)
    h = F.relu(each(torch.gather(x, 0, token), p["up"], ids[perm]))
    y = each(h, p["down"], ids[perm]) * weights[perm].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, token, y)


def by_two_sorts(p: Params, x: torch.Tensor) -> torch.Tensor:
    weights, ids = chosen(p, x)
    perm = torch.argsort(ids)
    y = torch.tanh(x[perm // K]) * weights[perm][:, None]
    return by_inverse(p, y[torch.argsort(perm)].view(-1, K, D).sum(1))


FORMS: tuple[Form, ...] = (by_inverse, by_adding, by_scattering, by_two_sorts)


def step(fn: Form) -> Callable[..., Any]:
    loss = lambda p, x: fn(p, x).sin().sum()
    return sf.value_and_grad(loss, argnums=(0, 1))


def sent(fn: Callable[..., Any], sizes: dict[str, int], *args: Any, **placed: P) -> list[Any]:
    """The collectives of a step, whose values are those of one device."""
    with sf.fake_world(math.prod(sizes.values())):
        mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
        where = {name: placed.get(name, P()) for name in args[0]}
        batch = placed.get("batch", P("dp"))
        places = (where, batch)
        sharded = sf.shard(fn, mesh, places, backend="aten", implicit_comm="allow")
        equal(sf.full(sharded(*args)), fn(*args))
        return list(sharded.lower(*args).collectives)


# 3: uneven; 16: ranks without a token
@pytest.mark.parametrize(("fn", "ranks"), [*((fn, 3) for fn in FORMS), (by_inverse, 16)])
def test_data_parallel_sends_gradients_alone(fn: Form, ranks: int) -> None:
    collectives = sent(step(fn), {"dp": ranks}, PARAMS, X)
    assert {c.kind for c in collectives} == {"all_reduce"}
    one_each = len(PARAMS) + 1  # and the loss
    of_means = 2 * HIDDEN * X.itemsize  # a mean over rows, and its gradient
    activations = [c for c in collectives if c.implicit and c.nbytes > of_means]
    assert len([c for c in collectives if not c.implicit]) <= one_each
    assert not activations


def test_two_axes_may_shard_the_tokens_or_one_of_them_the_experts() -> None:
    both = sent(step(by_inverse), {"dp": 2, "tp": 2}, PARAMS, X, batch=P(("dp", "tp")))
    assert {c.kind for c in both} == {"all_reduce"}
    hidden = {"up": P(None, None, "tp"), "down": P(None, "tp"), "bias": P(None, "tp")}
    over_tp = [
        c for c in sent(step(by_inverse), {"dp": 2, "tp": 2}, PARAMS, X, **hidden) if c.axis == "tp"
    ]
    assert {c.kind for c in over_tp} == {"all_reduce"}


def test_grouped_products_of_torch_send_gradients_alone() -> None:
    """Small integers, which bfloat16 adds exactly."""
    whole = lambda *shape: drawn(*shape).round().clamp(-2, 2)
    params = {"router": PARAMS["router"], "up": whole(E, 16, 8), "down": whole(E, 8, 16)}
    x = whole(TOKENS, 16)

    def experts(p: Params, x: torch.Tensor) -> torch.Tensor:
        _, ids = chosen({"router": PARAMS["router"]}, x[:, :D])
        ids, perm = torch.sort(ids)
        counts = torch.histc(ids.float(), E, 0, E - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        of = lambda x, w: torch.ops.aten._grouped_mm(x.bfloat16(), p[w].bfloat16(), ends)
        y = of(of(x[perm // K], "up").clamp(-2, 2), "down").double()
        return back(y, perm) + counts.sum()

    loss = lambda p, x: experts(p, x).clamp(-3, 3).sum()
    for fn in (experts, sf.grad(loss)):
        collectives = sent(fn, {"dp": 3}, params, x)
        assert {c.kind for c in collectives} <= {"all_reduce"}


def of_sorted(change: Callable[..., torch.Tensor]) -> Form:
    """Sorted rows, changed and put back."""

    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        _, ids = chosen(p, x)
        ids, perm = torch.sort(ids)
        return back(change(x[perm // K], perm, x), perm)

    return fn


COUNT = torch.arange(TOKENS * K)
ROWS = drawn(TOKENS * K, D)
TELLS_THE_ORDER: dict[str, Callable[..., torch.Tensor]] = {
    "sums of all rows before": lambda y, perm, x: y.cumsum(0),
    "a maximum over rows": lambda y, perm, x: y.softmax(0),
    "the next row": lambda y, perm, x: y - y.roll(1, 0),
    "the first row": lambda y, perm, x: y - y[0],
    "unsorted rows": lambda y, perm, x: y + x.repeat_interleave(K, 0),
    "numbers of sorted rows": lambda y, perm, x: y * COUNT[:, None],
    "pairs of sorted rows": lambda y, perm, x: y.view(-1, 2 * D).sin().view(-1, D),
    "arithmetic on places": lambda y, perm, x: y * (perm % 3)[:, None],
    "another order": lambda y, perm, x: y[perm],
    "another sort": lambda y, perm, x: y[inverse(torch.argsort(x.repeat(2, 1)[:, 0]))],
    "random numbers": lambda y, perm, x: (
        y * sf.random.bernoulli(sf.random.key(3), 0.5, (TOKENS * K, D))
    ),
    "products of places": lambda y, perm, x: (y @ y.T) @ ROWS,
}


@pytest.mark.parametrize("change", TELLS_THE_ORDER)
def test_rows_are_gathered_where_an_op_tells_their_order(change: str) -> None:
    fn = of_sorted(TELLS_THE_ORDER[change])
    collectives = sent(step(fn), {"dp": 3}, PARAMS, X)
    assert "all_gather" in {c.kind for c in collectives}


def _on_two_ranks() -> None:
    """Gradients in buckets, and by `loss.backward()`, on real ranks."""
    torch.set_num_threads(1)
    mesh = sf.make_mesh((2,), ("dp",))
    x = X[:7]  # 7 tokens over 2 ranks
    wanted = sf.grad(lambda p: by_inverse(p, x).sin().sum())(PARAMS)
    loss = lambda p, x: by_inverse(p, x).sin().sum()
    bucketed = sf.bucketed_grad(loss, cap="1KB")
    train = sf.shard(bucketed, mesh, (P(), P("dp")), backend="aten")
    equal(sf.full(train(PARAMS, x)[1]), wanted)
    placed = {k: v.requires_grad_() for k, v in sf.distribute(PARAMS, mesh, P()).items()}
    by_call = sf.shard(loss, mesh, (P(), P("dp")), backend="aten")
    by_call(placed, x).backward()
    equal(sf.full({k: v.grad for k, v in placed.items()}), wanted)


def test_on_two_real_ranks_gradients_are_those_of_one_device() -> None:
    run_ranks(2, _on_two_ranks)
