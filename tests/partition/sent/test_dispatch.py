"""Experts that are sharded: the rows of tokens travel to the ranks of their experts and back, and
no weight of an expert is gathered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

pytest.importorskip("transformers.integrations.moe")  # it registers grouped_mm_fallback

TOKENS, E, K = 10, 5, 2  # tokens; experts; of each token
D, HIDDEN = 6, 3
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
    "shared": drawn(D, D),
}
EXPERTS = ("up", "down", "bias")


def chosen(p: Params, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the experts of each token, and their numbers (TOKENS * K,)."""
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
    return weights.reshape(-1), ids.reshape(-1)


def each(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The product of each row with the matrix of its expert."""
    return torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1)


def grouped(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same, of rows sorted by expert, as the transformers library has it."""
    counts = torch.histc(ids.double(), E, 0, E - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


def back(rows: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Rows in their own order, those of each token added."""
    inverted = torch.empty_like(perm)
    inverted[perm] = torch.arange(perm.size(0))
    return rows[inverted].view(-1, K, rows.shape[-1]).sum(1)


def by_products(product: Callable[..., torch.Tensor], descending: bool = False) -> Form:
    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        weights, ids = chosen(p, x)
        ids, perm = torch.sort(ids, descending=descending)
        h = F.silu(product(x[perm // K], p["up"], ids)) + p["bias"][ids]
        y = product(h, p["down"], ids) * weights[perm].unsqueeze(-1)
        return back(y, perm) + x @ p["shared"]

    return fn


def by_scattering(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Tokens are weighted first, and added to where they came from."""
    weights, ids = chosen(p, x)
    perm = torch.argsort(ids, stable=True)
    token = (perm // K).reshape(-1, 1).expand(-1, D)
    own = torch.gather(x, 0, token) * weights[perm].reshape(-1, 1)
    y = each(F.relu(each(own, p["up"], ids[perm])), p["down"], ids[perm])
    return torch.zeros_like(x).scatter_add(0, token, y)


def unsorted(product: Callable[..., torch.Tensor]) -> Form:
    """Rows in the order of their tokens, each of which reads its matrix."""

    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        weights, ids = chosen(p, x)
        h = F.silu(product(x.repeat_interleave(K, 0), p["up"], ids)) + p["bias"][ids]
        y = product(h, p["down"], ids) * weights.unsqueeze(-1)
        return y.view(-1, K, D).sum(1) + x @ p["shared"]

    return fn


def einsum(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.einsum("rd,rdf->rf", x, w[ids])


def of_two_dims(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Matrices by the numbers as they come, of tokens and of their choices."""
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
    h = F.silu(x[:, None, None] @ p["up"][ids] + p["bias"][ids].unsqueeze(2))
    y = (h @ p["down"][ids]).squeeze(2) * weights.unsqueeze(-1)
    return y.sum(1) + x @ p["shared"]


def of_one_token(p: Params, x: torch.Tensor) -> torch.Tensor:
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
    h = F.silu(x.expand(K, 1, D) @ p["up"][ids] + p["bias"][ids].unsqueeze(1))
    y = (h @ p["down"][ids])[:, 0] * weights.unsqueeze(-1)
    return y.sum(0) + x @ p["shared"]


FORMS: dict[str, Form] = {
    "grouped products": by_products(grouped),
    "a product for each row": by_products(each),
    "the greatest first": by_products(each, descending=True),
    "weighted first": by_scattering,
    "unsorted": unsorted(each),
    "unsorted einsum": unsorted(einsum),
    "unsorted, numbers of two dims": of_two_dims,
    "unsorted, for each token": sf.vmap(of_one_token, (None, 0)),
}


def step(fn: Form) -> Callable[..., Any]:
    loss = lambda p, x: fn(p, x).sin().sum()
    return sf.value_and_grad(loss, argnums=(0, 1))


def places(experts: P, **others: P) -> dict[str, P]:
    return {name: others.get(name, experts if name in EXPERTS else P()) for name in PARAMS}


def sent(
    fn: Callable[..., Any],
    sizes: dict[str, int],
    batch: P,
    x: torch.Tensor = X,
    rows: Any = None,
    **others: P,
) -> Counter[tuple[str, str]]:
    """The collectives of a step by kind and axis; its values are those of one device."""
    with sf.fake_world(math.prod(sizes.values())):
        mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
        rows = {"ep": f"{sizes['ep']}x"} if rows is None else rows
        spec = (places(P("ep"), **others), batch)
        sharded = sf.shard(fn, mesh, spec, backend="aten", rows=rows)
        equal(sf.full(sharded(PARAMS, x)), fn(PARAMS, x))
        return Counter((c.kind, c.axis) for c in sharded.lower(PARAMS, x).collectives)


MESHES = [  # 10 tokens and 5 experts: uneven; 6 and 8: ranks without experts, or tokens
    ({"ep": 2}, P("ep")),
    ({"ep": 3}, P("ep")),
    ({"ep": 4}, P("ep")),
    ({"ep": 6}, P("ep")),
    ({"ep": 8}, P("ep")),
    ({"dp": 2, "ep": 2}, P(("dp", "ep"))),
    ({"ep": 2, "dp": 3}, P(("ep", "dp"))),
    ({"dp": 2, "ep": 2}, P("dp")),
    ({"ep": 3}, P()),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "batch"), MESHES)
def test_rows_travel_to_their_experts_and_no_expert_is_gathered(
    form: str, sizes: dict[str, int], batch: P
) -> None:
    kinds = sent(step(FORMS[form]), sizes, batch)
    assert kinds["ragged_all_to_all", "ep"] == 4  # there and back, and so for the gradients
    # of counts; and of tokens, if they are equal on all ranks
    gathers = 1 if "ep" in str(batch) else 4 if "unsorted" in form else 2
    assert kinds["all_gather", "ep"] <= gathers
    assert not kinds["reduce_scatter", "ep"]


@pytest.mark.parametrize("form", ["grouped products", "unsorted"])
@pytest.mark.parametrize("order", [{"dp": 2, "ep": 2, "tp": 2}, {"tp": 2, "ep": 2, "dp": 1}])
def test_another_axis_may_shard_the_hidden_dim_of_experts(order: dict[str, int], form: str) -> None:
    hidden = {"up": P("ep", None, "tp"), "down": P("ep", "tp"), "bias": P("ep", "tp")}
    kinds = sent(step(FORMS[form]), order, P(("dp", "ep")), **hidden)
    assert kinds["ragged_all_to_all", "ep"] == 4
    assert not kinds["all_gather", "tp"]


@pytest.mark.parametrize("form", ["grouped products", "unsorted"])
def test_another_axis_may_shard_experts_as_fsdp_does(form: str) -> None:
    gathered = {"up": P("ep", "dp"), "down": P("ep", "dp"), "bias": P("ep")}
    kinds = sent(step(FORMS[form]), {"dp": 2, "ep": 2}, P(("dp", "ep")), **gathered)
    assert kinds["ragged_all_to_all", "ep"] == 4
    assert kinds["all_gather", "ep"] == 1


def test_all_tokens_may_go_to_one_expert() -> None:
    one = torch.zeros(D, E, dtype=torch.float64)
    one[:, 3] = 9
    params = {**PARAMS, "router": one}
    x = X.abs()
    fn = step(FORMS["a product for each row"])
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("ep",))
        sharded = sf.shard(fn, mesh, (places(P("ep")), P("ep")), backend="aten", rows={"ep": "4x"})
        equal(sf.full(sharded(params, x)), fn(params, x))


def test_more_rows_than_a_rank_takes_are_an_error_that_names_the_expert() -> None:
    one = torch.zeros(D, E, dtype=torch.float64)
    one[:, 3] = 9
    params = {**PARAMS, "router": one}
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("ep",))
        fn = FORMS["grouped products"]
        sharded = sf.shard(fn, mesh, (places(P("ep")), P("ep")), backend="aten", rows={"ep": 9})
        with pytest.raises(sf.CapacityError) as error:
            sharded(params, X.abs())
    text = str(error.value)
    assert text.startswith("shard(fn), p['up']: rank 1 of the axis receives")
    assert "of them for expert" in text and "but has room for 9" in text and "rows=" in text


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"ep": 0}, "rows['ep'] is 0"),
        ({"ep": "many"}, "rows['ep'] is 'many'"),
        ({"ep": True}, "rows['ep'] is True"),
        (8, "rows is 8"),
        ({"tp": 8}, "rows names the axis 'tp', and the mesh has ep"),
    ],
)
def test_a_bound_that_is_none_is_named(rows: Any, said: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("ep",))
        with pytest.raises(sf.PlacementError) as error:
            sf.shard(lambda x: x, mesh, P("ep"), rows=rows)(X)
    assert said in str(error.value)


def test_a_number_of_no_expert_is_an_error_before_a_row_is_sent() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ids, perm = torch.sort(ids)
        return back(each(x[perm // K], w, ids), perm)

    ids = torch.arange(TOKENS * K) % E
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("ep",))
        sharded = sf.shard(fn, mesh, (P("ep"), P("ep"), P("ep")), backend="aten", rows={"ep": "2x"})
        equal(sf.full(sharded(PARAMS["up"], X, ids)), fn(PARAMS["up"], X, ids))
        with pytest.raises(
            sf.ShardError, match="1 rows have an expert number outside the valid range"
        ):
            sharded(PARAMS["up"], X, ids.clone().index_fill(0, torch.tensor([3]), E))


GROUPS: dict[str, tuple[int, int, Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "numbers of experts": (0, E - 1, lambda ids: ids, True),
    "up to how many there are": (0, E, lambda ids: ids, True),
    "up to a number that may come": (0, E, lambda ids: ids.clamp(min=0), False),
    "fractions": (0, E - 1, lambda ids: ids.double() * 0.9, False),
    "from -1": (-1, E - 2, lambda ids: (ids - 1).clamp(min=-1), False),
    "two numbers for each": (0, 2 * E - 1, lambda ids: (2 * ids).clamp(min=0), False),
}


@pytest.mark.parametrize("case", GROUPS)
def test_only_groups_that_are_numbers_of_experts_travel(case: str) -> None:
    low, high, change, travels = GROUPS[case]

    def fn(p: Params, x: torch.Tensor) -> torch.Tensor:
        _, ids = chosen(p, x)
        ids, perm = torch.sort(change(ids))
        ends = torch.cumsum(torch.histc(ids.double(), E, low, high), 0, dtype=torch.int32)
        return back(torch.ops.transformers.grouped_mm_fallback(x[perm // K], p["up"], ends), perm)

    kinds = sent(fn, {"ep": 2}, P("ep"))
    assert bool(kinds["ragged_all_to_all", "ep"]) == travels


def test_fewer_bytes_decide_where_no_bound_is_given() -> None:
    many, few = drawn(400, D), X
    fn = FORMS["grouped products"]
    kinds = [sent(step(fn), {"ep": 2}, P("ep"), x, rows={}) for x in (many, few)]
    assert [k["ragged_all_to_all", "ep"] for k in kinds] == [0, 4]


@pytest.mark.parametrize("change", ["checkpoint", "bucketed", "twice", "vmap"])
def test_rows_travel_under_other_transforms(change: str) -> None:
    fn = FORMS["grouped products"]
    loss = lambda p, x: fn(p, x).sin().sum()
    steps = {
        "checkpoint": sf.value_and_grad(sf.checkpoint(loss)),
        "bucketed": sf.bucketed_grad(loss, cap="1KB"),
        "twice": sf.value_and_grad(lambda p, x: fn(p, fn(p, x)).sin().sum()),
        "vmap": sf.vmap(FORMS["a product for each row"], (None, 1), 1),
    }
    if change == "vmap":  # values alone: a sort of a batch stays with its tokens
        x = drawn(4, 3, D)
        with sf.fake_world(2):
            mesh = sf.make_mesh((2,), ("ep",))
            sharded = sf.shard(steps[change], mesh, (places(P("ep")), P("ep")), backend="aten")
            equal(sf.full(sharded(PARAMS, x)), steps[change](PARAMS, x))
        return
    kinds = sent(steps[change], {"dp": 2, "ep": 2}, P(("dp", "ep")))
    assert kinds["ragged_all_to_all", "ep"] >= 3


def _results() -> list[torch.Tensor]:
    """The values and gradients of a step on a mesh of 4 ranks."""
    mesh = sf.make_mesh((2, 2), ("dp", "ep"))
    spec = (places(P("ep")), P(("dp", "ep")))
    fn = step(FORMS["grouped products"])
    sharded = sf.shard(fn, mesh, spec, backend="aten", rows={"ep": "2x"})
    return [x.clone() for x in tree_leaves(sf.full(sharded(PARAMS, X)))]


def _on_four_ranks() -> list[torch.Tensor]:
    """A step, and one whose rows are too many."""
    torch.set_num_threads(1)
    results = _results()
    one = torch.zeros(D, E, dtype=torch.float64)
    one[:, 3] = 9
    mesh = sf.make_mesh((4,), ("ep",))
    small = sf.shard(
        FORMS["grouped products"], mesh, (places(P("ep")), P("ep")), backend="aten", rows={"ep": 9}
    )
    try:
        small({**PARAMS, "router": one}, X.abs())
    except sf.CapacityError:
        return results
    raise AssertionError("no CapacityError")


def test_on_four_real_ranks_values_are_those_of_simulated_ones() -> None:
    with sf.fake_world(4):
        simulated = _results()
    for real in run_ranks(4, _on_four_ranks):
        assert all(torch.equal(a, b) for a, b in zip(real, simulated, strict=True))


def _compiled() -> Any:
    torch.set_num_threads(1)
    mesh = sf.make_mesh((2,), ("ep",))
    spec = (places(P("ep")), P("ep"))
    fn = step(FORMS["a product for each row"])
    sharded = sf.shard(fn, mesh, spec, backend="inductor", rows={"ep": "2x"})
    equal(sf.full(sharded(PARAMS, X)), fn(PARAMS, X))


def test_compiled_ranks_exchange_rows() -> None:
    run_ranks(2, _compiled)


def test_rows_travel_in_each_stage_of_a_pipeline() -> None:
    fn = FORMS["grouped products"]
    layers = {"a": PARAMS, "b": {name: 1.1 * x for name, x in PARAMS.items()}}
    loss = lambda p, x: fn(p["b"], fn(p["a"], x).tanh()).sin().mean()
    x = drawn(20, D)
    at = lambda k: {n: P("ep", pp=k) if n in EXPERTS else P(pp=k) for n in PARAMS}
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("pp", "ep"))
        spec = ({"a": at(0), "b": at(1)}, P("ep"))
        piped = sf.pipelined_grad(loss, 4, schedule="1f1b")
        sharded = sf.shard(piped, mesh, spec, backend="aten", rows={"ep": "2x"})
        equal(sf.full(sharded(layers, x)), sf.accumulate(sf.value_and_grad(loss), 4)(layers, x))
        kinds = Counter(c.kind for c in sharded.lower(layers, x).collectives)
    assert kinds["ragged_all_to_all"]


def _too_many_on_one_coordinate() -> str:
    """Tokens of dp 0 go to the experts of one rank, those of dp 1 to those of both."""
    torch.set_num_threads(1)
    params = {**PARAMS, "router": torch.eye(D, E, dtype=torch.float64)}
    chosen = [(3, 4)] * 4 + [(0, 3), (1, 4), (2, 3), (0, 4)]
    x = torch.zeros(8, D, dtype=torch.float64)
    for row, (first, second) in zip(x, chosen, strict=True):
        row[first], row[second] = 9, 8
    mesh = sf.make_mesh((2, 2), ("dp", "ep"))
    spec = (places(P("ep")), P(("dp", "ep")))
    fn = step(FORMS["grouped products"])
    small = sf.shard(fn, mesh, spec, backend="aten", rows={"ep": 5})
    try:
        small(params, x)
    except sf.CapacityError as error:
        return str(error)
    raise AssertionError("no CapacityError")


def test_every_rank_of_the_mesh_refuses_what_one_cannot_take() -> None:
    here, there = run_ranks(4, _too_many_on_one_coordinate)[1:3]
    assert "rank 1 of the axis receives 8 rows for its experts, 4 of them for expert 3" in here
    assert "a rank at another coordinate of the mesh receives 8 rows" in there
    assert "the most of them for expert 3" in there


def test_nothing_is_agreed_on_where_no_bound_can_be_broken() -> None:
    sizes, batch = {"dp": 2, "ep": 2}, P(("dp", "ep"))
    kinds = [
        sent(FORMS["grouped products"], sizes, batch, rows=rows)["all_reduce", "dp"]
        for rows in ({"ep": "2x"}, {"ep": 11})
    ]
    assert kinds == [0, 1]


def test_a_dispatch_is_implicit_until_a_bound_asks_for_it() -> None:
    fn = FORMS["grouped products"]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("ep",))
        options = {"backend": "aten", "implicit_comm": "error"}
        spec = (places(P("ep")), P("ep"))
        with pytest.raises(sf.PlacementError, match="for dispatch at"):
            sf.shard(fn, mesh, spec, **options).lower(PARAMS, X)
        asked = sf.shard(fn, mesh, spec, **options, rows={"ep": "2x"}).lower(PARAMS, X)
    assert not asked.implicit


def test_auto_shards_experts_where_that_is_fastest() -> None:
    """Wide experts, whose weights and whose results are more bytes than the rows of tokens."""
    wide = 2048
    params = {
        "router": sf.ShapeDtype((wide, 8)),
        "up": sf.ShapeDtype((8, wide, wide)),
        "down": sf.ShapeDtype((8, wide, wide)),
    }

    def loss(p: Params, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), K, -1)
        ids, perm = torch.sort(ids.reshape(-1))
        ends = torch.cumsum(torch.histc(ids.float(), 8, 0, 7), 0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(F.silu(product(x[perm // K], p["up"], ends)), p["down"], ends)
        return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm).square().mean()

    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((8,), ("ep",))
        step = sf.shard(sf.value_and_grad(loss), mesh, sf.auto, backend="aten")
        lowered = step.lower(params, sf.ShapeDtype((16384, wide)))
    assert Counter(c.kind for c in lowered.collectives)["ragged_all_to_all"] == 3
    assert "'up': P('ep')" in str(lowered.placements)
