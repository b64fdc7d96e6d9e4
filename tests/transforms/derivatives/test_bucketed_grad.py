"""bucketed_grad is value_and_grad: values, structure, and every way to nest it; what it refuses
is in test_bucket_options.py.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import pytest
import schemes
import torch
import torch.nn.functional as F
from stagings import counts, forget
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn._tree import flatten, leaves


class Layer(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = weights(7, 6, seed=1), weights(7, 3, seed=2)
W, B = weights(6, 3, seed=3), weights(3, seed=4)
TREES: dict[str, tuple[Any, Callable[[Any], tuple[Any, Any]]]] = {
    "dict": ({"w": W, "b": B}, lambda p: (p["w"], p["b"])),
    "dict in another order": ({"z": W, "a": B}, lambda p: (p["z"], p["a"])),
    "list": ([W, B], lambda p: (p[0], p[1])),
    "tuple": ((W, B), lambda p: (p[0], p[1])),
    "named tuple": (Layer(W, B), lambda p: (p.w, p.b)),
    "nested": ({"l": [Layer(W, B), ()], "e": {}}, lambda p: (p["l"][0].w, p["l"][0].b)),
    "keys that are numbers": ({10: W, 9: B}, lambda p: (p[10], p[9])),
    "ordered dict": (collections.OrderedDict(z=W, a=B), lambda p: (p["z"], p["a"])),
    "a tensor": (W, lambda p: (p, B)),
}


def same(got: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    """One structure, and equal values."""
    (mine, tree), (theirs, other) = flatten(got), flatten(wanted)
    assert tree == other
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a == b


@pytest.fixture
def mesh() -> Any:
    with simulated(dp=3) as mesh:
        yield mesh


def aten(fn: Any, mesh: Any, *args: Any, **options: Any) -> Any:
    return sf.shard(fn, mesh, *args, backend="aten", **options)


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ params["w"]) + params["b"] - y) ** 2).mean()


PARAMS = {"w": W, "b": B}


@pytest.mark.parametrize("case", list(TREES))
def test_every_kind_of_tree_gives_what_value_and_grad_gives(case: str, mesh: Any) -> None:
    params, parts = TREES[case]

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        w, b = parts(params)
        return (torch.tanh(x @ w) + b).pow(2).mean()

    wanted, bucketed = (sf.value_and_grad(fn)(params, X), sf.bucketed_grad(fn, cap=1))
    assert [
        torch.equal(a, b) for a, b in zip(leaves(bucketed(params, X)), leaves(wanted), strict=True)
    ] == [True] * len(leaves(wanted))
    same(sf.full(aten(bucketed, mesh, (P(), P("dp")))(params, X)), wanted)
    same(sf.full(bucketed(*sf.distribute((params, X), mesh, (P("dp"), P("dp"))))), wanted)


@pytest.mark.parametrize(
    "case", ["list", "named tuple", "nested", "keys that are numbers", "ordered dict"]
)
def test_leaves_are_named_as_python_reaches_them(case: str, mesh: Any) -> None:
    params, parts = TREES[case]
    plan = aten(
        sf.bucketed_grad(
            lambda params, x: sum((x @ w).sum() if w.dim() > 1 else w.sum() for w in parts(params))
        ),
        mesh,
    ).lower(params, X)
    named = dict(zip((f"params{p}" for p in sf._tree.paths(params)), leaves(params), strict=True))
    assert set(plan.plan.leaves) == set(named)


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 2), (2, 0), (-1, 0), (0, 1, 2)], ids=repr)
def test_argnums(argnums: Any, mesh: Any) -> None:
    args = PARAMS, X, Y
    wanted = sf.value_and_grad(loss, argnums=argnums)(*args)
    same(sf.bucketed_grad(loss, cap=100, first_cap=1, argnums=argnums)(*args), wanted, 0)
    same(
        sf.full(
            aten(
                sf.bucketed_grad(loss, cap=100, first_cap=1, argnums=argnums),
                mesh,
                (P(), P("dp"), P("dp")),
            )(*args)
        ),
        wanted,
    )


def test_has_aux_returns_the_tree_beside_the_value(mesh: Any) -> None:
    def fn(params: Any, x: torch.Tensor) -> Any:
        h = torch.tanh(x @ params["w"])
        return h.pow(2).mean(), {"h": h, "none": None, "k": (3, "text"), "sum": h.sum()}

    wanted = sf.value_and_grad(fn, has_aux=True)(PARAMS, X)
    same(sf.bucketed_grad(fn, has_aux=True)(PARAMS, X), wanted, 0)
    same(
        sf.full(aten(sf.bucketed_grad(fn, has_aux=True, cap=1), mesh, (P(), P("dp")))(PARAMS, X)),
        wanted,
    )


def test_keyword_arguments_in_any_order_and_defaults(mesh: Any) -> None:
    def fn(
        params: Any, x: torch.Tensor, *, scale: float = 1.0, shift: Any = None, power: int = 2
    ) -> torch.Tensor:
        h = x @ params["w"] * scale
        return (h if shift is None else h + shift).pow(power).mean()

    for kwargs in ({"scale": 0.5, "shift": B}, {"shift": B, "scale": 0.5}, {"power": 3}):
        wanted = sf.value_and_grad(fn)(PARAMS, X, **kwargs)
        same(sf.bucketed_grad(fn)(PARAMS, X, **kwargs), wanted, 0)
        same(
            sf.full(aten(sf.bucketed_grad(fn, cap=1), mesh, (P(), P("dp")))(PARAMS, X, **kwargs)),
            wanted,
        )
    same(
        sf.full(aten(sf.bucketed_grad(loss), mesh)(PARAMS, y=Y, x=X)),
        sf.value_and_grad(loss)(PARAMS, X, Y),
    )


@pytest.mark.parametrize("options", [{}, {"cap": 1}, {"reduce_dtype": torch.float32}])
def test_complex_parameters(options: Any, mesh: Any) -> None:
    """Beside a real one, whose gradients share their buckets."""
    params = {"w": torch.complex(W, 2 * W), "v": torch.complex(B, -B).cfloat(), "b": B}

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ params["w"]) * params["b"] + params["v"]
        return y.abs().square().mean()

    x = torch.complex(X, X.flip(0))
    wanted = sf.value_and_grad(fn)(params, x)
    for placement in (P(), P("dp")):
        step = aten(sf.bucketed_grad(fn, **options), mesh, (placement, P("dp")))
        same(sf.full(step(params, x)), wanted, 1e-6)


def test_alone_on_plain_tensors_it_is_value_and_grad_and_sends_nothing() -> None:
    fn = sf.bucketed_grad(loss)
    assert (repr(fn), fn.__wrapped__) == ("bucketed_grad(loss)", loss)
    same(fn(PARAMS, X, Y), sf.value_and_grad(loss)(PARAMS, X, Y), 0)
    low = fn.lower(PARAMS, X, Y)
    assert low.plan.buckets == () and low.collectives == ()


def test_alone_on_distributed_arguments_it_runs_on_their_mesh(mesh: Any) -> None:
    placed = {"w": P("dp"), "b": P()}
    args = sf.distribute((PARAMS, X, Y), mesh, (placed, P("dp"), P("dp")))
    value, grads = sf.bucketed_grad(loss, cap=1)(*args)
    same(sf.full((value, grads)), sf.value_and_grad(loss)(PARAMS, X, Y))
    assert all(grads[k].placements == args[0][k].placements for k in PARAMS)
    assert len(sf.bucketed_grad(loss, cap=1).lower(*args).plan.buckets) == 3, (
        "a gather, and two gradients"
    )


def reductions(low: Any) -> list[int]:
    """The buckets, or None, of what is reduced but for scalars."""
    return [
        c.bucket
        for c in low.collectives
        if c.kind in ("all_reduce", "reduce_scatter") and c.nbytes > 8
    ]


def test_bucketed_grad_of_shard_equals_shard_of_bucketed_grad_and_buckets_too(mesh: Any) -> None:
    placed = P(), P("dp"), P("dp")
    wanted = sf.value_and_grad(loss)(PARAMS, X, Y)
    outer, inner = (
        aten(sf.bucketed_grad(loss), mesh, placed),
        sf.bucketed_grad(aten(loss, mesh, placed)),
    )
    same(sf.full(outer(PARAMS, X, Y)), wanted)
    same(inner(PARAMS, X, Y), wanted)  # no mesh: one device
    with sf.use_mesh(mesh):
        same(sf.full(inner(PARAMS, X, Y)), wanted)
        assert reductions(outer.lower(PARAMS, X, Y)) == [0]
        assert reductions(inner.lower(PARAMS, X, Y)) == [0], (
            "a constraint on a parameter does not take its gradient out of the plan"
        )


def test_compose_and_partial(mesh: Any) -> None:
    wanted = sf.value_and_grad(loss)(PARAMS, X, Y)
    place = functools.partial(aten, mesh=mesh, in_placements=(P(), P("dp"), P("dp")))
    together = sf.compose(
        lambda fn: aten(fn, mesh, (P(), P("dp"), P("dp"))),
        functools.partial(sf.bucketed_grad, cap=100, first_cap=1),
    )
    same(sf.full(together(loss)(PARAMS, X, Y)), wanted)
    assert len(together(loss).lower(PARAMS, X, Y).plan.buckets) == 2
    with sf.use_mesh(mesh):
        same(sf.full(sf.compose(sf.bucketed_grad, place)(loss)(PARAMS, X, Y)), wanted)
    same(sf.compose(sf.bucketed_grad)(loss)(PARAMS, X, Y), wanted, 0)


def test_a_partial_function_a_method_and_a_callable_object(mesh: Any) -> None:
    class Model:
        def loss(self, params: Any, x: torch.Tensor) -> torch.Tensor:
            return loss(params, x, Y)

        def __call__(self, params: Any, x: torch.Tensor) -> torch.Tensor:
            return loss(params, x, Y)

    wanted = sf.value_and_grad(loss)(PARAMS, X, Y)
    for fn in (Model().loss, Model(), functools.partial(loss, y=Y)):
        same(sf.bucketed_grad(fn)(PARAMS, X), wanted, 0)
        low = aten(
            sf.bucketed_grad(fn, ignore=lambda path: path.endswith("['w']")), mesh, (P(), P("dp"))
        ).lower(PARAMS, X)
        assert [leaf[-5:] for leaf in low.plan.ignored] == ["['w']"]


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("gpt", "fully_sharded"), ("llama", "replicated"), ("conv", "fully_sharded")],
)
def test_inside_a_step_function_it_equals_autograd_on_one_device(model: str, scheme: str) -> None:
    loss_fn, make_params, make_batch = models.LOSSES[model]
    params, batch = make_params(), make_batch()

    def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        value, grads = sf.bucketed_grad(loss_fn, cap=2000, first_cap=500)(params, x, y)
        return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), grads, value

    wanted = models.oracle(loss_fn, params, *batch)
    with simulated(dp=3) as mesh:
        fn = aten(step, mesh, (getattr(schemes, scheme)(params), P("dp"), P("dp")))
        same(sf.full(fn(params, *batch)), wanted, 1e-11)
        assert len(fn.lower(params, *batch).plan.buckets) > 1


@pytest.mark.parametrize("scheme", ["tensor_parallel", "mixed"])
def test_s9_10_data_parallel_inside_tensor_parallel(scheme: str) -> None:
    params, batch = models.gpt_params(1), models.tokens()
    wanted = sf.value_and_grad(models.gpt_loss)(params, *batch)
    with simulated(dp=2, tp=2) as mesh:
        fn = aten(
            sf.bucketed_grad(models.gpt_loss, cap=1500, first_cap=300),
            mesh,
            (getattr(schemes, scheme)(params), P("dp"), P("dp")),
        )
        same(sf.full(fn(params, *batch)), wanted, 1e-11)


def test_parameters_used_twice(mesh: Any) -> None:
    tied = lambda w, x: ((torch.tanh(x @ w) @ w.t()) ** 2).mean()
    same(
        sf.full(aten(sf.bucketed_grad(tied), mesh, (P("dp"), P("dp")))(W, X)),
        sf.value_and_grad(tied)(W, X),
    )
    pair = lambda ws, x: ((x @ ws[0] + torch.sin(x @ ws[1])) ** 2).mean()
    for args in ([W, W], [W, W.clone()]):
        fn = aten(sf.bucketed_grad(pair), mesh, (P(), P("dp")))
        same(sf.full(fn(args, X)), sf.value_and_grad(pair)(args, X))
        assert fn.lower(args, X).plan.buckets[0].leaves == ("ws[1]", "ws[0]"), (
            "one tensor in two places has two gradients"
        )


def test_second_derivatives_pass_through() -> None:
    inner = sf.bucketed_grad(lambda w, x: ((x @ w) ** 3).sum(), cap=1)
    plain = sf.value_and_grad(lambda w, x: ((x @ w) ** 3).sum())
    outer = lambda grad_of: lambda w, x: grad_of(w, x)[1].pow(2).sum()
    wanted = sf.value_and_grad(outer(plain))(W, X)
    same(sf.bucketed_grad(outer(inner))(W, X), wanted, 0)
    with simulated(dp=2) as mesh:
        for placed in (P(), P("dp")):
            for transform in (sf.value_and_grad, functools.partial(sf.bucketed_grad, cap=1)):
                same(sf.full(aten(transform(outer(inner)), mesh, (placed, P("dp")))(W, X)), wanted)


def test_jvp_and_vmap_pass_through(mesh: Any) -> None:
    g = lambda transform: lambda w, x: transform(lambda w, x: ((x @ w) ** 3).sum())(w, x)[1]
    fns = {
        "jvp": lambda t: lambda w, x: torch.func.jvp(lambda w: g(t)(w, x), (w,), (w,)),
        "vmap over rows": lambda t: lambda w, x: torch.func.vmap(g(t), (None, 0))(w, x[:, None]),
        "vmap over weights": lambda t: (
            lambda w, x: torch.func.vmap(lambda w: g(t)(w, x))(torch.stack([w, 2 * w]))
        ),
    }
    for name, make in fns.items():
        wanted = make(sf.value_and_grad)(W, X)
        got = sf.full(
            aten(make(functools.partial(sf.bucketed_grad, cap=1)), mesh, (P(), P("dp")))(W, X)
        )
        assert_close(got, wanted, msg=lambda m, name=name: f"{name}: {m}")


def test_two_calls_in_one_program_do_not_disturb_each_other(mesh: Any) -> None:
    def both(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        one = sf.bucketed_grad(loss, cap=1)(params, x, y)
        return (
            one,
            sf.bucketed_grad(loss)(params, x * 2, y),
            sf.value_and_grad(loss)(params, x, y * 2),
        )

    fn = aten(both, mesh, (P(), P("dp"), P("dp")))
    wanted = tuple(
        sf.value_and_grad(loss)(PARAMS, a, b) for a, b in ((X, Y), (X * 2, Y), (X, Y * 2))
    )
    same(sf.full(fn(PARAMS, X, Y)), wanted)
    assert sorted(b.region for b in fn.lower(PARAMS, X, Y).plan.buckets) == [0, 0, 1]


@pytest.mark.parametrize(
    ("sent", "placed"),
    [(torch.float32, P()), (torch.bfloat16, P("dp")), (torch.float64, P())],
    ids=str,
)
def test_a_reduce_dtype_changes_what_is_sent_and_not_what_is_returned(
    sent: torch.dtype, placed: sf.P, mesh: Any
) -> None:
    own = {"a": torch.float32, "b": torch.float64, "c": torch.bfloat16}
    params = {k: weights(6, 3, seed=i).to(d) for i, (k, d) in enumerate(own.items())}
    fn = lambda params, x: sum(((x.to(d) @ params[k]) ** 2).mean().double() for k, d in own.items())
    wanted = sf.value_and_grad(fn)(params, X)
    bucketed = aten(sf.bucketed_grad(fn, reduce_dtype=sent), mesh, (placed, P("dp")))
    _, grads = sf.full(bucketed(params, X))
    assert {k: g.dtype for k, g in grads.items()} == own
    for k, dtype in own.items():
        finest = max(torch.finfo(sent).eps, torch.finfo(dtype).eps)
        assert_close(grads[k].double(), wanted[1][k].double(), rtol=8 * finest, atol=8 * finest)
    plan = bucketed.lower(params, X).plan
    assert {b.dtype for b in plan.buckets if b.kind != "all_gather"} == {
        str(sent).removeprefix("torch.")
    }


def test_mixed_precision_gradients_travel_in_buckets_too(mesh: Any) -> None:
    def fn(
        params: Any, x: torch.Tensor
    ) -> torch.Tensor:  # float32 weights, computed with in bfloat16
        h = torch.tanh(x.bfloat16() @ params["v"].bfloat16()) @ params["w"].bfloat16()
        return F.mse_loss(h.float(), torch.zeros(7, 3))

    params = {"v": weights(6, 6).float(), "w": W.float()}
    bucketed = aten(sf.bucketed_grad(fn), mesh, (P(), P("dp")))
    got, wanted = (sf.full(bucketed(params, X.float())), sf.value_and_grad(fn)(params, X.float()))
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, rtol=0.05, atol=0.05)
    low = bucketed.lower(params, X.float())
    assert reductions(low) == [0] and sorted(low.plan.leaves) == ["params['v']", "params['w']"], (
        f"{low.plan}"
    )


def test_a_transform_written_out_anew_captures_once(mesh: Any) -> None:
    forget()
    args = sf.distribute((PARAMS, X, Y), mesh, (P(), P("dp"), P("dp")))
    for _ in range(3):
        sf.bucketed_grad(loss, cap=100, first_cap=1, ignore={"w": False, "b": True})(*args)
        sf.bucketed_grad(loss, cap=100, first_cap=1)(PARAMS, X, Y)
    assert counts["captures"] == 2


def test_options_that_python_calls_equal_are_not_taken_for_each_other(mesh: Any) -> None:
    fn = lambda params, x: (x @ params["w"] + params["b"]).pow(2).mean()
    with pytest.raises(sf.TreeError, match="ignore does not fit the leaves"):
        sf.bucketed_grad(fn, ignore={"w": 1, "b": 0})(PARAMS, X)
    same(
        sf.bucketed_grad(fn, ignore={"w": True, "b": False})(PARAMS, X),
        sf.value_and_grad(fn)(PARAMS, X),
        0,
    )


def test_a_tree_without_parameters_has_an_empty_gradient(mesh: Any) -> None:
    fn = lambda params, x: x.pow(2).sum()
    for empty in ({}, [], (), {"a": [(), {}]}):
        same(sf.bucketed_grad(fn)(empty, X), sf.value_and_grad(fn)(empty, X), 0)
        same(
            sf.full(aten(sf.bucketed_grad(fn), mesh, (P(), P("dp")))(empty, X)),
            sf.value_and_grad(fn)(empty, X),
        )
