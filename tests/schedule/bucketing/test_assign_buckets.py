"""Bucket plans: what travels together, when a bucket closes, and that the plan is what runs.
Order is in tests/schedule/test_step_order.py.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import attrs
import models
import pytest
import schemes
import torch
from bucketed import plan_is_what_runs
from stagings import counts, forget
from torch.distributed.tensor import Replicate

import shardfn as sf
from shardfn import P, Partial

S = sf.ShapeDtype
WHOLE, ROWS = P(), P("dp")
LOSS = 4  # bytes of a loss, which rides in the first bucket


def chain(params: Any, x: Any) -> torch.Tensor:
    """A loss whose gradients become ready from the last parameter to the first."""
    for w in params.values() if isinstance(params, dict) else params:
        x = torch.tanh(x @ w)
    return (x * x).mean()


def mlp(params: Any, x: Any) -> torch.Tensor:
    for w, b in params:
        x = torch.relu(x @ w + b)
    return (x * x).mean()


def lowered(
    fn: Any,
    args: Any,
    placed: Any = (WHOLE, ROWS),
    axes: Any = None,
    rank: int | None = None,
    out: Any = None,
    **options: Any,
) -> Any:
    """The lowered bucketed_grad of a loss on a mesh: all ranks, or one rank of a world without
    values.
    """
    axes = axes or {"dp": 2}
    world = sf.fake_world(
        math.prod(axes.values()), **({} if rank is None else {"rank": rank, "numerics": False})
    )
    with world:
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        return sf.shard(sf.bucketed_grad(fn, **options), mesh, placed, out, backend="aten").lower(
            *args
        )


def turned(params: Any, x: Any) -> torch.Tensor:
    """Parameters cut by rows that are used cut by columns."""
    return sum((x @ sf.constrain(w, P(None, "dp"))).square().sum() for w in params)


def test_parameters_that_are_exchanged_for_their_use_travel_alone() -> None:
    low = lowered(turned, (weights((4, 6), (4, 6)), S((3, 4))), (ROWS, WHOLE))
    exchanged = [c for c in low.collectives if c.kind == "all_to_all"]
    assert [c.bucket for c in exchanged] == [None] * 4, "there and back, for two parameters"


def scaled(params: Any, x: Any) -> torch.Tensor:
    """Layers whose scales are reduced over tp and dp, and whose weights are scattered over tp."""
    return plain(params, x, lambda y: sf.constrain(y, P("dp", "tp")))


def plain(params: Any, x: Any, placed: Any = lambda y: y) -> torch.Tensor:
    for g, w in params:
        x = placed(x + torch.tanh(x * g) @ w)
    return (x * x).mean()


def test_a_bucket_does_not_wait_for_another_axis_bucket_that_fills_slowly() -> None:
    params = [(S((24,)), S((24, 24))) for _ in range(4)]
    placed = [(P(), P("tp"))] * 4, P("dp", "tp")
    axes = {"tp": 2, "dp": 2}  # sums over tp come first
    low = lowered(scaled, (params, S((4, 6, 24))), placed, axes, rank=0, cap=1000, first_cap=1000)
    over_dp = [b for b in low.plan.buckets if b.axis == "dp"]
    assert len(over_dp) > 1, "each weight fills a bucket"
    assert not any(leaf.endswith("[0]") for b in over_dp[:-1] for leaf in b.leaves)
    kinds = [(c.kind, c.axis) for c in low.collectives if c.bucket is not None]
    last = max(k for k, x in enumerate(kinds) if x == ("reduce_scatter", "tp"))
    assert kinds.index(("all_reduce", "dp")) < last, "the backward overlaps with reductions over dp"


def test_buckets_of_two_axes_keep_the_values() -> None:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    params, x = [(draw(7), draw(7, 7)) for _ in range(3)], draw(4, 5, 7)
    wanted = sf.value_and_grad(plain)(params, x)
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        placed = [(P(), P("tp"))] * 3, P("dp", "tp")
        fn = sf.bucketed_grad(scaled, cap=300, first_cap=300)
        got = sf.shard(fn, mesh, placed, backend="aten")(params, x)
        got = sf.tree_map(lambda y: y.full_tensor(), got)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def leaves_of(low: Any, kind: str | None = None) -> list[list[str]]:
    return [list(b.leaves) for b in low.plan.buckets if kind in (None, b.kind)]


def weights(*sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Any]:
    return [S(size, dtype) for size in sizes]


def p(*numbers: int) -> list[str]:
    return [f"params[{n}]" for n in numbers]


SQUARE = (4, 4)  # 64 bytes
FOUR = weights(*[SQUARE] * 4)
X = S((8, 4))


def test_s9_1_buckets_follow_the_order_in_which_gradients_become_ready() -> None:
    assert leaves_of(lowered(chain, (FOUR, X), cap=64)) == [p(3), p(2), p(1), p(0)]
    assert leaves_of(lowered(chain, (FOUR, X), cap=1000, first_cap=1000)) == [p(3, 2, 1, 0)]
    params = {
        "z": S(SQUARE),
        "m": S(SQUARE),
        "a": S(SQUARE),
    }  # used in this order, not in that of the alphabet
    assert leaves_of(lowered(chain, (params, X), cap=64)) == [
        ["params['a']"],
        ["params['m']"],
        ["params['z']"],
    ]


def test_s9_1_the_order_of_use_counts_and_not_that_of_the_tree() -> None:
    crossed = lambda params, x: chain([params[2], params[0], params[3], params[1]], x)
    assert leaves_of(lowered(crossed, (FOUR, X), cap=64)) == [p(1), p(3), p(0), p(2)]


@pytest.mark.parametrize(
    ("cap", "first_cap", "wanted"),
    [
        (64, 64, [p(3), p(2), p(1), p(0)]),
        (65, 64, [p(3), p(2, 1), p(0)]),
        (128, 64, [p(3), p(2, 1), p(0)]),
        (128, 65, [p(3, 2), p(1, 0)]),
        (129, 1, [p(3), p(2, 1, 0)]),
        (1, 1, [p(3), p(2), p(1), p(0)]),
        ("1KB", "1KB", [p(3, 2, 1, 0)]),
        ("1KB", 100, [p(3, 2), p(1, 0)]),
    ],
)
def test_s9_1_a_bucket_closes_when_it_reaches_its_cap_and_the_first_one_at_its_own(
    cap: Any, first_cap: Any, wanted: Any
) -> None:
    low = lowered(chain, (FOUR, X), cap=cap, first_cap=first_cap)
    assert leaves_of(low) == wanted
    assert [b.nbytes for b in low.plan.buckets] == [64 * len(names) for names in wanted]
    plan_is_what_runs(low)


def test_s9_1_a_leaf_larger_than_the_cap_is_not_cut_and_the_bucket_is_extended() -> None:
    low = lowered(chain, (weights((4, 100), (100, 4)), X), cap=1000, first_cap=10)
    assert [(b.nbytes, b.cap, b.extended) for b in low.plan.buckets] == [
        (1600, 10, True),
        (1600, 1000, True),
    ]


def test_s9_2_the_plan_is_what_runs() -> None:
    for axes, placed in (
        ({"dp": 2}, (WHOLE, ROWS)),
        ({"dp": 3}, (ROWS, ROWS)),
        ({"dp": 2, "tp": 3}, (P("dp", "tp"), ROWS)),
    ):
        for cap in (1, 150, "25MB"):
            low = lowered(chain, (FOUR, X), placed, axes, cap=cap)
            plan_is_what_runs(low)
            sent = {c.bucket: c for c in low.collectives if c.bucket is not None}
            assert [sent[b.index].nbytes for b in low.plan.buckets] == [
                b.nbytes + b.riding for b in low.plan.buckets
            ]


def test_s9_2_equal_plans_on_all_ranks_with_uneven_and_empty_shards() -> None:
    for axes, placed in (
        ({"dp": 8}, (ROWS, ROWS)),
        ({"dp": 2, "tp": 3}, (P("tp", "dp"), P(("dp", "tp")))),
    ):
        size, args = (math.prod(axes.values()), (weights((4, 5), (5, 7), (7, 2)), S((7, 4))))
        simulated = lowered(chain, args, placed, axes, cap=100)
        plan_is_what_runs(simulated)
        order = [(c.kind, c.axis, c.op, c.bucket) for c in simulated.collectives]
        for rank in (0, size // 2, size - 1):
            alone = lowered(chain, args, placed, axes, rank, cap=100)
            assert (
                alone.plan == simulated.plan
                and hash(alone.plan) == hash(simulated.plan)
                and str(alone.plan) == str(simulated.plan)
            )
            assert [(c.kind, c.axis, c.op, c.bucket) for c in alone.collectives] == order, (
                f"rank {rank} of {axes}"
            )


def test_s1_1_a_plan_for_any_number_of_ranks_in_one_process() -> None:
    plans = [
        lowered(chain, (FOUR, S((2**21, 4))), axes={"dp": n}, rank=n - 1, cap=100).plan
        for n in (2, 8, 1024, 2**20)
    ]
    assert (
        len({attrs.evolve(plan, mesh="") for plan in plans}) == 1 and len(plans[0].buckets) == 3 - 1
    )


def test_s9_3_ignored_leaves_are_reduced_on_their_own() -> None:
    for ignore in (lambda path: path == "params[2]", [False, False, True, False]):
        low = lowered(chain, (FOUR, X), ignore=ignore)
        assert leaves_of(low) == [p(3, 1, 0)] and low.plan.ignored == ("params[2]",)
        assert {(c.nbytes, c.bucket) for c in low.collectives} == {(64, None), (192 + LOSS, 0)}
        plan_is_what_runs(low)
    everything = lowered(chain, (FOUR, X), ignore=True)
    assert everything.plan.buckets == () and everything.plan.ignored == tuple(p(0, 1, 2, 3))
    assert sorted(c.nbytes for c in everything.collectives) == [LOSS, 64, 64, 64, 64], (
        "the loss too"
    )


def test_s9_3_ignore_by_prefix_of_a_tree_and_of_several_arguments() -> None:
    fn = lambda params, more, x: chain([*params["a"], params["b"]["c"], more], x)
    args = {"a": FOUR[:2], "b": {"c": FOUR[2]}}, FOUR[3], X
    placed = WHOLE, WHOLE, ROWS
    low = lowered(fn, args, placed, argnums=(0, 1), ignore=({"a": True, "b": {"c": False}}, False))
    assert low.plan.ignored == ("params['a'][0]", "params['a'][1]") and leaves_of(low) == [
        ["more", "params['b']['c']"]
    ]
    low = lowered(fn, args, placed, argnums=(0, 1), ignore=lambda path: path == "more")
    assert low.plan.ignored == ("more",)


def test_s9_3_buffers_never_count() -> None:
    fn = lambda params, buffers, x: chain(params, x * buffers["mean"] + buffers["table"][:4].sum())
    buffers = {"mean": S((4,)), "table": S((1000, 1000))}
    low = lowered(fn, (FOUR, buffers, X), (WHOLE, WHOLE, ROWS), cap=150, first_cap=150)
    assert leaves_of(low) == [p(3, 2, 1), p(0)] and set(low.plan.leaves) == set(p(0, 1, 2, 3))


def test_s9_3_a_program_without_parameters_has_an_empty_plan() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        plan = sf.shard(lambda x: x.sum(), mesh, ROWS, backend="aten").lower(X).plan
    assert (plan.buckets, plan.leaves) == ((), ()) and str(plan).endswith("on mesh (dp=2): 0")
    low = lowered(lambda params, x: x.sum(), ([], X))
    assert (low.plan.buckets, low.plan.leaves) == ((), ())


def test_s9_3_parameters_that_the_loss_does_not_use_send_nothing() -> None:
    low = lowered(lambda params, x: chain(params[1:3], x), (FOUR, X))
    assert leaves_of(low) == [p(2, 1)] and low.plan.unused == tuple(p(0, 3))
    unused = lowered(lambda params, x: x.sum(), (FOUR, X))
    assert unused.plan.buckets == () and unused.plan.unused == tuple(p(0, 1, 2, 3))
    assert [c.nbytes for c in unused.collectives] == [4], "the loss"


def test_s9_3_one_bucket_is_one_plain_all_reduce() -> None:
    low = lowered(chain, (FOUR[:1], X))
    (start,) = [
        n
        for n in low.program.graph.nodes
        if "collective" in n.meta and n.meta["collective"].bucket is not None
    ]
    (sent,) = start.args[0].args
    assert sent[0].target is torch.ops.aten.mm.default and sent[1].meta["val"].numel() == 1, (
        "the gradient, and the loss, which rides"
    )
    assert [c.nbytes for c in low.collectives] == [64 + LOSS]
    assert [c.nbytes for c in lowered(chain, (FOUR, X)).collectives] == [4 * 64 + LOSS]


def test_a_bucket_holds_one_dtype() -> None:
    kinds = (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64)
    fn = lambda params, x: sum((torch.tanh(x.to(w.dtype) @ w) ** 2).mean().double() for w in params)
    low = lowered(fn, ([S(SQUARE, k) for k in kinds], X))
    found = {b.dtype: set(b.leaves) for b in low.plan.buckets}
    assert found == {"float32": set(p(0, 2)), "float64": set(p(1, 4)), "bfloat16": set(p(3))}
    plan_is_what_runs(low)


def test_a_bucket_holds_one_axis_and_one_kind() -> None:
    axes = {"dp": 2, "tp": 2}
    placed = [P(), P("dp"), P(None, "tp"), P("dp", "tp")]
    low = lowered(chain, (FOUR, X), (placed, ROWS), axes)
    for b in low.plan.buckets:
        assert (b.kind == "all_gather") == (b.op is None)
        if b.axis == "dp" and b.kind == "all_reduce":
            assert set(b.leaves) <= set(p(0, 2)), "what is not cut over dp is all-reduced over it"
        if b.axis == "dp" and b.kind != "all_reduce":
            assert set(b.leaves) <= set(p(1, 3))
    plan_is_what_runs(low)


def test_s9_10_data_parallel_inside_tensor_parallel_reduces_shards_over_dp_alone() -> None:
    params, (x, y) = models.gpt_params(2), models.tokens(8)
    low = lowered(
        models.gpt_loss,
        (params, x, y),
        (schemes.tensor_parallel(params), ROWS, ROWS),
        {"dp": 2, "tp": 2},
        cap=10**6,
    )
    reductions = [b for b in low.plan.buckets if b.kind == "all_reduce" and b.axis == "dp"]
    assert len(reductions) == 1
    sizes = dict(zip(reductions[0].leaves, reductions[0].sizes, strict=True))
    assert set(sizes) == {f"params{path}" for path in sf._tree.paths(params)}
    assert sizes["params['layers'][0]['up']"] == params["layers"][0]["up"].numel() * 8 // 2, (
        "half of a weight cut over tp"
    )
    assert sizes["params['pos']"] == params["pos"].numel() * 8
    plan_is_what_runs(low)


PLACED = (
    P(),
    P("dp"),
    P("tp"),
    P("dp", "tp"),
    P("tp", "dp"),
    P(("dp", "tp")),
    P(None, "dp"),
    P(None, "tp"),
)


def test_reductions_over_two_axes_in_two_orders_do_not_wait_for_each_other_in_a_circle() -> None:
    for placed in (
        [P("tp"), P("dp", "tp"), P()],
        [P("dp", "tp"), P("tp"), P()],
        [P("dp"), P("tp"), P(), P("dp", "tp")],
    ):
        plan_is_what_runs(
            lowered(
                chain,
                (FOUR[: len(placed)], S((5, 4))),
                (placed, P(("dp", "tp"))),
                {"dp": 2, "tp": 2},
            )
        )


@pytest.mark.parametrize("seed", range(6))
def test_any_placements_on_two_axes_give_a_schedule(seed: int) -> None:
    rng = random.Random(seed)
    placed, cap = (
        [rng.choice(PLACED) for _ in range(rng.randint(2, 4))],
        rng.choice((1, 150, "25MB")),
    )
    low = lowered(
        chain,
        (FOUR[: len(placed)], S((7, 4))),
        (placed, P(("dp", "tp"))),
        {"dp": 2, "tp": 2},
        cap=cap,
    )
    plan_is_what_runs(low)


def test_a_gradient_over_two_axes_travels_in_a_bucket_of_each() -> None:
    low = lowered(
        chain, (FOUR, X), (WHOLE, P(("dp", "tp"))), {"dp": 2, "tp": 2}, cap=128, first_cap=1
    )
    assert [(b.axis, list(b.leaves)) for b in low.plan.buckets] == [
        (axis, names) for names in (p(3), p(2, 1), p(0)) for axis in ("dp", "tp")
    ]


def test_reductions_of_one_gradient_over_two_axes_in_one_bucket_are_refused() -> None:
    args, axes = ((FOUR, X), (WHOLE, P(("dp", "tp")))), {"dp": 2, "tp": 2}
    plan = lowered(chain, *args, axes, cap=1).plan
    one = attrs.evolve(plan, buckets=tuple(attrs.evolve(b, index=0) for b in plan.buckets))
    with pytest.raises(sf.TreeError) as error:
        lowered(chain, *args, axes, plan=one)
    fix = "separate buckets for them"
    said = (
        "params[3] shares a bucket with params[3], but depends on its result\n  needed: "
        "buckets of independent reductions"
    )
    assert str(error.value) == f"shard(bucketed_grad(chain)), plan: {said}\n  try: {fix}"
    assert (error.value.arg_path, error.value.fix) == ("params[3]", fix)


def test_what_is_left_to_reduce_over_another_axis_travels_in_buckets_too() -> None:
    out = P(), [Partial(), Replicate()]
    low = lowered(chain, (FOUR, X), (WHOLE, P(("dp", "tp"))), {"dp": 2, "tp": 2}, out=out)
    assert low.plan.unreduced == tuple(p(0, 1, 2, 3))
    assert [(c.axis, c.nbytes, c.bucket) for c in low.collectives if c.nbytes > 8] == [
        ("tp", 256, 0)
    ]


def test_s9_5_the_graph_is_captured_once_and_computes_the_same_whatever_the_cap() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        forget()
        fn = sf.shard(sf.bucketed_grad(chain), mesh, (WHOLE, ROWS), backend="aten")
        traced = fn.trace(FOUR, X)
        lows = {cap: traced.lower(cap=cap) for cap in (1, 128, "100MB")}
        assert counts["captures"] == 1
        assert [len(low.plan.buckets) for low in lows.values()] == [4, 2, 1]
        for cap in (1, "100MB"):
            sf.shard(sf.bucketed_grad(chain, cap=cap), mesh, (WHOLE, ROWS), backend="aten").lower(
                FOUR, X
            )
        assert counts["captures"] == 3, "one whole graph for each, however many buckets"
    ops = lambda low: [
        n.target
        for n in low.program.graph.nodes
        if n.meta.get("source") and "c10d" not in str(n.target)
    ]
    computing = [ops(low) for low in lows.values()]
    assert computing[0] == computing[1] == computing[2], "buckets cut no region of the program"


def test_s9_9_a_10_5000_5000_5000_5_mlp_gives_three_buckets_with_a_cap_of_25MB() -> None:
    sizes = (10, 5000, 5000, 5000, 5)
    params = [(S((a, b)), S((b,))) for a, b in itertools.pairwise(sizes)]
    low = lowered(mlp, (params, S((20, 10))), axes={"dp": 2}, rank=0, cap="25MB")
    assert len(low.plan.buckets) == 3
    layers = [{f"params[{i}][{j}]" for i in held for j in (0, 1)} for held in ((3, 2), (1,), (0,))]
    assert [
        set(b.leaves) for b in low.plan.buckets
    ] == layers  # a weight and its bias close together
    assert low.plan.buckets[0].nbytes > 10**8 and low.plan.buckets[2].nbytes < 10**6
    plan_is_what_runs(low)


def test_s9_1_the_first_layer_without_a_bias_closes_a_bucket_of_its_own() -> None:
    sizes = (10, 50, 50, 50, 5)
    shapes = [S((b, a)) for a, b in itertools.pairwise(sizes)]
    linear = lambda params, x: chain([w.T for w in params], x)
    low = lowered(linear, (shapes, S((20, 10))), axes={"dp": 2}, rank=0, cap="8KB")
    held = [[b[-2] for b in bucket.leaves] for bucket in low.plan.buckets]
    assert held == [["3", "2"], ["1"], ["0"]]
    plan_is_what_runs(low)


def test_s9_9_four_layers_of_2000_give_exactly_three_fused_all_reduces() -> None:
    low = lowered(
        chain, (weights(*[(2000, 2000)] * 4), S((20, 2000))), axes={"dp": 8}, rank=0, cap="25MB"
    )
    assert leaves_of(low) == [p(3), p(2, 1), p(0)]
    assert [(c.kind, c.axis, c.nbytes) for c in low.collectives] == [
        ("all_reduce", "dp", 16_000_000 + LOSS),
        ("all_reduce", "dp", 32_000_000),
        ("all_reduce", "dp", 16_000_000),
    ]
