"""shard_map: what it computes, what it sends, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from stagings import counts, forget
from torch import Tensor
from worlds import simulated

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(3)
X = torch.randn(8, 6, generator=G, dtype=torch.float64)
W = torch.randn(6, 4, generator=G, dtype=torch.float64)


def kinds(fn: Any, *args: Any) -> list[tuple[str, str]]:
    return [(c.kind, c.axis) for c in fn.lower(*args).collectives]


def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((x @ p["w"]).tanh() + p["b"]).square().mean()


PARAMS = {"w": W, "b": W[0]}


def test_bodies_see_local_shapes_and_results_are_placed_as_asked() -> None:
    body = lambda x: x * x.shape[0]

    with simulated(a=2, b=4) as mesh:
        for spec, shape in (
            (P("a"), (4, 6)),
            (P(None, "a"), (8, 3)),
            (P(("a", "b")), (1, 6)),
            (P("b", "a"), (2, 3)),
            (P(), (8, 6)),
        ):
            out = sf.shard_map(body, mesh, spec, spec, backend="aten")(X)
            assert tuple(out.to_local().shape) == shape
            close(sf.full(out), X * shape[0])


def test_placements_may_be_written_as_in_dtensor() -> None:
    with simulated(a=2, b=4) as mesh:
        placed = [sf.Shard(1), sf.Shard(0)]
        out = sf.shard_map(lambda x: x * 2, mesh, (placed,), placed, backend="aten")(X)
        assert list(out.placements) == placed and out.to_local().shape == (2, 3)
        close(sf.full(out), X * 2)


def test_a_result_may_be_a_term_of_a_sum() -> None:
    with simulated(dp=2) as mesh:
        fn = sf.shard_map(lambda x: x.sum(0), mesh, P("dp"), sf.Partial(), backend="aten")
        out = fn(X)
        assert list(out.placements) == [sf.Partial()] and not kinds(fn, X)
        close(sf.full(out), X.sum(0))
        inside = sf.shard(
            lambda x: sf.shard_map(lambda x: x.sum(0), None, P("dp"), sf.Partial())(x) * 2,
            mesh,
            backend="aten",
        )
        close(sf.full(inside(X)), X.sum(0) * 2)


def test_a_result_may_be_a_term_of_a_mean() -> None:
    with simulated(dp=2, tp=2) as mesh:
        mean = [sf.Partial("avg"), sf.Partial()]
        fn = sf.shard_map(lambda x: x.sum(0), mesh, P(("dp", "tp")), mean, backend="aten")
        out = fn(X)
        assert list(out.placements) == mean and not kinds(fn, X)
        close(sf.full(out), X.sum(0) / 2)
        grad = sf.shard(
            sf.grad(
                lambda x: sf.shard_map(
                    lambda x: x**2, None, P("dp"), [sf.Partial("avg"), sf.Replicate()]
                )(x).sum()
            ),
            mesh,
        )
        close(sf.full(grad(X)), X)
        whole = sf.shard_map(
            lambda x: x.long(),
            mesh,
            P(),
            [sf.Partial("avg"), sf.Replicate()],
            axis_names={"dp"},
            backend="aten",
        )
        assert sf.full(whole(X)).dtype == torch.float32  # as with pmean, a mean of integers is none


def test_arguments_and_results_are_trees_and_constants_pass() -> None:
    with simulated(dp=2) as mesh:

        @sf.shard_map(
            mesh=mesh,
            in_placements=({"x": P("dp"), "k": P()}, P()),
            out_placements=({"y": P("dp")}, P()),
            backend="aten",
        )
        def fn(p: Any, w: Tensor, *, scale: float) -> Any:
            return {"y": [p["x"] @ w * p["k"], p["x"]]}, (
                scale,
                None,
                "name",
                sf.psum(p["x"].sum(), "dp"),
            )

        tree, (scale, none, name, total) = sf.full(fn({"x": X, "k": 3}, W, scale=2.0))
        close((tree["y"][0], tree["y"][1], total), (X @ W * 3, X, X.sum()))
        assert (scale, none, name) == (2.0, None, "name")


def test_what_the_body_closes_over_is_the_same_on_all_ranks() -> None:
    with simulated(dp=2) as mesh:
        outer = lambda w, x: sf.shard_map(
            lambda x: sf.pmean((x @ w).sin().mean(), "dp"), None, P("dp"), P()
        )(x)
        for placed in (P(), P("dp"), P(None, "dp")):
            step = sf.shard(sf.grad(outer), mesh, (placed, P("dp")), backend="aten")
            close(sf.full(step(W, X)), torch.func.grad(lambda w: (X @ w).sin().mean())(W))


@pytest.mark.parametrize("side", ["inside", "outside"])
def test_data_parallel_gradients_cost_one_reduction_for_each_leaf(side: str) -> None:
    with simulated(dp=4) as mesh:
        local = lambda p, x: sf.pmean(loss(p, x), "dp")
        if side == "inside":
            step = sf.shard_map(sf.grad(local), mesh, (P(), P("dp")), P(), backend="aten")
        else:
            step = sf.shard(
                sf.grad(sf.shard_map(local, None, (P(), P("dp")), P())),
                mesh,
                (P(), P("dp")),
                backend="aten",
            )
        close(sf.full(step(PARAMS, X)), torch.func.grad(loss)(PARAMS, X))
        assert kinds(step, PARAMS, X) == [("all_reduce", "dp")] * 2


def test_the_gradient_of_each_ranks_own_loss_is_summed_over_ranks() -> None:
    """As in JAX: what all ranks share gets the sum of what each would give it."""
    with simulated(dp=2) as mesh:
        step = sf.shard_map(sf.grad(loss), mesh, (P(), P("dp")), P(), backend="aten")
        wanted = torch.func.grad(lambda p: loss(p, X[:4]) + loss(p, X[4:]))(PARAMS)
        close(sf.full(step(PARAMS, X)), wanted)


def test_a_value_used_many_times_is_summed_once() -> None:
    with simulated(dp=2) as mesh:
        body = lambda w, x: sf.psum(
            (x @ w).sum() + (x * w[:, 0]).sin().sum() + (w[0] * x.mean()).sum(), "dp"
        )
        step = sf.shard_map(sf.grad(body), mesh, (P(), P("dp")), P(), backend="aten")
        wanted = lambda w: sum(
            (x @ w).sum() + (x * w[:, 0]).sin().sum() + (w[0] * x.mean()).sum()
            for x in (X[:4], X[4:])
        )
        close(sf.full(step(W, X)), torch.func.grad(wanted)(W))
        assert kinds(step, W, X) == [("all_reduce", "dp")]


def test_the_transpose_of_a_sum_sends_nothing() -> None:
    with simulated(dp=2) as mesh:
        fn = sf.shard_map(lambda x: sf.psum(x.sin().sum(), "dp") ** 2, None, P("dp"), P())
        step = sf.shard(sf.grad(fn), mesh, P("dp"), backend="aten")
        close(sf.full(step(X)), torch.func.grad(lambda x: x.sin().sum() ** 2)(X))
        assert kinds(step, X) == [("all_reduce", "dp")]  # the sum itself, which the square needs


def test_the_transpose_of_a_gather_is_one_reduce_scatter() -> None:
    with simulated(dp=2) as mesh:
        fn = sf.shard_map(
            lambda w, x: sf.psum((x @ sf.all_gather(w, "dp", tiled=True)).sin().sum(), "dp"),
            None,
            (P("dp"), P("dp")),
            P(),
        )
        step = sf.shard(sf.grad(fn), mesh, (P("dp"), P("dp")), backend="aten")
        close(sf.full(step(W, X)), torch.func.grad(lambda w: (X @ w).sin().sum())(W))
        assert kinds(step, W, X) == [("all_gather", "dp"), ("reduce_scatter", "dp")]


@pytest.mark.parametrize("side", ["inside", "outside"])
def test_bucketed_grad_puts_the_gradients_of_per_rank_code_in_buckets(side: str) -> None:
    with simulated(dp=4) as mesh:
        local = lambda p, x: sf.pmean(loss(p, x), "dp")
        ins = (P(), P("dp"))
        if side == "inside":
            step = sf.shard_map(sf.bucketed_grad(local), mesh, ins, P(), backend="aten")
        else:
            step = sf.shard(
                sf.bucketed_grad(sf.shard_map(local, None, ins, P())), mesh, ins, backend="aten"
            )
        close(sf.full(step(PARAMS, X))[1], torch.func.grad(loss)(PARAMS, X))
        lowered = step.lower(PARAMS, X)
        assert [b.leaves for b in lowered.plan.buckets] == [("p['w']", "p['b']")]
        assert sum(c.bucket is not None for c in lowered.collectives) == 1


def test_other_axes_are_planned_as_always() -> None:
    """Tensor parallel by placements, data parallel by hand."""
    with simulated(dp=2, tp=4) as mesh:
        local = lambda p, x: sf.pmean(loss(p, x), "dp")
        for axis_names in ({"dp"}, ("dp",), "dp"):
            fn = sf.shard_map(local, None, (P(), P("dp")), P(), axis_names=axis_names)
            placed = ({"w": P(None, "tp"), "b": P("tp")}, P("dp"))
            step = sf.shard(sf.grad(fn), mesh, placed, backend="aten")
            close(sf.full(step(PARAMS, X)), torch.func.grad(loss)(PARAMS, X))
            assert kinds(step, PARAMS, X) == [("all_reduce", "dp")] * 2  # each of its own quarter
            assert {c.nbytes for c in step.lower(PARAMS, X).collectives} == {W.numel() * 8 // 4, 8}


def test_on_its_own_over_some_axes() -> None:
    with simulated(dp=2, tp=4) as mesh:
        fn = sf.shard_map(
            lambda x: sf.psum(x.sin(), "dp"), mesh, P("dp"), P(), axis_names={"dp"}, backend="aten"
        )
        x = sf.distribute(X, mesh, P("dp", None))
        close(sf.full(fn(x)), X[:4].sin() + X[4:].sin())
        close(sf.full(fn(sf.distribute(X, mesh, P(None, "tp")))), X[:4].sin() + X[4:].sin())


def test_a_shard_map_inside_another_takes_the_other_axes() -> None:
    with simulated(dp=2, tp=4) as mesh:
        inner = sf.shard_map(
            lambda x, w: sf.psum(x @ w, "tp"),
            None,
            (P(None, "tp"), P("tp")),
            P(),
            axis_names={"tp"},
        )
        rest = sf.shard_map(lambda x, w: sf.psum(x @ w, "tp"), None, (P(None, "tp"), P("tp")), P())
        for product in (inner, rest):
            body = lambda x, w, product=product: sf.pmean(product(x, w).sin().sum(), "dp")
            fn = sf.shard_map(body, mesh, (P("dp"), P()), P(), axis_names={"dp"}, backend="aten")
            x, w = torch.cat([X, X], 1)[:, :8], torch.cat([W, W])[:8]
            wanted = lambda x, w: (x @ w).sin().sum() / 2
            close(sf.full(fn(x, w)), wanted(x, w))
            with sf.use_mesh(mesh):
                close(sf.full(sf.grad(fn, (0, 1))(x, w)), torch.func.grad(wanted, (0, 1))(x, w))


def test_in_place_writes_inside_a_body() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4, dtype=x.dtype)
        view = total[:2]
        view += x[0, :2]
        total.add_((x @ w).sum(0))
        grown = w * 2
        grown[0] = x[0, :4]
        total += grown.sum(0)
        shared = w.sum(0)
        early = x.mean() * shared
        shared += 1
        half = shared[:2]
        half *= 3
        total = total + early + x.mean() * shared
        return sf.psum(total.sin().sum(), "dp")

    def whole(w: Tensor) -> Tensor:
        out = torch.zeros((), dtype=W.dtype)
        for x in (X[:4], X[4:]):
            first = torch.cat([x[0, :2], x.new_zeros(2)])
            shared = (w.sum(0) + 1) * torch.tensor([3, 3, 1, 1])
            rest = x.mean() * (w.sum(0) + shared)
            out = out + (first + (x @ w).sum(0) + x[0, :4] + (w[1:] * 2).sum(0) + rest).sin().sum()
        return out

    with simulated(dp=2) as mesh, sf.use_mesh(mesh):
        fn = sf.shard_map(body, None, (P(), P("dp")), P())
        close(sf.full(sf.value_and_grad(fn)(W, X)), torch.func.grad_and_value(whole)(W)[::-1])


def test_a_cotangent_of_each_ranks_own_for_a_value_of_all() -> None:
    """Pulled back by ranks of their own, a shared value gets the sum of what they pull by."""
    with simulated(dp=2) as mesh:

        def body(w: Tensor, x: Tensor) -> Tensor:
            value, pull = sf.vjp(lambda w: w.sin(), w)
            return sf.psum(pull(value * 0 + x.sum())[0].sum() * x.mean(), "dp")

        fn = sf.shard_map(body, mesh, (P(), P("dp")), P(), backend="aten")
        close(sf.full(fn(W, X)), (W.cos() * X.sum()).sum() * (X[:4].mean() + X[4:].mean()))


def test_checkpointed_bodies() -> None:
    body = lambda w, x: sf.pmean(
        torch.utils.checkpoint.checkpoint(
            lambda w, x: (x @ w).sin(), w, x, use_reentrant=False
        ).mean(),
        "dp",
    )
    with simulated(dp=2) as mesh, sf.use_mesh(mesh):
        got = sf.full(sf.grad(sf.shard_map(body, None, (P(), P("dp")), P()))(W, X))
    close(got, torch.func.grad(lambda w: (X @ w).sin().mean())(W))


def test_integers_and_indices_in_bodies() -> None:
    ids = torch.tensor([0, 3, 5, 1, 2, 2, 4, 0])
    body = lambda w, ids: sf.psum(w[ids].sin().sum(0) * torch.arange(4), "dp")
    with simulated(dp=2) as mesh, sf.use_mesh(mesh):
        fn = sf.shard_map(body, None, (P(), P("dp")), P())
        close(
            sf.full(sf.grad(lambda w: fn(w, ids).sum())(W)),
            torch.func.grad(lambda w: (w[ids].sin().sum(0) * torch.arange(4)).sum())(W),
        )


def test_vmap_sends_one_collective_for_all_samples() -> None:
    with simulated(dp=2) as mesh:
        body = lambda x: sf.psum(x.sin().sum(0), "dp") + sf.all_gather(x, "dp", tiled=True).sum()
        fn = sf.shard_map(body, None, P("dp"), P())
        step = sf.shard(sf.vmap(fn), mesh, P(None, "dp"), backend="aten")
        many = torch.stack([X, X.sin(), X.cos()])
        close(sf.full(step(many)), many.sin().sum(1) + many.sum((1, 2))[:, None])
        assert sorted(kinds(step, many)) == [("all_gather", "dp"), ("all_reduce", "dp")]


def test_a_vmap_may_be_cut_over_a_mesh_axis() -> None:
    with simulated(dp=2, tp=4) as mesh:
        fn = sf.vmap(lambda w, x: (x @ w).sin(), in_axes=(None, 1), out_axes=1, spmd_axis="dp")
        step = sf.shard(fn, mesh, (P(None, "tp"), P()), backend="aten")
        many = torch.stack([X, X.sin(), X.cos()], 1)
        out = step(W, many)
        assert list(out.placements) == [sf.Shard(1), sf.Shard(2)]
        close(sf.full(out), (many @ W).sin())
        inner = sf.shard_map(
            lambda x: sf.psum(x.sum(0), "tp"), None, P("tp"), P(), axis_names={"tp"}
        )
        step = sf.shard(sf.vmap(inner, spmd_axis="dp"), mesh, backend="aten")
        many = torch.stack([X, X.sin()])
        assert list(step(many).placements) == [sf.Shard(0), sf.Replicate()]
        close(sf.full(step(many)), many.sum(1))


def test_a_second_call_captures_nothing_and_another_mesh_captures_anew() -> None:
    fn = sf.shard_map(lambda x: sf.psum(x.sum(0), "dp") * sf.axis_size("dp"), None, P("dp"), P())
    step = sf.grad(lambda x: fn(x).sum())
    forget()
    for n in (2, 2, 4):
        with simulated(dp=n) as mesh, sf.use_mesh(mesh):
            close(sf.full(step(X)), torch.full_like(X, n))
            close(sf.full(step(X)), torch.full_like(X, n))
    assert counts["captures"] == 2


def test_a_mesh_comes_along_with_a_shard_map_inside() -> None:
    with simulated(dp=2) as mesh:
        mean = sf.shard_map(lambda x: sf.pmean(x.sin().mean(), "dp"), mesh, P("dp"), P())
        close(
            sf.full(sf.grad(lambda x: mean(x) * 2)(X)),
            torch.func.grad(lambda x: x.sin().mean() * 2)(X),
        )
        close(sf.full(sf.hessian(mean)(X[:2])), torch.func.hessian(lambda x: x.sin().mean())(X[:2]))


def test_a_shard_map_may_be_written_inside_a_function() -> None:
    with simulated(dp=2) as mesh:

        def fn(x: Tensor) -> Tensor:
            return sf.shard_map(lambda x: sf.psum(x.sum(0), "dp"), mesh, P("dp"), P())(x)

        close(sf.full(sf.shard(fn, mesh, P("dp"), backend="aten")(X)), X.sum(0))


def test_a_mesh_of_one_rank_sends_nothing() -> None:
    with simulated(dp=1) as mesh:
        body = lambda x: (
            sf.psum(x, "dp")
            + sf.all_gather(x, "dp", tiled=True)
            + sf.ppermute(x, "dp", [(0, 0)])
            + sf.ppermute(x, "dp", []),
            sf.all_to_all(x, "dp", 1, 0, tiled=True) + sf.psum_scatter(x, "dp", tiled=True),
        )
        fn = sf.shard_map(body, mesh, P("dp"), (P(), P("dp")), backend="aten")
        with pytest.raises(sf.PlacementError):
            fn(X)
        fn = sf.shard_map(body, mesh, P("dp"), P("dp"), backend="aten")
        close(sf.full(fn(X)), (3 * X, 2 * X))
        assert not kinds(fn, X)


def test_everything_that_per_rank_code_sends_is_asked_for() -> None:
    with simulated(dp=2, tp=4) as mesh:
        local = lambda w, x: sf.pmean((x @ w).tanh().square().mean() + w.sum(), ("dp", "tp"))
        fn = sf.shard_map(local, None, (P(), P("dp")), P())
        step = sf.shard(sf.grad(fn), mesh, (P(), P("dp")), implicit_comm="error", backend="aten")
        close(
            sf.full(step(W, X)),
            torch.func.grad(lambda w: (X @ w).tanh().square().mean() + w.sum())(W),
        )
        assert kinds(step, W, X) == [
            ("all_reduce", "dp")
        ]  # w is the same on all ranks of tp, and so is its gradient


# transforms of a function of what all ranks share, by `sf` or by `torch.func`
SHARED: dict[str, Callable[[Any, Any], Any]] = {
    "jacrev": lambda m, f: m.jacrev(f),
    "jacfwd": lambda m, f: m.jacfwd(f),
    "hessian": lambda m, f: m.hessian(lambda w: f(w).sum()),
    "vjp": lambda m, f: lambda w: m.vjp(f, w)[1](w[0])[0],
    "jvp": lambda m, f: lambda w: m.jvp(f, (w,), (w.cos(),)),
    "vmap": lambda m, f: lambda w: m.vmap(f)(torch.stack([w, -w])),
    "grad of grad": lambda m, f: m.grad(lambda w: m.grad(lambda w: f(w).sum())(w).square().sum()),
}


@pytest.mark.parametrize("side", ["inside", "outside"])
@pytest.mark.parametrize("transform", SHARED)
def test_derivatives_by_what_all_ranks_share(transform: str, side: str) -> None:
    transformed = SHARED[transform]
    mean = lambda w, x: sf.pmean((x @ w).tanh().mean(0), "dp") * w.sum(0)
    with simulated(dp=4) as mesh, sf.use_mesh(mesh):
        if side == "inside":
            fn = sf.shard_map(
                lambda w, x: transformed(sf, lambda w: mean(w, x))(w),
                None,
                (P(), P("dp")),
                P(),
                backend="aten",
            )
        else:
            whole = sf.shard_map(mean, None, (P(), P("dp")), P())
            fn = sf.shard(lambda w, x: transformed(sf, lambda w: whole(w, x))(w), backend="aten")
        close(
            sf.full(fn(W, X)),
            transformed(torch.func, lambda w: (X @ w).tanh().mean(0) * w.sum(0))(W),
        )


def test_gradients_for_each_sample() -> None:
    per_sample = sf.vmap(sf.grad(lambda w, row: (row @ w).tanh().sum()), in_axes=(None, 0))
    with simulated(dp=2) as mesh:
        fn = sf.shard_map(
            lambda w, x: sf.psum(per_sample(w, x).square().sum(0), "dp"), mesh, (P(), P("dp")), P()
        )
        whole = torch.func.vmap(torch.func.grad(lambda w, row: (row @ w).tanh().sum()), (None, 0))(
            W, X[:4]
        )
        other = torch.func.vmap(torch.func.grad(lambda w, row: (row @ w).tanh().sum()), (None, 0))(
            W, X[4:]
        )
        close(
            sf.full(fn(W, X)), (whole + other).square().sum(0) * 2
        )  # what ranks share gets the gradients of all ranks' samples


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return w**3 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        w, x = ctx.saved_tensors
        return g * 3 * w**2 * x, g * w**3


def test_functions_with_derivatives_of_their_own() -> None:
    with simulated(dp=2) as mesh, sf.use_mesh(mesh):
        fn = sf.shard_map(
            lambda w, x: sf.psum(Cube.apply(w, x.sum(0)[:4]).sum(), "dp"), None, (P(), P("dp")), P()
        )
        close(sf.full(sf.grad(fn)(W, X)), 3 * W**2 * X.sum(0)[:4])


def test_values_are_constrained_on_other_axes_inside() -> None:
    with simulated(dp=2, tp=4) as mesh:
        body = lambda x: sf.constrain(x.sin(), P(None, "tp"))
        out = sf.shard_map(body, mesh, P("dp"), P("dp"), axis_names={"dp"}, backend="aten")(X)
        assert list(out.placements) == [sf.Shard(0), sf.Shard(1)]
        close(sf.full(out), X.sin())
        samples = sf.shard(
            sf.vmap(lambda x: sf.constrain(x.sin(), P("tp")), spmd_axis="dp"), mesh, backend="aten"
        )(X)
        assert list(samples.placements) == [sf.Shard(0), sf.Shard(1)]
        close(sf.full(samples), X.sin())


def test_an_inner_name_hides_an_outer_one() -> None:
    inner = sf.vmap(lambda a: sf.psum(a, "i"), axis_name="i")
    close(sf.vmap(inner, axis_name="i")(X), X.sum(1, keepdim=True).expand(X.shape))
