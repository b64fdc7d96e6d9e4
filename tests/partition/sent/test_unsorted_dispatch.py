"""Rows that read the matrices of their experts by unsorted numbers travel as sorted ones do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import equal
from ranks import run_ranks
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

TOKENS, E, K = 10, 5, 2  # tokens; experts; of each token
D, HIDDEN = 6, 3
Fn = Callable[..., torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


X, UP, DOWN = drawn(TOKENS, D), drawn(E, D, HIDDEN), drawn(E, HIDDEN, D)
IDS = (torch.arange(TOKENS * K) * 3 % E).view(TOKENS, K)


def each(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1)


def layer(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts of given numbers."""
    rows, flat = x.repeat_interleave(K, 0), ids.reshape(-1)
    h = torch.tanh(each(rows, up, flat))
    return each(h, down, flat).view(len(x), K, D).sum(1)


def one_product(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
    return each(x.repeat_interleave(K, 0), up, ids.reshape(-1)).view(TOKENS, K, -1).sum(1)


def selected(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
    w = up.index_select(0, ids.reshape(-1))
    return torch.matmul(w.mT, x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)


def of_one(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
    """One expert for each token, and more ops on each row."""
    h = torch.relu(each(x, up, ids[:, 0]))
    y = torch.nn.functional.layer_norm(each(h, down, ids[:, 0]) + x, (D,))
    return torch.softmax(y, -1) * x


def as_they_come(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
    """Numbers of two dims, without a list of rows."""
    h = torch.nn.functional.silu(x[:, None, None] @ up[ids])
    return (h @ down[ids]).sum((1, 2))


def by_tokens(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
    """Matrices of experts are added for each token, which takes them to the tokens."""
    w = up[ids.reshape(-1)].view(TOKENS, K, D, HIDDEN).sum(1)
    return torch.bmm(x.unsqueeze(1), w).squeeze(1)


def of_two_dims(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
    return torch.einsum("td,tkdf->tf", x, up[ids])


def step(fn: Fn) -> Callable[..., Any]:
    return sf.value_and_grad(lambda *args: fn(*args).sin().sum(), argnums=(0, 1, 2))


ARGS = (UP, DOWN, X, IDS)
ON_EP = (P("ep"), P("ep"), P("ep"), P("ep"))


def sent(fn: Any, n: int, args: Any = ARGS, rows: Any = None) -> Counter[str]:
    """The kinds of collectives of a function; its values are those of one device."""
    with sf.fake_world(n):
        mesh = sf.make_mesh((n,), ("ep",))
        rows = {"ep": f"{n}x"} if rows is None else rows
        sharded = sf.shard(fn, mesh, ON_EP, backend="aten", rows=rows)
        equal(sf.full(sharded(*args)), fn(*args))
        return Counter(c.kind for c in sharded.lower(*args).collectives)


TRAVEL: dict[str, tuple[Fn, int]] = {  # with how many exchanges
    "two products": (layer, 4),
    "one product": (one_product, 4),
    "index_select": (selected, 3),  # the gradient of a sum is computed where it is read
    "one expert for each token": (of_one, 4),
    "numbers of two dims": (as_they_come, 4),
}


@pytest.mark.parametrize("form", TRAVEL)
@pytest.mark.parametrize("n", [2, 3, 7])
def test_rows_travel_in_the_order_of_their_tokens(form: str, n: int) -> None:
    fn, exchanges = TRAVEL[form]
    kinds = sent(step(fn), n)
    assert kinds["ragged_all_to_all"] == exchanges
    assert kinds["all_gather"] == 1  # of counts
    assert not kinds["reduce_scatter"]


@pytest.mark.parametrize("fn", [by_tokens, of_two_dims])
def test_matrices_do_not_travel_with_their_rows(fn: Fn) -> None:
    assert not sent(step(fn), 2)["ragged_all_to_all"]


@pytest.mark.parametrize("expert", [0, 3, E - 1])
def test_all_rows_may_go_to_one_expert(expert: int) -> None:
    assert sent(step(layer), 4, (UP, DOWN, X, torch.full_like(IDS, expert)))["ragged_all_to_all"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_may_have_few_bits(dtype: torch.dtype) -> None:
    assert sent(step(layer), 3, (UP, DOWN, X, IDS.to(dtype)))["ragged_all_to_all"] == 4


def test_more_rows_than_a_rank_takes_are_an_error_that_names_the_expert() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("ep",))
        sharded = sf.shard(step(layer), mesh, ON_EP, backend="aten", rows={"ep": 12})
        equal(sf.full(sharded(*ARGS)), step(layer)(*ARGS))
        with pytest.raises(
            sf.CapacityError, match="receives 20 rows for its experts, 20 of them for e"
        ):
            sharded(UP, DOWN, X, torch.full_like(IDS, 3))


def test_negative_numbers_count_from_the_last_expert() -> None:
    assert sent(step(layer), 3, (UP, DOWN, X, IDS - 3))["ragged_all_to_all"] == 4


def test_numbers_of_each_layer_may_be_views_of_their_own() -> None:
    def fn(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
        h = torch.tanh(each(x.repeat_interleave(K, 0), up, ids.reshape(-1)))
        return each(h, down, ids.reshape(-1)).view(TOKENS, K, D).sum(1)

    assert sent(step(fn), 2)["ragged_all_to_all"] == 4


def test_experts_may_be_the_second_dim_of_stacked_layers() -> None:
    def fn(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
        rows = x.repeat_interleave(K, 0)
        h = torch.einsum("rd,lrdf->lrf", rows, up[:, ids.reshape(-1)])
        return torch.einsum("lrf,rfd->rd", h.tanh(), down[ids.reshape(-1)])

    args = (torch.stack([UP, UP.sin()]), DOWN, X, IDS)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("ep",))
        spec = (P(None, "ep"), P("ep"), P("ep"), P("ep"))
        sharded = sf.shard(step(fn), mesh, spec, backend="aten", rows={"ep": "2x"})
        equal(sf.full(sharded(*args)), step(fn)(*args))
        kinds = Counter(c.kind for c in sharded.lower(*args).collectives)
    assert kinds["ragged_all_to_all"] == 3  # the gradient of a sum is computed at the experts


@pytest.mark.parametrize("number", [-E - 1, E])
def test_a_number_of_no_expert_is_an_error_before_a_row_is_sent(number: int) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("ep",))
        sharded = sf.shard(step(layer), mesh, ON_EP, backend="aten", rows={"ep": "2x"})
        wrong = IDS.clone()
        wrong[7, 1] = number
        with pytest.raises(
            sf.ShardError, match="1 rows have an expert number outside the valid range"
        ):
            sharded(UP, DOWN, X, wrong)


def test_fewer_bytes_decide_where_no_bound_is_given() -> None:
    many = (UP, DOWN, drawn(400, D), torch.arange(800).view(-1, K) % E)
    kinds = [sent(step(layer), 2, args, rows={}) for args in (many, ARGS)]
    assert [k["ragged_all_to_all"] for k in kinds] == [0, 4]


@pytest.mark.parametrize("change", ["checkpoint", "bucketed", "twice", "scan", "vmap"])
def test_rows_travel_under_other_transforms(change: str) -> None:
    loss = lambda *args: layer(*args).sin().sum()

    def twice(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
        return layer(up, down, layer(up, down, x, ids), ids.flip(0)).sin().sum()

    def scanned(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
        once = sf.checkpoint(lambda carry, k: (layer(up, down, carry, ids) * k, None))
        return sf.scan(once, x, torch.arange(1.0, 4.0, dtype=x.dtype))[0].sin().sum()

    def batch(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: Any) -> torch.Tensor:
        return sf.vmap(layer, (None, None, 0, None))(up, down, torch.stack([x, x + 1]), ids).sum()

    steps: dict[str, Any] = {
        "checkpoint": sf.value_and_grad(sf.checkpoint(loss), (0, 1, 2)),
        "bucketed": sf.bucketed_grad(loss, cap="1KB"),
        "twice": sf.value_and_grad(twice, (0, 1, 2)),
        "scan": sf.value_and_grad(scanned, (0, 1, 2)),
        "vmap": sf.value_and_grad(batch, (0, 1, 2)),
    }
    exchanges = sent(steps[change], 2)["ragged_all_to_all"]
    assert exchanges == {"checkpoint": 6, "bucketed": 3, "twice": 8, "scan": 15, "vmap": 0}[change]


def _results(fn: Fn, backend: str) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    mesh = sf.make_mesh((2,), ("ep",))
    sharded = sf.shard(step(fn), mesh, ON_EP, backend=backend, rows={"ep": "2x"})
    return [x.clone() for x in tree_leaves(sf.full(sharded(*ARGS)))]


@pytest.mark.parametrize(
    ("fn", "backend"), [(layer, "aten"), (layer, "inductor"), (as_they_come, "aten")]
)
def test_on_real_ranks_values_are_those_of_one_device(fn: Fn, backend: str) -> None:
    for real in run_ranks(2, _results, fn, backend):
        equal(real, step(fn)(*ARGS))
