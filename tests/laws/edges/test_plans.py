"""A bucket plan tells the truth: what it lists is what is sent for gradients, inside of control
flow too.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
import pytest
import torch
from effort import examples
from equality import close
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import _compute_bucket_assignment_by_size as assigned_by_torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

ROWS, WIDTH = 6, 5
F64 = torch.float64
REDUCTIONS = ("all_reduce", "reduce_scatter")


def dense(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w)


def branched(x: Any, w: Any) -> Any:
    return sf.cond(x.sum() > 0, lambda x, w: torch.tanh(x @ w), lambda x, w: x * w.sum(), x, w)


def one_sided(x: Any, w: Any) -> Any:
    return sf.cond(w.sum() > 9, lambda x, w: x @ w, lambda x, w: x * 1.0, x, w)


def looped(x: Any, w: Any) -> Any:
    return sf.scan(lambda h, _: (torch.tanh(h @ w), None), x, None, length=3)[0]


def over_rows(x: Any, w: Any) -> Any:
    return sf.scan(lambda h, row: (torch.tanh(h * row), None), x, w)[0]


def nested(x: Any, w: Any) -> Any:
    return sf.scan(lambda h, _: (branched(h, w), None), x, None, length=2)[0]


def recomputed(x: Any, w: Any) -> Any:
    return sf.checkpoint(branched)(x, w)


LAYERS = {
    f.__name__: f for f in (dense, branched, one_sided, looped, over_rows, nested, recomputed)
}


def loss_of(layers: tuple[str, ...]) -> Any:
    """A loss that uses a parameter in each of these layers."""

    def loss(params: Any, x: Any) -> Any:
        for name, w in zip(layers, params, strict=True):
            x = LAYERS[name](x, w)
        return (x * x).mean()

    return loss


def values(count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    g = torch.Generator().manual_seed(count)
    params = [torch.randn(WIDTH, WIDTH, generator=g, dtype=F64) / 2 for _ in range(count)]
    return params, torch.randn(ROWS, WIDTH, generator=g, dtype=F64)


def told(plan: sf.BucketPlan) -> list[tuple[str, str, int]]:
    """Every reduction of gradients that a plan tells, as often as it is sent."""
    buckets = [(b, b.nbytes + b.riding) for b in plan.buckets]
    sent = [*buckets, *((u, u.nbytes) for u in plan.unbucketed)]
    pairs = [((x.kind, x.axis, n), x.times) for x, n in sent if x.kind in REDUCTIONS]
    return sorted(itertools.chain.from_iterable([what] * times for what, times in pairs))


def sent(low: Any, metrics: int = 8) -> list[tuple[str, str, int]]:
    """Every reduction of a program that is larger than its metrics."""
    found = [c for c in low.collectives if c.kind in REDUCTIONS and c.nbytes > metrics]
    return sorted((c.kind, c.axis, c.nbytes) for c in found)


def large(reductions: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    return [r for r in reductions if r[2] > 8]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[tuple[str, ...], int, Any]:
    """Layers, ranks, options."""
    layers = tuple(draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3)))
    options = {"cap": draw(st.sampled_from((1, 300, "25MB")))}
    if draw(st.booleans()):
        options["ignore"] = lambda path: path == "params[0]"
    return layers, draw(st.sampled_from((1, 2, 3))), options


@given(drawn())
@examples(8)
def test_a_plan_lists_exactly_the_reductions_of_gradients(
    case: tuple[tuple[str, ...], int, Any],
) -> None:
    layers, n, options = case
    params, x = values(len(layers))
    loss = loss_of(layers)
    with simulated(dp=n) as mesh:
        fn = sf.bucketed_grad(loss, **options)
        step = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")
        low, got = step.lower(params, x), sf.full(step(params, x))
    assert_close(got, sf.value_and_grad(loss)(params, x), rtol=1e-10, atol=1e-10)
    assert large(told(low.plan)) == sent(low), f"{low.plan}\n{low.collectives}"
    reduced = {leaf for b in (*low.plan.buckets, *low.plan.unbucketed) for leaf in b.leaves}
    silent = {*low.plan.local, *low.plan.unused}
    assert not reduced & silent and reduced | silent >= {f"params[{i}]" for i in range(len(layers))}
    for leaf in reduced:
        lines = [line for line in str(low.plan).splitlines() if "nothing to send" in line]
        assert not any(leaf in line for line in lines)


def test_a_loss_with_cond_is_bucketed_and_never_said_to_send_nothing() -> None:
    params, x = values(2)

    def loss(params: Any, x: Any) -> Any:
        yes, no = ((lambda w, x: ((x @ w[0]) ** 2).sum()), (lambda w, x: ((x @ w[1]) ** 3).sum()))
        return sf.cond(params[0].sum() > 0, yes, no, params, x)

    with simulated(dp=2) as mesh:
        fn = sf.shard(sf.bucketed_grad(loss), mesh, (P(), P("dp")), backend="aten")
        low, got = fn.lower(params, x), sf.full(fn(params, x))
    assert_close(got, sf.value_and_grad(loss)(params, x))
    assert "nothing to send" not in str(low.plan)
    assert large(told(low.plan)) == sent(low) == [("all_reduce", "dp", 408)], "both, and the loss"


def test_what_a_loop_scatters_in_each_run_is_told_with_how_often() -> None:
    params, x = values(2)

    def loss(params: Any, x: Any) -> Any:
        return sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, torch.stack(params))[0].sum()

    with simulated(dp=5) as mesh:
        fn = sf.shard(sf.bucketed_grad(loss), mesh, (P("dp"), P("dp")), backend="aten")
        low = fn.lower(params, x)
    (row,) = low.plan.unbucketed
    assert (row.kind, row.leaves, row.times) == ("reduce_scatter", ("params[0]", "params[1]"), 2)
    assert row.inside.startswith("scan, test_plans.py:") and not low.plan.local
    assert large(told(low.plan)) == sent(low)
    assert "(inside scan, test_plans.py:" in str(low.plan) and "2 times)" in str(low.plan)


def test_a_train_step_inside_a_scan_tells_its_buckets_and_follows_caps() -> None:
    params, x = values(2)
    loss = loss_of(("dense", "dense"))

    def steps(params: Any, batches: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            value, grads = sf.bucketed_grad(loss)(params, batch)
            return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

        return sf.scan(step, params, batches)

    with simulated(dp=2) as mesh:
        fn = sf.shard(steps, mesh, (P(), P(None, "dp")), backend="aten")
        batches = torch.stack([x, 2 * x, 3 * x])
        traced = fn.trace(params, batches)
        one, two = traced.lower(), traced.lower(cap=1)
        got = sf.full(fn(params, batches))
    assert_close(got, steps(params, batches))
    assert [(b.leaves, b.times) for b in one.plan.buckets] == [(("params[1]", "params[0]"), 3)]
    assert [(b.leaves, b.times) for b in two.plan.buckets] == [
        (("params[1]",), 3),
        (("params[0]",), 3),
    ]
    for low in (one, two):
        assert told(low.plan) == sent(low, metrics=3 * 8)
        numbers = {c.bucket for c in low.collectives if c.bucket is not None}
        assert numbers == {b.index for b in low.plan.buckets}


def linear_stack(sizes: list[int]) -> Any:
    layers = [torch.nn.Linear(a, b, device="meta") for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*layers)


def plan_of(module: Any, width: int, cap: Any) -> sf.BucketPlan:
    """The plan of a stack of layers, data parallel over two ranks."""
    real = module.to_empty(device="cpu")
    fn, params, buffers = sf.functionalize(real)
    shapes = sf.tree_map(lambda p: sf.ShapeDtype(tuple(p.shape), p.dtype), params)
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        loss = lambda params, x: fn(params, buffers, x)[0].square().mean()
        step = sf.shard(sf.bucketed_grad(loss, cap), mesh, (P(), P("dp")), backend="aten")
        return step.lower(shapes, sf.ShapeDtype((4, width))).plan


def torchs(module: Any, cap: int) -> list[list[str]]:
    """The buckets of DistributedDataParallel, in the order in which gradients become ready: a
    layer's bias first.
    """
    named = list(module.named_parameters())
    ready = [pair for i in reversed(range(0, len(named), 2)) for pair in (named[i + 1], named[i])]
    first = min(cap, 2**20)
    params = [p for _, p in ready]
    buckets, _ = assigned_by_torch(
        params, [first, cap], [False] * len(ready), list(range(len(ready)))
    )
    return [[ready[i][0] for i in bucket] for bucket in buckets]


def names(plan: sf.BucketPlan) -> list[list[str]]:
    """The leaves of each bucket, without the name of the argument."""
    return [
        [leaf.removeprefix("params['").removesuffix("']") for leaf in b.leaves]
        for b in plan.buckets
    ]


@given(
    st.lists(st.sampled_from((2, 3, 5, 7, 11)), min_size=2, max_size=6),
    st.sampled_from((1, 60, 200, 900, 10**6)),
)
@examples(6)
def test_stacks_of_linear_layers_have_the_buckets_of_data_parallel(
    sizes: list[int], cap: int
) -> None:
    module = linear_stack(sizes)
    ours, theirs = names(plan_of(module, sizes[0], cap)), torchs(module, cap)
    assert [set(bucket) for bucket in ours] == [set(bucket) for bucket in theirs]


@pytest.mark.parametrize("sizes", [[10, 5000, 5000, 5000, 5], [2000] * 5], ids=str)
def test_s9_9_linear_layers_have_three_buckets(sizes: list[int]) -> None:
    module = linear_stack(sizes)
    plan = plan_of(module, sizes[0], "25MB")
    assert len(plan.buckets) == 3
    assert [set(b) for b in names(plan)] == [set(b) for b in torchs(module, 25 * 10**6)]
    for bucket in names(plan):
        assert all(
            x.replace("bias", "weight") in bucket and x.replace("weight", "bias") in bucket
            for x in bucket
        )


def test_the_first_cap_is_one_mebibyte() -> None:
    plan = plan_of(linear_stack([512, 512, 512, 512]), 512, 2**21)
    assert [b.cap for b in plan.buckets] == [2**20, 2**21]
    assert [len(b.leaves) for b in plan.buckets] == [2, 4]


COUNT = 4
LOSS = loss_of(("dense",) * COUNT)
ARGS = values(COUNT)


def followed(plan: Any, **options: Any) -> tuple[Any, Any]:
    """The lowered step that follows a plan, and its result."""
    with simulated(dp=2) as mesh:
        fn = sf.bucketed_grad(LOSS, plan=plan, **options)
        step = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")
        return step.lower(*ARGS), sf.full(step(*ARGS))


def contents(plan: sf.BucketPlan) -> list[Any]:
    """What a plan asks for, in its order."""
    return [(b.kind, b.leaves, b.sizes, b.cap) for b in plan.buckets]


@given(
    st.permutations(range(COUNT)),
    st.lists(st.integers(1, COUNT), min_size=1, max_size=3),
    st.booleans(),
)
@examples(10)
def test_an_edited_plan_is_followed_in_contents_and_order(
    order: list[int], cuts: list[int], sharded: bool
) -> None:
    placed = P("dp") if sharded else P()
    with simulated(dp=2) as mesh:
        step = sf.shard(sf.bucketed_grad(LOSS), mesh, (placed, P("dp")), backend="aten")
        traced = step.trace(*ARGS)
        plan = traced.lower(cap=1).plan
        wanted = edited(plan, order, cuts)
        low = traced.lower(plan=wanted)
        again, got = traced.lower(plan=low.plan), sf.full(low.compile()(*ARGS))
    for found in (low, again):
        assert contents(found.plan) == contents(wanted)
        if opened(wanted) != sorted(opened(wanted)):
            started = [
                c.bucket
                for c in found.collectives
                if c.bucket is not None and c.kind != "all_gather"
            ]
            assert started == sorted(started), "they start in the plan's order"
    close(got, sf.value_and_grad(LOSS)(*ARGS))


def opened(plan: sf.BucketPlan) -> list[int]:
    """When the program would open each bucket of reductions: the last parameter's gradient is
    ready first.
    """
    reductions = (b for b in plan.buckets if b.kind != "all_gather")
    return [
        min(COUNT - 1 - int(leaf[len("params[") : -1]) for leaf in b.leaves) for b in reductions
    ]


def edited(plan: sf.BucketPlan, order: list[int], cuts: list[int]) -> sf.BucketPlan:
    """The plan with its leaves in another order, and in other buckets of other caps."""
    (kind,) = {b.kind for b in plan.buckets if b.kind != "all_gather"}
    reductions = [b for b in plan.buckets if b.kind == kind]
    listed, groups = [reductions[i] for i in order], []
    for start, end in itertools.pairwise(sorted({0, *cuts, COUNT})):
        part = listed[start:end]
        groups.append(
            attrs.evolve(
                part[0],
                leaves=tuple(x for b in part for x in b.leaves),
                sizes=tuple(n for b in part for n in b.sizes),
                cap=77 + start,
            )
        )
    gathers = [b for b in plan.buckets if b.kind == "all_gather"]
    return plan.renumbered([*gathers, *groups])


def test_buckets_in_another_order_start_in_that_order() -> None:
    plan = followed(None, cap=1)[0].plan
    assert [b.leaves for b in plan.buckets] == [
        ("params[3]",),
        ("params[2]",),
        ("params[1]",),
        ("params[0]",),
    ]
    for wanted in (
        plan.renumbered(plan.buckets[::-1]),
        attrs.evolve(plan, buckets=plan.buckets[::-1]),
    ):
        low, _ = followed(wanted)
        assert [b.leaves for b in low.plan.buckets] == [b.leaves for b in wanted.buckets]
        assert [c.bucket for c in low.collectives] == [0, 1, 2, 3] and low.schedule.holds


def test_an_order_that_no_program_can_have_is_refused() -> None:
    with simulated(dp=2, tp=2) as mesh:
        step = lambda plan: sf.shard(
            sf.bucketed_grad(LOSS, plan=plan), mesh, (P(), P(("dp", "tp"))), backend="aten"
        )
        plan = step(None).lower(*ARGS).plan
        assert [b.axis for b in plan.buckets] == ["dp", "tp"]
        with pytest.raises(sf.TreeError) as error:
            step(plan.renumbered(plan.buckets[::-1])).lower(*ARGS)
    got = "the bucket of params[3] comes before the bucket of params[3], but depends on it"
    fix = "put each bucket after the buckets that it depends on, as in fn.lower(...).plan"
    assert str(error.value) == f"shard(bucketed_grad(loss)), plan: {got}\n  try: {fix}"


def first(plan: sf.BucketPlan, **fields: Any) -> sf.BucketPlan:
    """The plan with other fields of its first bucket."""
    return plan.renumbered([attrs.evolve(plan.buckets[0], **fields), *plan.buckets[1:]])


def without_first(plan: sf.BucketPlan, **fields: Any) -> sf.BucketPlan:
    return attrs.evolve(plan.renumbered(plan.buckets[1:]), **fields)


WRONG = {
    "an empty bucket": (
        lambda p: p.renumbered([*p.buckets, attrs.evolve(p.buckets[0], leaves=(), sizes=())]),
        "bucket 4 has no leaves",
    ),
    "leaves without sizes": (lambda p: first(p, sizes=()), "bucket 0 has 1 leaves and 0 sizes"),
    "a missing leaf": (without_first, "the plan lacks params[3]"),
    "a leaf twice": (
        lambda p: p.renumbered([*p.buckets, p.buckets[0]]),
        "the bucket plan sends params[3] by an all_reduce over dp",
    ),
    "a strange leaf": (lambda p: first(p, leaves=("params[9]",)), "the plan has also params[9]"),
    "another reduction": (
        lambda p: first(p, op="max"),
        "the all_reduce of params[3] reduces by sum, but the plan reduces by max",
    ),
    "another size": (
        lambda p: first(p, sizes=(7,)),
        "params[3] sends 200 bytes of torch.float64, but the plan has 7",
    ),
    "a leaf that is said to be ignored": (
        lambda p: without_first(p, ignored=("params[3]",)),
        "the plan has no bucket for it",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_an_edit_that_no_program_can_follow_is_refused_by_name(case: str) -> None:
    edit, said = WRONG[case]
    plan = followed(None, cap=1)[0].plan
    with pytest.raises(sf.TreeError) as error:
        followed(edit(plan))
    assert (
        said in str(error.value)
        and "plan: " in str(error.value)
        and "\n  try: " in str(error.value)
    )


def test_caps_beside_a_plan_are_refused_where_a_program_is_lowered() -> None:
    with simulated(dp=2) as mesh:
        traced = sf.shard(sf.bucketed_grad(LOSS), mesh, (P(), P("dp")), backend="aten").trace(*ARGS)
        plan = traced.lower(cap=1).plan
        for caps in ({"cap": 1}, {"first_cap": 1}):
            with pytest.raises(sf.TreeError, match="lower was called with both bucket caps"):
                traced.lower(plan=plan, **caps)
        assert contents(traced.lower(plan=plan).plan) == contents(plan)


def test_an_ignored_leaf_is_listed_with_its_own_collective() -> None:
    low, _ = followed(None, ignore=lambda path: path == "params[1]")
    assert low.plan.ignored == ("params[1]",)
    assert [(u.leaves, u.nbytes, u.times) for u in low.plan.unbucketed] == [
        (("params[1]",), 200, 1)
    ]
    assert math.prod(ARGS[0][1].shape) * 8 == 200
