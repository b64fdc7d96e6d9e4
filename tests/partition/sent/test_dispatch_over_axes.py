"""Experts that are sharded over several mesh axes: rows travel over one axis after the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import equal
from ranks import run_ranks

import shardfn as sf
from shardfn import P

D, HIDDEN, K = 6, 3, 2
Params = dict[str, torch.Tensor]
Form = Callable[[Params, torch.Tensor], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def params_of(experts: int) -> Params:
    return {
        "router": drawn(D, experts),
        "up": drawn(experts, D, HIDDEN),
        "down": drawn(experts, HIDDEN, D),
    }


def each(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The product of each row with the matrix of its expert."""
    return torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1)


def in_order(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert."""
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
    ids, order = torch.sort(ids.reshape(-1))
    y = each(torch.relu(each(x[order // K], p["up"], ids)), p["down"], ids)
    y = y * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // K, y)


def as_they_come(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Rows in the order of their tokens."""
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
    rows, ids = x.repeat_interleave(K, 0), ids.reshape(-1)
    y = each(torch.relu(each(rows, p["up"], ids)), p["down"], ids)
    return (y * weights.reshape(-1, 1)).view(-1, K, D).sum(1)


def of_one(p: Params, x: torch.Tensor) -> torch.Tensor:
    """All tokens go to one expert."""
    ids, order = torch.sort(torch.where(x[:, 0] > 100, 0, 1))
    y = each(torch.relu(each(x[order], p["up"], ids)), p["down"], ids)
    return torch.zeros_like(x).index_add(0, order, y)


FORMS: dict[str, Form] = {"sorted": in_order, "unsorted": as_they_come, "one": of_one}


def step(fn: Form) -> Callable[..., Any]:
    return sf.value_and_grad(lambda p, x: fn(p, x).sin().sum(), argnums=(0, 1))


def places(experts: P) -> dict[str, P]:
    return {"router": P(), "up": experts, "down": experts}


def sent(
    fn: Callable[..., Any],
    sizes: dict[str, int],
    experts: P,
    batch: P,
    rows: Any,
    *,
    of: tuple[int, int] = (8, 48),
    backend: str = "aten",
) -> Counter[tuple[str, str]]:
    """The collectives of a step by kind and axis; its values are those of one device."""
    p, x = params_of(of[0]), drawn(of[1], D)
    with sf.fake_world(math.prod(sizes.values())):
        mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
        sharded = sf.shard(fn, mesh, (places(experts), batch), backend=backend, rows=rows)
        equal(sf.full(sharded(p, x)), fn(p, x))
        return Counter((c.kind, c.axis) for c in sharded.lower(p, x).collectives)


MESHES = [
    ({"a": 2, "b": 2}, P(("a", "b")), P(("a", "b"))),
    ({"a": 4, "b": 2}, P(("a", "b")), P("a")),
    ({"a": 2, "b": 4}, P(("a", "b")), P()),
    ({"a": 3, "b": 2}, P(("a", "b")), P(("a", "b"))),
    ({"a": 2, "b": 2, "c": 2}, P(("a", "b", "c")), P(("a", "b", "c"))),
    ({"a": 2, "b": 2, "c": 2}, P(("a", "c")), P(("a", "b", "c"))),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "experts", "batch"), MESHES)
def test_rows_travel_over_each_axis_and_no_expert_is_gathered(
    form: str, sizes: dict[str, int], experts: P, batch: P
) -> None:
    rows = dict.fromkeys(experts.parts[0], 500)
    kinds = sent(step(FORMS[form]), sizes, experts, batch, rows)
    for axis in experts.parts[0]:
        assert kinds["ragged_all_to_all", axis] == 4  # there and back, and so for the gradients
        assert not kinds["reduce_scatter", axis]
    if batch == experts:
        gathers = [n for (kind, _), n in kinds.items() if kind == "all_gather"]
        assert sum(gathers) == len(experts.parts[0])  # of counts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", [(5, 50), (9, 48), (3, 24), (12, 7)])  # uneven; ranks without any
def test_experts_and_tokens_may_be_uneven(form: str, of: tuple[int, int]) -> None:
    both = P(("a", "b"))
    for sizes in ({"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 3, "b": 2}):
        sent(step(FORMS[form]), sizes, both, both, {"a": 500, "b": 500}, of=of)


def test_a_bound_of_one_axis_is_that_of_the_others() -> None:
    both = P(("a", "b"))
    for rows in ({"b": "4x"}, {"a": "4x"}):
        kinds = sent(step(in_order), {"a": 2, "b": 2}, both, both, rows, of=(8, 8))
        assert kinds["ragged_all_to_all", "a"] == kinds["ragged_all_to_all", "b"] == 4


def test_fewer_bytes_decide_over_how_many_axes_rows_travel() -> None:
    both, few, many = P(("a", "b")), (8, 16), (8, 4000)
    kinds = [sent(step(in_order), {"a": 2, "b": 2}, both, both, None, of=x) for x in (few, many)]
    axes = [{axis for kind, axis in x if kind == "ragged_all_to_all"} for x in kinds]
    assert axes == [{"a", "b"}, set()]


def _to_expert(number: int) -> tuple[Params, torch.Tensor]:
    """A router that sends all tokens to one expert, and its neighbour."""
    p = params_of(8)
    router = torch.zeros(D, 8, dtype=torch.float64)
    router[:, number] = 9
    router[:, number ^ 1] = 8
    return {**p, "router": router}, drawn(48, D).abs()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": 40, "b": 90}, "rank 1 of the axis receives 48 rows for its experts, 24 of them"),
        (
            {"a": 96, "b": 40},
            "another coordinate of the mesh receives 96 rows for its experts, the most",
        ),
    ],
)
def test_more_rows_than_a_rank_takes_on_any_axis_are_an_error(rows: Any, said: str) -> None:
    p, x = _to_expert(6)
    both = P(("a", "b"))
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        sharded = sf.shard(in_order, mesh, (places(both), both), backend="aten", rows=rows)
        with pytest.raises(sf.CapacityError) as error:
            sharded(p, x)
    assert said in str(error.value)
    assert "for expert 6" in str(error.value)


@pytest.mark.parametrize("change", ["checkpoint", "bucketed", "vmap", "scan"])
def test_rows_travel_under_other_transforms(change: str) -> None:
    loss = lambda p, x: in_order(p, x).sin().sum()
    both = P(("a", "b"))
    fns = {
        "checkpoint": sf.value_and_grad(sf.checkpoint(loss)),
        "bucketed": sf.bucketed_grad(loss, 64),
        "vmap": sf.value_and_grad(lambda p, x: sf.vmap(loss, (None, 0))(p, x.view(2, -1, D)).sum()),
        "scan": sf.value_and_grad(
            lambda p, x: sf.scan(lambda x, _: (x + in_order(p, x), None), x, length=3)[0].sum()
        ),
    }
    kinds = sent(fns[change], {"a": 2, "b": 2}, both, both, {"a": 900, "b": 900})
    if change in ("checkpoint", "bucketed"):
        assert kinds["ragged_all_to_all", "a"] == kinds["ragged_all_to_all", "b"] >= 3


def _on_four_ranks(backend: str = "aten") -> list[torch.Tensor]:
    torch.set_num_threads(1)
    mesh = sf.make_mesh((2, 2), ("a", "b"))
    both = P(("a", "b"))
    results: list[torch.Tensor] = []
    for form in FORMS.values():
        p, x = params_of(5), drawn(26, D)
        fn = step(form)
        sharded = sf.shard(fn, mesh, (places(both), both), backend=backend, rows={"b": 200})
        found = sf.full(sharded(p, x))
        equal(found, fn(p, x))
        results += torch.utils._pytree.tree_leaves(found)
    return results


def test_on_four_real_ranks_values_are_those_of_simulated_ones() -> None:
    with sf.fake_world(4):
        simulated = _on_four_ranks()
    for real in run_ranks(4, _on_four_ranks):
        assert all(torch.equal(a, b) for a, b in zip(real, simulated, strict=True))


def test_compiled_ranks_exchange_rows() -> None:
    run_ranks(4, _on_four_ranks, "inductor")


def test_a_strategy_may_have_the_axes_of_the_experts() -> None:
    p = params_of(8)
    both = P(("dp", "ep"))
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "ep"))
        plan = sf.strategy("expert", p, mesh, axis=("dp", "ep"), base=places(both), rows="2x")
        assert plan.batch == both and plan.params["up"] == both
        assert plan.rows == {"dp": "2x", "ep": "2x"}
        placements = (plan.params, plan.batch)
        sharded = sf.shard(step(in_order), mesh, placements, backend="aten", rows={"ep": 200})
        x = drawn(48, D)
        equal(sf.full(sharded(p, x)), step(in_order)(p, x))
