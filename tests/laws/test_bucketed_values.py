"""bucketed_grad is value_and_grad: random trees of parameters, dtypes, caps, ignored leaves,
meshes and placements.
"""

from __future__ import annotations

from typing import Any

import torch
from bucketed import (
    TOLERANCE,
    Drawn,
    autograd,
    draws,
    mesh_of,
    plan_is_what_runs,
    plan_obeys_its_rules,
    world_of,
)
from effort import examples
from hypothesis import given
from torch.testing import assert_close

import shardfn as sf
from shardfn._tree import flatten, leaves


def close(got: Any, wanted: Any, drawn: Drawn) -> None:
    """Equal up to rounding: to 1e-12 where every parameter is float64."""
    mine, tree = flatten(got)
    theirs, other = flatten(wanted)
    assert tree == other
    coarsest = max(TOLERANCE[x.dtype] for x in drawn.leaves)
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = 1 + float(b.double().abs().max()) if b.numel() else 1.0
        assert_close(a.double() / scale, b.double() / scale, rtol=0, atol=coarsest)


@given(draws())
@examples(12)
def test_bucketed_grad_equals_value_and_grad_and_autograd(drawn: Drawn) -> None:
    params, batch = drawn.params(), drawn.batch()
    wanted = autograd(drawn.loss, params, *batch)
    with world_of(drawn.mesh):
        mesh = mesh_of(drawn.mesh)
        fn = drawn.sharded(mesh)
        placed = fn(params, *batch)
        low = fn.lower(params, *batch)
        got = sf.full(placed)
        where = sf.distribute(params, mesh, drawn.tree([x.placed for x in drawn.leaves]))
        assert [g.placements for g in leaves(placed[1])] == [p.placements for p in leaves(where)]
        same = sf.full(drawn.sharded(mesh, sf.value_and_grad)(params, *batch))
    close(got, wanted, drawn)
    close(got, same, drawn)
    if max(drawn.mesh.values()) <= 2:  # two terms have one sum
        for a, b in zip(leaves(got), leaves(same), strict=True):
            assert torch.equal(a, b), "a bucket changes no bit where the order of terms is the same"
    plan_is_what_runs(low)
    plan_obeys_its_rules(
        low.plan,
        {f"params{path}" for path, x in zip(drawn.paths(), drawn.leaves, strict=True) if x.ignored},
    )


@given(draws())
@examples(4)
def test_a_plan_passed_back_gives_the_same_buckets_and_values(drawn: Drawn) -> None:
    params, batch = drawn.params(), drawn.batch()
    with world_of(drawn.mesh):
        mesh = mesh_of(drawn.mesh)
        first = drawn.sharded(mesh)
        plan = first.lower(params, *batch).plan
        again = Drawn(
            drawn.mesh, drawn.leaves, drawn.shape, drawn.rows, (*drawn.options, ("plan", plan))
        ).sharded(mesh)
        low = again.lower(params, *batch)
        assert [(b.kind, b.axis, b.leaves, b.sizes) for b in low.plan.buckets] == [
            (b.kind, b.axis, b.leaves, b.sizes) for b in plan.buckets
        ]
        plan_is_what_runs(low)
        for a, b in zip(
            leaves(sf.full(again(params, *batch))),
            leaves(sf.full(first(params, *batch))),
            strict=True,
        ):
            assert torch.equal(a, b)


@given(draws())
@examples(4)
def test_bucketed_grad_alone_equals_value_and_grad_to_the_last_bit(drawn: Drawn) -> None:
    params, batch = drawn.params(), drawn.batch()
    got, wanted = (drawn.step()(params, *batch), sf.value_and_grad(drawn.loss)(params, *batch))
    assert flatten(got)[1] == flatten(wanted)[1]
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(leaves(got), leaves(wanted), strict=True)
    )
