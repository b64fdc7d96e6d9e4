"""Small sums that only results wait for, such as the loss, ride in a bucket; whatever else does
something with them does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import close
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F32, F64 = torch.float32, torch.float64
WHOLE, ROWS = P(), P("dp")
G = torch.Generator().manual_seed(5)
PARAMS = [torch.randn(5, 5, generator=G, dtype=F64) / 3 for _ in range(4)]
X = torch.randn(7, 5, generator=G, dtype=F64)


def outputs(params: Any, x: Any) -> Any:
    for w in params:
        x = torch.tanh(x @ w)
    return x


def loss(params: Any, x: Any) -> Any:
    return (outputs(params, x) ** 2).mean()


def both(
    step: Any, placed: Any = WHOLE, axes: tuple[int, ...] = (3,), names: tuple[str, ...] = ("dp",)
) -> tuple[Any, Any]:
    """The lowered step and its result over a mesh."""
    with sf.fake_world(torch.Size(axes).numel()):
        train = sf.shard(step, sf.make_mesh(axes, names), (placed, P(names)), backend="aten")
        return train.lower(PARAMS, X), sf.full(train(PARAMS, X))


def same(step: Any, got: Any) -> None:
    wanted = step(PARAMS, X)
    close(got, wanted)


def riding(low: Any) -> list[int]:
    return [b.riding for b in low.plan.buckets]


@pytest.mark.parametrize("axes", [(2,), (3,), (8,)])
@pytest.mark.parametrize("cap", [1, 300, "25MB"])
def test_the_loss_rides_in_the_first_bucket(cap: Any, axes: tuple[int, ...]) -> None:
    step = sf.bucketed_grad(loss, cap, 1)
    low, got = both(step, axes=axes)
    same(step, got)
    assert riding(low) == [8] + [0] * (len(low.plan.buckets) - 1)
    assert [c.nbytes for c in low.collectives] == [b.nbytes + b.riding for b in low.plan.buckets]
    assert str(low.plan).count(", and 8 B of results") == 1


def test_over_two_axes_the_loss_takes_two_sums_and_does_not_ride() -> None:
    step = sf.bucketed_grad(loss)
    low, got = both(step, axes=(2, 2), names=("dp", "tp"))
    same(step, got)
    assert not any(riding(low))


def test_several_metrics_ride_with_it() -> None:
    def full(params: Any, x: Any) -> Any:
        value = loss(params, x)
        return value, {"rows": (x * 0 + 1).sum(), "squares": (x * x).sum(0)}

    step = sf.bucketed_grad(full, has_aux=True)
    low, got = both(step)
    same(step, got)
    assert riding(low) == [8 + 8 + 40] and len(low.collectives) == 1


def test_what_is_more_than_a_page_travels_on_its_own() -> None:
    wide = torch.ones(600, dtype=F64)

    def full(params: Any, x: Any) -> Any:
        return loss(params, x), (x.sum(-1, keepdim=True) * wide).sum(0)

    step = sf.bucketed_grad(full, has_aux=True)
    low, got = both(step)
    same(step, got)
    assert sorted(c.nbytes for c in low.collectives) == [4 * 200 + 8, 4800]


def test_a_loss_of_another_dtype_travels_on_its_own() -> None:
    step = sf.bucketed_grad(lambda params, x: (outputs(params, x).to(F32) ** 2).sum())
    low, got = both(step)
    assert_close(got, step(PARAMS, X), rtol=1e-6, atol=1e-6)  # float32
    assert riding(low) == [0] and sorted(c.nbytes for c in low.collectives) == [4, 800]


def test_a_metric_of_the_reduced_gradients_comes_after_them() -> None:
    def step(params: Any, x: Any) -> Any:
        value, grads = sf.bucketed_grad(loss)(params, x)
        return value, sum((g * g).sum() for g in grads)

    low, got = both(step, [P("dp")] * 4)
    same(step, got)
    whole, got = both(step)
    same(step, got)
    assert riding(whole) == [8]
    assert low.schedule.holds and whole.schedule.holds


def test_a_loss_that_something_sent_waits_for_goes_ahead() -> None:
    def step(params: Any, x: Any) -> Any:
        value, grads = sf.bucketed_grad(loss)(params, x)
        second = sf.grad(lambda p: loss(p, x * value))(params)
        return value, grads, second

    low, got = both(step)
    same(step, got)
    assert not any(riding(low))


def test_a_loss_that_the_update_uses_may_ride() -> None:
    def step(params: Any, x: Any) -> Any:
        value, grads = sf.bucketed_grad(loss, 300, 1)(params, x)
        return value, [p - value * g for p, g in zip(params, grads, strict=True)]

    low, got = both(step)
    same(step, got)
    assert low.schedule.holds


def test_without_buckets_nothing_rides() -> None:
    step = sf.value_and_grad(loss)
    low, got = both(step)
    same(step, got)
    assert [c.nbytes for c in low.collectives if c.nbytes < 100] == [8]


def test_an_edited_plan_says_where_it_rides() -> None:
    with simulated(dp=2) as mesh:
        traced = sf.shard(
            sf.bucketed_grad(loss, 300, 1), mesh, (WHOLE, ROWS), backend="aten"
        ).trace(PARAMS, X)
        plan = traced.lower().plan
        assert [b.riding for b in plan.buckets] == [8, 0, 0]
        for edited in (
            plan.merge(0, 1),
            plan.merge(0, 1, 2).split(0, 2),
            sf.BucketPlan.from_json(plan.to_json()),
        ):
            found = traced.lower(plan=edited).plan
            assert [(b.leaves, b.riding) for b in found.buckets] == [
                (b.leaves, b.riding) for b in edited.buckets
            ]


JOINED: dict[str, tuple[Any, list[int]]] = {
    "of one op": (lambda x, y: torch.stack([x.sum(), y.sum()]).exp(), [16]),
    "through ops of one input": (
        lambda x, y: torch.stack([x.sum().sqrt(), y.sum().exp().sin()]),
        [16],
    ),
    "one that two ops read": (
        lambda x, y: (torch.stack([(t := x.sum()).exp(), y.sum()]), t),
        [8, 8],
    ),
    "one that depends on the other": (
        lambda x, y: torch.stack([(t := x.exp().sum().exp()), (y * t).amax()]),
        [8, 8],
    ),
    "by other reductions": (lambda x, y: torch.stack([x.sum().exp(), y.amax()]), [8, 8]),
    "of other dtypes": (lambda x, y: x.sum().exp() * y.float().sum(), [4, 8]),
}


@pytest.mark.parametrize("name", JOINED)
def test_small_reductions_that_one_op_reads_are_one_collective(name: str) -> None:
    fn, nbytes = JOINED[name]
    x, y = X.abs(), X.abs() + 1
    with simulated(dp=3) as mesh:
        sharded = sf.shard(fn, mesh, (P("dp"), P("dp")), P(), backend="aten")
        sent = sorted(c.nbytes for c in sharded.lower(x, y).collectives)
        got = sf.full(sharded(x, y))
    assert sent == nbytes
    assert_close(got, fn(x, y))
