"""What torch answers wrongly without a word (S1 to S13), shardfn answers rightly or refuses by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from stagings import counts, forget
from torch import nn
from versions import is_before
from worlds import simulated

import shardfn as sf
from shardfn import P

DTYPE = torch.float64
ROWS = P("a")


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def sharded(fn: Callable[..., Any], placed: Any, n: int = 2, **options: Any) -> Any:
    return sf.shard(fn, sf.make_mesh((n,), ("a",)), placed, backend="aten", **options)


def run(fn: Callable[..., Any], args: tuple[Any, ...], placed: Any = ROWS, n: int = 2) -> Any:
    with sf.fake_world(n):
        return sf.full(sharded(fn, placed, n)(*args))


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse_loss": F.mse_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid()
    ),
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
}


@pytest.mark.parametrize(("rows", "n"), [(6, 2), (5, 2), (5, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("loss", list(LOSSES))
def test_s1_s2_mean_losses_and_their_gradients_on_even_and_uneven_shards(
    loss: str, rows: int, n: int
) -> None:
    x, y, w = values(rows, 4), values(rows, 3, seed=1), values(4, 3, seed=2)
    fn = lambda w, x, y: LOSSES[loss](torch.tanh(x @ w), y)
    both = sf.value_and_grad(fn, argnums=(0, 1))
    leaf = [v.clone().requires_grad_() for v in (w, x)]
    value = fn(*leaf, y)
    wanted = (value.detach(), torch.autograd.grad(value, leaf))
    for placed in ((P(), P("a"), P("a")), (P("a"), P(), P()), (P(None, "a"), P("a"), P(None, "a"))):
        assert_close(run(both, (w, x, y), placed, n), wanted)


@pytest.mark.parametrize("n", [2, 3])
def test_s1_a_linear_module_with_sharded_parameters(n: int) -> None:
    model, x, y = nn.Linear(4, 5, dtype=DTYPE), values(7, 4), values(7, 5, seed=1)
    params = {name: p.detach() for name, p in model.named_parameters()}
    step = sf.grad(
        lambda params, x, y: F.mse_loss(torch.func.functional_call(model, params, (x,)), y)
    )
    F.mse_loss(model(x), y).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for placed in ((P(), P("a"), P("a")), (P("a"), P(), P()), (P("a"), P("a"), P("a"))):
        assert_close(run(step, (params, x, y), placed, n), wanted)


def cube(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum(0)


class Tripled(torch.autograd.Function):
    """Its derivatives are not those of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t * 3


def tangent_of(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, t: torch.func.jvp(fn, (x,), (t,))[1]


def test_s3_tangents_through_a_reduction_over_ranks_are_not_zero() -> None:
    x, t = values(5, 4), values(5, 4, seed=1)
    for n in (2, 3):
        assert_close(run(tangent_of(cube), (x, t), n=n), (3 * x**2 * t).sum(0))
        assert_close(run(torch.func.jacfwd(cube), (x,), n=n), torch.func.jacfwd(cube)(x))
        with sf.fake_world(n):
            assert_close(
                sf.full(sharded(tangent_of(sharded(cube, P("a"), n)), P("a"), n)(x, t)),
                (3 * x**2 * t).sum(0),
            )


def test_s4_the_derivatives_that_an_autograd_function_gives_are_used() -> None:
    x, t = values(5, 4), values(5, 4, seed=1)
    total = lambda x: Tripled.apply(x).sum(0)
    assert_close(run(tangent_of(total), (x, t)), 3 * t.sum(0))
    assert_close(run(sf.grad(lambda x: total(x).sum()), (x,)), torch.full_like(x, 3))
    assert_close(
        run(torch.func.vmap(torch.func.grad(lambda row: Tripled.apply(row).sin().sum())), (x,)),
        3 * torch.cos(2 * x),
    )


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "Dropout": lambda x: nn.Dropout(0.5)(x * 2),
    "rand_like": lambda x: x + torch.rand_like(x),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randperm": lambda x: x[torch.randperm(5)],
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
}


@pytest.mark.parametrize("op", list(RANDOM))
def test_s5_random_numbers_are_those_of_one_device_and_never_repeat_per_shard(op: str) -> None:
    x = values(5, 4)
    sf.random.state.seed(3)
    with sf.random.plain():
        wanted = RANDOM[op](x)
    for placed in (P("a"), P()):
        sf.random.state.seed(3)
        torch.testing.assert_close(run(RANDOM[op], (x,), placed), wanted)
    with pytest.raises(
        sf.CaptureError,
        match="the function makes an object that is not a tensor, such as a generator",
    ):
        run(
            lambda x: x + torch.rand(5, 4, generator=torch.Generator().manual_seed(1)),
            (values(5, 4),),
        )


def test_s6_a_redistribution_inside_is_no_constant_and_follows_its_input() -> None:
    moved = lambda x: sf.constrain(sf.constrain(x * 2, P(None, "a")), P()) + 2
    with sf.fake_world(2):
        fn = sharded(moved, P("a"))
        assert any(
            "prim_redistribute" in str(n.target) and n.all_input_nodes
            for n in fn.trace(values(5, 4)).program.graph.graph.nodes
        )
        before = counts["captures"]
        for seed in range(3):
            x = values(5, 4, seed=seed)
            assert torch.equal(sf.full(fn(x)), x * 2 + 2)
        assert counts["captures"] == before
        assert torch.equal(
            sf.full(sharded(sf.grad(lambda x: (moved(x) ** 2).sum()), P("a"))(x)),
            8 * (x * 2 + 2) / 2,
        )


def test_s7_a_backward_hook_fires_or_is_refused() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 5)
        return y.sum()

    if is_before("2.13"):
        with pytest.raises(sf.CaptureError, match=r"as_proxy"):
            run(sf.grad(hooked), (values(5, 4),))
    else:
        tens = torch.full((5, 4), 10.0, dtype=DTYPE)
        assert_close(run(sf.grad(hooked), (values(5, 4),)), tens)
    for register in (
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ):
        model = nn.Sequential(nn.Linear(4, 4, dtype=DTYPE))
        register(model[0], lambda module, *given: tuple(g * 5 for g in given[0]))
        loss = lambda x, model=model: model(x).sum()
        five = torch.full((5, 4), 5.0, dtype=DTYPE) @ model[0].weight.detach()
        assert_close(run(sf.grad(loss), (values(5, 4),)), five)


def branching(by: str) -> str:
    mesh = sf.make_mesh((2,), ("a",))
    rank = mesh.get_rank()
    fns = {"branch": lambda x: x + 1 if rank == 0 else x * 2, "constant": lambda x: x + rank}
    try:
        sf.shard(fns[by], mesh, P("a"), backend="aten")(torch.ones(4))
    except sf.DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("by", ["branch", "constant"])
def test_s8_real_ranks_that_took_other_branches_or_constants_are_told(by: str) -> None:
    first, second = run_ranks(2, branching, by)
    assert first == second and "ranks hold different programs" in first
    assert first.count(f"{__file__}:") == 2, "and the line of each"


def test_s8_a_permutation_of_simulated_shards_has_its_values() -> None:
    x, order = values(5, 4), torch.tensor([3, 1, 4, 0, 2])
    for n in (2, 3, 5):
        assert torch.equal(
            run(lambda x: x[order].flip(0).roll(1, 0), (x,), n=n), x[order].flip(0).roll(1, 0)
        )


def test_s9_the_shape_after_an_in_place_view_is_the_new_one() -> None:
    def shapes(x: torch.Tensor) -> Any:
        y = (x * 2).unsqueeze(1)
        y.squeeze_(1)
        z = x + 1
        z.t_()
        return (
            y,
            y.view(*y.shape),
            z.reshape(z.shape),
            tuple(y.shape),
            y.dim(),
            tuple(z.shape),
            z.stride(),
        )

    x = values(5, 4)
    for placed in (P(), P("a"), P(None, "a")):
        assert_close(run(shapes, (x,), placed), shapes(x))


def test_s10_a_mesh_is_printed_as_itself_or_refused() -> None:
    with simulated(a=2) as mesh:
        for text in (lambda: f"{mesh}", lambda: str(mesh)):
            fn = sf.shard(
                lambda x, text=text: {"x": x, "mesh": text()}, mesh, P("a"), backend="aten"
            )
            try:
                assert fn(values(5, 4))["mesh"] == f"{mesh}"
            except sf.CaptureError as error:
                assert "result['mesh'] is a str" in str(error)


def test_s11_a_module_that_is_called_inside_is_captured_whole() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8, dtype=DTYPE), nn.Tanh(), nn.Linear(8, 2, dtype=DTYPE)
    ).requires_grad_(False)
    x = values(5, 4)
    with sf.fake_world(2):
        fn = sharded(model, P("a"))
        graph = fn.trace(x).program.graph.graph
        ops = [n.target._opname for n in graph.nodes if n.op == "call_function"]
        assert (ops.count("mm"), ops.count("tanh")) == (2, 1)
        assert len(graph.find_nodes(op="placeholder")) == 5, (
            "the input and four parameters, not constants"
        )
        assert_close(sf.full(fn(x)), model(x))
        model[0].weight.mul_(2)
        assert_close(sf.full(fn(x)), model(x))


def test_s12_where_an_out_tensor_ends_up_does_not_depend_on_earlier_calls() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4, 2, dtype=DTYPE)
        torch.mm(x, y, out=out)
        return out

    x, y, found = values(4, 3), values(3, 2, seed=1), []
    with simulated(a=2) as mesh:
        fns = {
            spec: sf.shard(product, mesh, (P("a"), P()), spec, backend="aten")
            for spec in (P("a"), P())
        }
        for order in ((P("a"), P()), (P(), P("a")), (P("a"), P("a"), P())):
            forget()
            results = {spec: fns[spec](x, y) for spec in order}
            assert all(torch.equal(sf.full(r), x @ y) for r in results.values())
            found.append({spec: r.placements for spec, r in results.items()})
    assert found[0] == found[1] == found[2] and found[0][P()] != found[0][P("a")]


def strict_sort(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0)[0]


def test_s13_forbidden_communication_is_forbidden_inside_another_shard_too() -> None:
    x = values(6, 4)
    with sf.fake_world(2):
        strict, warns = (
            sharded(strict_sort, P("a"), implicit_comm=setting) for setting in ("error", "warn")
        )
        middle = sharded(strict, P("a"), implicit_comm="warn")
        loose = sharded(lambda x: x * 2, P("a"))
        calm = sharded(lambda x: x * 2, P("a"), implicit_comm="error")
        around: dict[str, Callable[..., Any]] = {
            "itself": strict,
            "shard": sharded(lambda x: strict(x * 2) + 1, P("a")),
            "grad": sharded(sf.grad(lambda x: strict(x * 2).sum()), P("a")),
            "twice": sharded(middle, P("a")),
            "loose": sharded(lambda x: strict(loose(x)), P("a")),
        }
        for name, fn in around.items():
            with pytest.raises(sf.PlacementError, match="implicit collective") as caught:
                fn(x)
            assert f"{__file__}:{strict_sort.__code__.co_firstlineno + 1}" in str(caught.value), (
                name
            )
        with pytest.warns(UserWarning, match="1 implicit collective"):
            sharded(lambda x: warns(x) + 1, P("a"))(x)
        outside = sharded(lambda x: calm(x).sort(0)[0], P("a"))
        assert torch.equal(sf.full(outside(x)), (x * 2).sort(0)[0]), (
            "what is outside of the strict one may communicate"
        )


def test_s13_the_backward_of_a_strict_function_is_strict() -> None:
    x, w = values(6, 4), values(4, 4, seed=1)
    with sf.fake_world(2):
        forward = sharded(
            lambda x, w: torch.cumprod(x @ w, 1), (P("a"), P()), implicit_comm="error"
        )
        assert_close(sf.full(forward(x, w)), torch.cumprod(x @ w, 1))
        step = sharded(sf.grad(lambda x, w: forward(x, w).sum()), (P("a"), P()))
        traced = step.trace(x, w).program.graph.graph
        marked = {
            n.meta["phase"]
            for n in traced.nodes
            if "implicit_comm=error" in (n.meta.get("custom") or {})
        }
        assert marked == {"forward", "backward"}


SMALLER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": lambda x, at: x.gather(0, at),
    "scatter_add": lambda x, at: x.scatter_add(0, at, x.new_ones(at.shape)),
    **{
        kind: lambda x, at, kind=kind: x.scatter_reduce(0, at, 0.5 * x[:2, :17], kind)
        for kind in ("sum", "amax", "mean")
    },
}


@pytest.mark.parametrize("op", list(SMALLER))
def test_an_index_that_repeats_itself_and_is_smaller_than_the_table(op: str) -> None:
    """torch adds to columns that the index does not have, also in the gradient of gather."""
    x, row = values(3, 20), torch.tensor([2, 0])
    index = lambda: row.reshape(2, 1).expand(2, 17)
    fn = lambda at: lambda x: (SMALLER[op](x, at()) ** 2).sum()
    right = fn(lambda: index().contiguous())  # what is read as an index of its own
    leaf = x.clone().requires_grad_()
    value = right(leaf)
    wanted = value.detach(), *torch.autograd.grad(value, leaf)
    for placed in (P(), P("a"), P(None, "a")):
        assert_close(run(sf.value_and_grad(fn(index)), (x,), placed), wanted)
    assert_close(sf.jit(sf.value_and_grad(fn(index)), backend="aten")(x), wanted)


@pytest.mark.parametrize("op", ["median", "nanmedian"])
@pytest.mark.parametrize("dim", [0, -3])
def test_the_median_along_a_dim_that_repeats_itself(op: str, dim: int) -> None:
    """torch reads past the end of the memory: whatever lies there."""
    x = values(5, 7)
    fn = lambda x: (getattr(x.expand(3, 5, 7), op)(dim).values ** 2).sum()
    wanted = (x**2).sum(), 2 * x
    for placed in (P(), P("a"), P(None, "a")):
        assert_close(run(sf.value_and_grad(fn), (x,), placed), wanted)
    assert_close(sf.jit(sf.value_and_grad(fn), backend="aten")(x), wanted)
    assert_close(sf.jit(sf.value_and_grad(fn))(x), wanted)
