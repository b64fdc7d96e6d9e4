"""Arguments and results that are pending means: values, gradients and what is sent, in one
process and on real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import close
from programs import spread
from ranks import run_ranks

import shardfn as sf
from shardfn import P, Partial, Replicate, Shard

MEAN = Partial("avg")
MESHES: dict[str, tuple[dict[str, int], list[Any]]] = {
    "a line": ({"a": 3}, [MEAN]),
    "two means": ({"a": 2, "b": 3}, [MEAN, MEAN]),
    "a sum too": ({"a": 2, "b": 3}, [Partial(), MEAN]),
    "cut too": ({"a": 2, "b": 3}, [MEAN, Shard(1)]),
    "an axis of one rank": ({"a": 1, "b": 3}, [MEAN, Replicate()]),
}
# each with how often it reduces over an axis that is pending: not at all where it is linear
USES = {
    "as it is": (lambda x: x, 0),
    "scaled": (lambda x: -(2 * x) * 0.5, 0),
    "rearranged": (lambda x: x.mT.reshape(-1)[1:], 0),
    "summed": (lambda x: x.sum(0), 0),
    "multiplied": (lambda x: x @ torch.ones(7, 2, dtype=x.dtype), 0),
    "a function": (lambda x: x.exp() + x.tanh(), 1),
    "and a constant": (lambda x: x + 1, 1),
    "with itself": (lambda x: x * x, 1),
}
G = torch.Generator().manual_seed(7)
X = torch.randn(5, 7, generator=G, dtype=torch.float64)


def mesh_of(axes: dict[str, int]) -> Any:
    return sf.make_mesh(tuple(axes.values()), tuple(axes))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_mean_is_what_it_is_the_mean_of(case: str, use: str, dtype: torch.dtype) -> None:
    (axes, placements), (fn, reductions) = MESHES[case], USES[use]
    x = X.to(dtype)
    with sf.fake_world(torch.Size(axes.values()).numel()):
        mesh = mesh_of(axes)
        held = spread(x, mesh, placements)
        close(sf.full(held), x)
        close(sf.full(sf.shard(fn, mesh, (placements,), backend="aten")(held)), fn(x))
        if case == "a line":
            constrained = sf.shard(lambda x: fn(x).sin(), mesh, backend="aten").lower(held)
            assert [c.kind for c in constrained.collectives] == [
                "all_reduce"
            ]  # the mean's own, or that of what is linear in it
            again = sf.shard(fn, mesh, None, [MEAN], backend="aten")
            if use == "with itself":  # one factor is reduced, the other is not
                kinds = [c.kind for c in again.lower(held).collectives]
                assert kinds == ["all_reduce"]
                assert again(held).placements == (MEAN,)
                close(sf.full(again(held)), fn(x))
            elif reductions:
                with pytest.raises(
                    sf.PlacementError,
                    match="the value is already reduced, or was never Partial, so its placement "
                    "cannot stay avg over a",
                ):
                    again(held)
            else:
                assert not again.lower(held).collectives and again(held).placements == (MEAN,)
                close(sf.full(again(held)), fn(x))


def test_a_mean_over_ranks_is_printed_where_it_comes_in_and_where_it_leaves() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        low = sf.shard(lambda x: -x, mesh, None, [MEAN], backend="aten").lower(
            spread(X, mesh, [MEAN])
        )
        said = str(low)
        assert (
            "in    %x: f64[5, 7; avg@dp]" in said
            and "return result = %mul: f64[5, 7; avg@dp]" in said
            and "avg@axis: a Partial mean over the mesh axis" in said
            and "no communication" in said
        )
        verbose = low.show_placements(verbose=True) if hasattr(low, "show_placements") else ""
        assert not verbose or "f64[5, 7; avg@dp] (5, 7) is f64[5, 7; sum@dp] (5, 7)" in verbose


def test_gradients_with_respect_to_a_mean_and_gradients_that_leave_as_one() -> None:
    w = torch.randn(7, 3, generator=G, dtype=torch.float64)
    loss = lambda w, x: (x @ w).tanh().square().sum()
    wanted = sf.grad(loss, argnums=(0, 1))(w, X)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        close(
            sf.full(
                sf.shard(sf.grad(loss, argnums=(0, 1)), mesh, backend="aten")(
                    w, spread(X, mesh, [MEAN])
                )
            ),
            wanted,
        )
        for transform in (sf.grad(loss), lambda *args: sf.bucketed_grad(loss)(*args)[1]):
            step = sf.shard(transform, mesh, (P(), P("dp")), [MEAN], backend="aten")
            got = step(w, X)
            assert got.placements == (MEAN,) and not [
                c for c in step.lower(w, X).collectives if c.kind != "all_gather"
            ]
            close(sf.full(got), wanted[0])
            add = sf.shard(lambda a, b: a + b, mesh, None, [MEAN], backend="aten")
            close(sf.full(add(got, got)), 2 * wanted[0])
            close(
                sf.full(
                    sf.shard(lambda g: sf.constrain(g, P()), mesh, backend="aten")(add(got, got))
                ),
                2 * wanted[0],
            )
            with pytest.raises(sf.PlacementError, match="the value is an unreduced gradient"):
                sf.shard(lambda g: g.tanh(), mesh, backend="aten")(got)


def test_a_gradient_is_reduced_in_buckets_over_one_axis_and_leaves_as_a_mean_over_the_other() -> (
    None
):
    params = {k: torch.randn(7, 3, generator=G, dtype=torch.float64) for k in "ab"}
    loss = lambda p, x: ((x @ p["a"]).tanh() * (x @ p["b"])).sum()
    x = torch.randn(8, 7, generator=G, dtype=torch.float64)
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        placements = (P(), {k: [MEAN, Replicate()] for k in "ab"})
        step = sf.shard(
            sf.bucketed_grad(loss), mesh, (P(), P(("dp", "tp"))), placements, backend="aten"
        )
        low = step.lower(params, x)
        assert [(c.kind, c.axis) for c in low.collectives if c.nbytes > 8] == [
            ("all_reduce", "tp")
        ]  # both in one bucket
        value, grads = step(params, x)
        assert all(g.placements == (MEAN, Replicate()) for g in grads.values())
        close(sf.full((value, grads)), sf.value_and_grad(loss)(params, x))


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_real_ranks_hold_the_same_means(backend: str) -> None:
    for got in run_ranks(2, on_a_rank, backend):
        close(got, (X.exp(), X.sum(0), X.cos() * 1.0, 2 * X))


def on_a_rank(backend: str) -> Any:
    mesh = sf.make_mesh((2,), ("dp",))
    x = sf.from_local(X * (-2 if dist.get_rank() == 0 else 4), mesh, MEAN)
    run = lambda fn, out=None: sf.full(sf.shard(fn, mesh, None, out, backend=backend)(x))
    grad = sf.grad(lambda x: x.sin().sum())
    return (
        run(lambda x: x.exp()),
        run(lambda x: x.sum(0), [MEAN]),
        run(grad),
        run(lambda x: 2 * x, [Partial()]),
    )


REFUSED = {
    "a mean of integers": (
        lambda mesh: sf.from_local(torch.ones(3, dtype=torch.int64), mesh, MEAN),
        (
            "from_local: a Partial mean of torch.int64 may not be an integer; use "
            "Partial('sum'), or a floating-point dtype"
        ),
    ),
    "a mean of integers as a result": (
        lambda mesh: sf.shard(lambda x: x.long().sum(0), mesh, P("dp"), MEAN, backend="aten")(X),
        "shard(<lambda>), out_placements: a Partial mean of torch.int64 may not be an "
        "integer; use Partial('sum'), or a floating-point dtype\n  at: HERE\n  try: give a "
        "prefix of the result's tree, with placements that fit each tensor",
    ),
    "a maximum of complex numbers": (
        lambda mesh: sf.from_local(torch.ones(3, dtype=torch.complex64), mesh, Partial("max")),
        "from_local: a Partial maximum or minimum of torch.complex64 is not defined, because "
        "complex numbers have no order",
    ),
    "a mean of a plain tensor": (
        lambda mesh: sf.shard(lambda x: x, mesh, MEAN, backend="aten")(X),
        "shard(<lambda>), argument x: a plain tensor is a global value, so its placement "
        "cannot be P(avg); use sf.from_local\n  at: HERE\n  try: use placements that fit "
        "each tensor and the mesh, such as P('axis'), or None to keep the argument's placement",
    ),
    "a constant": (
        lambda mesh: sf.shard(lambda x: torch.ones(3), mesh, None, MEAN, backend="aten")(X),
        "shard(<lambda>), result: the value is already reduced, or was never Partial, so its "
        "placement cannot stay avg over dp\n  at: HERE\n  needed: a value that is reduced "
        "exactly once\n  try: return the gradient unchanged, as sf.grad returns it, or remove "
        "Partial from out_placements",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mean_that_cannot_be_is_refused(case: str) -> None:
    call, said = REFUSED[case]
    with sf.fake_world(2), pytest.raises(sf.PlacementError) as error:
        call(sf.make_mesh((2,), ("dp",)))
    lines = [
        "  at: HERE" if line.startswith(f"  at: {__file__}") else line
        for line in str(error.value).split("\n")
    ]
    assert "\n".join(lines) == said


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min"])
def test_a_constant_is_no_pending_sum(kind: str) -> None:
    """Ones on every rank are a pending maximum of ones, and a pending sum of as many as there
    are ranks.
    """
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        zeros = sf.shard(lambda x: torch.zeros(3), mesh, None, Partial(kind), backend="aten")
        assert sf.full(zeros(X)).tolist() == [0, 0, 0]
        ones = sf.shard(lambda x: torch.ones(3), mesh, None, Partial(kind), backend="aten")
        if kind in ("max", "min"):
            assert sf.full(ones(X)).tolist() == [1, 1, 1]
        else:
            with pytest.raises(
                sf.PlacementError,
                match=f"was never Partial, so its placement cannot stay {kind} over dp",
            ):
                ones(X)
