"""torch's own random calls inside captured functions: by state, call and global element."""

from __future__ import annotations

import random as pyrandom
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from equality import close
from stagings import counts
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, random
from shardfn.errors import CaptureError, ShardError, TreeError

F = torch.nn.functional
X = torch.linspace(-2, 2, 6 * 5, dtype=torch.float64).view(6, 5)
PLACES = [P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))]


def _again(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function returns when the state starts at one seed."""
    random.state.seed(11)
    return fn(*args)


def _plain(fn: Callable[..., Any], *args: Any) -> Any:
    """What one device draws, eagerly."""
    with random.plain():
        return _again(fn, *args)


def _new(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _attention(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 2, 3, 5)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: x + torch.rand(6, 5, dtype=x.dtype),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x * torch.randn(6, 5, dtype=x.dtype),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(2, 9, (6, 5)),
    "randint_like": lambda x: x + torch.randint_like(x, 9),
    "randperm": lambda x: x[torch.randperm(6)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli by p": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: _new(x).bernoulli_(0.3),
    "multinomial": lambda x: torch.multinomial(x.exp(), 3),
    "multinomial with replacement": lambda x: torch.multinomial(x.exp(), 9, True),
    "normal of tensors": lambda x: torch.normal(x, x.exp()),
    "normal of a number": lambda x: torch.normal(0.5, x.exp()),
    "normal_": lambda x: _new(x).normal_(1, 2),
    "uniform_": lambda x: _new(x).uniform_(-1, 2),
    "exponential_": lambda x: _new(x).exponential_(2.0),
    "cauchy_": lambda x: _new(x).cauchy_(),
    "log_normal_": lambda x: _new(x).log_normal_(),
    "geometric_": lambda x: _new(x).geometric_(0.3),
    "random_": lambda x: _new(x).random_(3, 12),
    "poisson": lambda x: torch.poisson(x.exp() * 5),
    "dropout": lambda x: F.dropout(x, 0.4),
    "nn.Dropout": torch.nn.Dropout(0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature dropout": lambda x: F.dropout1d(x.view(2, 3, 5), 0.4),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention with dropout": _attention,
    "fractional pooling": lambda x: F.fractional_max_pool2d(
        x.view(1, 1, 6, 5), 2, output_size=(3, 2)
    ),
}
DIFFERENTIABLE = [
    "randn",
    "normal of tensors",
    "dropout",
    "nn.Dropout",
    "alpha_dropout",
    "feature dropout",
    "rrelu",
    "gumbel_softmax",
    "attention with dropout",
]


@pytest.mark.parametrize("name", CALLS)
def test_every_mesh_draws_what_one_device_draws(name: str) -> None:
    fn = CALLS[name]
    wanted = _plain(fn, X)
    assert_close(_again(sf.jit(fn), X), wanted)
    with simulated(a=2, b=3) as mesh:
        for place in PLACES:
            got = _again(sf.shard(fn, mesh, (place,)), X)
            assert_close(sf.full(got), wanted)


@pytest.mark.parametrize("rate", [0.0, 0.3, 9.9, 10.0, 40.0, 3000.0])
def test_poisson_numbers_have_their_probabilities(rate: float) -> None:
    count, width = 50_000, 6 * (rate + 1) ** 0.5
    drawn = _again(sf.jit(torch.poisson, backend="aten"), torch.full((count,), rate).double())
    k = torch.arange(max(0, rate - width) // 1, rate + width + 6, dtype=torch.float64)
    x = torch.tensor(rate, dtype=torch.float64)
    below = torch.special.gammaincc(k + 1, x)  # the probability of at most k
    found = (drawn[:, None] <= k).double().mean(0)
    assert (found - below).abs().max() < 2.2 / count**0.5  # Kolmogorov's at one in 8,000
    assert drawn.frac().eq(0).all() and drawn.min() >= 0


def test_poisson_of_no_rate_and_of_other_dtypes() -> None:
    draw = sf.jit(torch.poisson, backend="aten")
    assert draw(torch.tensor([-1.0, torch.nan])).isnan().all()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found = draw(torch.full((9,), 2.0, dtype=dtype))
        assert found.dtype == dtype and found.frac().eq(0).all()
    assert sf.grad(lambda x: torch.poisson(x).sum())(X.exp()).eq(0).all()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_the_same_draw(name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        out = CALLS[name](x)
        return (out * torch.arange(out.numel()).view(out.shape).cos()).sum()

    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(_plain(loss, x), x)
    with simulated(a=2, b=2) as mesh:
        for fn in (loss, sf.checkpoint(loss)):
            got = _again(sf.shard(sf.grad(fn), mesh, (P("a", "b"),)), X)
            assert_close(sf.full(got), wanted)


def test_two_calls_draw_apart_and_a_rerun_draws_the_same_without_a_capture() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) + 10 * torch.rand_like(x)

    f, before = sf.jit(noisy), counts["captures"]
    first, second = _again(f, X), f(X)
    assert counts["captures"] == before + 1
    assert not torch.equal(first, second)
    assert torch.equal(_again(f, X), first)
    assert random.state.get()["default"].tolist() == [11, 0, 2]


def test_dropout_computes_only_the_shard_and_sends_nothing() -> None:
    with simulated(a=4) as mesh:
        lowered = sf.shard(lambda x: F.dropout(x, 0.4), mesh, (P("a"),)).lower(X)
    text = str(lowered)
    assert "no communication" in text
    drawn = [line for line in text.splitlines() if "random_bits(" in line]
    assert len(drawn) == 1 and "f32[6@a, 5]" in drawn[0]


def _walk(x: torch.Tensor) -> torch.Tensor:
    def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
        carry = F.dropout(carry + row, 0.4)
        return carry, carry * torch.rand_like(carry)

    carry, rows = sf.scan(step, x[0], x)
    chosen = sf.cond(x.sum() > -1e9, lambda c: F.dropout(c, 0.4), lambda c: c * 2, carry)
    end, _ = sf.while_loop(
        lambda s: s[1] < 3,
        lambda s: (s[0] + torch.rand_like(s[0]), s[1] + 1),
        (chosen.detach(), torch.tensor(0)),
    )
    return rows.sum() + (chosen * end).sum()


def test_each_step_of_a_loop_draws_apart() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return sf.scan(lambda c, r: (c, torch.rand_like(r)), x[0], x)[1]

    drawn = _again(sf.jit(rows), X)
    assert drawn.unique().numel() == X.numel()


def _by_ops(fn: Any) -> Any:
    return _again(sf.jit(fn, backend="aten"), X)


def _value(fn: Any) -> Any:
    return _by_ops(fn), None


def _tangent(fn: Any) -> Any:
    return None, _by_ops(lambda x: sf.jvp(fn, (x,), (X.cos(),)))[1]


def _compiled(fn: Any) -> Any:
    value, grad = _again(sf.jit(sf.value_and_grad(fn)), X)
    return value, (grad * X.cos()).sum()


def _on_shards(*axes: str | None) -> Any:
    def run(fn: Any) -> Any:
        with simulated(a=2, b=2) as mesh:
            step = sf.shard(sf.value_and_grad(fn), mesh, (P(*axes),), backend="aten")
            value, grad = sf.tree_map(sf.full, _again(step, X))
        return value, (grad * X.cos()).sum()

    return run


WAYS = {
    "value": _value,
    "tangent": _tangent,
    "compiled": _compiled,
    "columns": _on_shards(None, "a"),
    "both": _on_shards("a", "b"),
}


@pytest.mark.parametrize("wrap", [lambda f: f, sf.checkpoint], ids=["", "remat"])
@pytest.mark.parametrize("way", WAYS)
def test_loops_and_branches_draw_the_same_in_every_derivative(way: str, wrap: Any) -> None:
    value, grad = _by_ops(sf.value_and_grad(_walk))
    found, tangent = WAYS[way](wrap(_walk))
    if found is not None:
        assert_close(found, value)
    if tangent is not None:
        assert_close(tangent, (grad * X.cos()).sum())


@pytest.mark.parametrize("how", ["different", "same"])
def test_vmap_draws_as_torch_func_would(how: str) -> None:
    fn = lambda row: F.dropout(row, 0.4) + torch.rand_like(row)
    wanted = _plain(torch.func.vmap(fn, randomness=how), X)
    mapped = sf.vmap(fn, randomness=how)
    assert_close(_again(sf.jit(mapped), X), wanted)
    with simulated(a=2, b=2) as mesh:
        got = _again(sf.shard(mapped, mesh, (P("a", "b"),)), X)
        assert_close(sf.full(got), wanted)


def test_samples_that_share_all_arguments_still_draw_apart() -> None:
    fn = lambda x: torch.rand_like(x)
    drawn = sf.vmap(fn, in_axes=None, axis_size=4, randomness="different")(X)
    assert drawn.unique().numel() == 4 * X.numel()
    drawn = sf.vmap(fn, in_axes=None, axis_size=4, randomness="same")(X)
    assert drawn.unique().numel() == X.numel()


def test_vmap_says_how_random_calls_are_to_be_taken() -> None:
    with pytest.raises(TreeError, match="randomness is 'some'"):
        sf.vmap(torch.rand_like, randomness="some")
    with pytest.raises(CaptureError, match="'same' or 'different' randomness"):
        sf.jit(sf.vmap(torch.rand_like))(X)


def test_in_a_shard_map_an_unvarying_draw_is_equal_on_all_ranks() -> None:
    with simulated(a=2) as mesh:
        f = sf.shard_map(lambda x: x * 0 + torch.rand(3, 5), mesh, (P("a"),), P("a"))
        drawn = sf.full(_again(f, X.float()))
        assert torch.equal(drawn[:3], drawn[3:])


def test_a_generator_is_refused_by_name() -> None:
    generator = torch.Generator()
    for fn in (
        lambda x: x.bernoulli(0.5, generator=generator),
        lambda x: x.clone().normal_(generator=generator),
        lambda x: x + torch.rand(3, generator=generator),
        lambda x: x + torch.rand(3, generator=torch.default_generator),
    ):
        with pytest.raises(ShardError, match="a generator of random numbers"):
            sf.jit(fn)(X)
    with pytest.raises(ShardError, match="such as a generator"):
        sf.jit(lambda x: x + torch.rand(3, generator=torch.Generator()))(X)
    assert sf.jit(lambda x: x.bernoulli(0.5, generator=None))(X).shape == X.shape


SEEDS: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda x: (torch.manual_seed(0), x)[1],
    "seed": lambda x: x * torch.seed(),
    "initial_seed": lambda x: x * torch.initial_seed(),
    "get_rng_state": lambda x: x + torch.get_rng_state().sum(),
    "set_rng_state": lambda x: (torch.set_rng_state(STATE), x)[1],
    "random": lambda x: x * pyrandom.random(),
    "randint": lambda x: x * pyrandom.randint(0, 9),
    "uniform": lambda x: x * pyrandom.uniform(0, 9),
    "cuda": lambda x: (torch.cuda.manual_seed_all(0), x)[1],
}
STATE = torch.get_rng_state()


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize("options", [{}, {"seed": "required"}], ids=["", "required"])
def test_what_reads_a_generator_is_refused_by_name(name: str, options: Any) -> None:
    with pytest.raises(ShardError, match="reads or seeds a generator") as caught:
        sf.jit(SEEDS[name], **options)(X)
    assert "sf.random.state.seed(seed)" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: D.Normal(x, 2.0).rsample(),
    "categorical": lambda x: D.Categorical(logits=x).sample(),
    "bernoulli": lambda x: D.Bernoulli(logits=x).sample(),
    "gamma": lambda x: D.Gamma(x.exp(), x.exp()).rsample(),
    "beta": lambda x: D.Beta(x.exp(), x.exp()).rsample(),
    "dirichlet": lambda x: D.Dirichlet(x.exp()).rsample(),
    "poisson": lambda x: D.Poisson(x.exp()).sample((2,)),
    "negative binomial": lambda x: D.NegativeBinomial(5, logits=x).sample(),
    "uniform": lambda x: D.Uniform(x, x + 1).rsample(),
    "laplace": lambda x: D.Laplace(x, x.exp()).rsample(),
    "multivariate": lambda x: D.MultivariateNormal(x, torch.diag_embed(x.exp())).rsample(),
    "independent": lambda x: D.Independent(D.Normal(x, 2.0), 1).rsample((3,)),
    "squashed": lambda x: D.TransformedDistribution(
        D.Normal(x, 2.0), [D.transforms.TanhTransform(cache_size=1)]
    ).rsample(),
    "checked": lambda x: D.Beta(x.exp(), x.exp(), validate_args=True).rsample(),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_of_torch_draw_what_one_device_draws(name: str) -> None:
    fn = DISTRIBUTIONS[name]
    want = _plain(fn, X)
    close(_again(sf.jit(fn), X), want)
    with simulated(a=2, b=2) as mesh:
        for spec in (P("a"), P("b", "a")):
            got = sf.full(_again(sf.shard(fn, mesh, (spec,)), X))
            close(got, want)


def test_custom_vjp_draws_in_its_forward() -> None:
    @sf.custom_vjp
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    def forward(x: torch.Tensor) -> Any:
        drawn = torch.rand_like(x)
        return x * drawn, drawn

    noisy.defvjp(forward, lambda drawn, g: (g * drawn,))
    grad = _again(sf.jit(sf.grad(lambda x: noisy(x).sum())), X)
    assert torch.equal(grad, _plain(torch.rand_like, X))


def test_a_pullback_and_a_push_draw_the_numbers_of_their_value() -> None:
    x = torch.ones(50, dtype=torch.float64)
    drop = lambda x: torch.nn.functional.dropout(x, 0.5)
    with sf.random.state.fork("pullbacks"):
        value, pull = sf.vjp(drop, x)
        other = sf.jit(drop, backend="aten")(x)
        assert not torch.equal(value, other)
        for _ in range(2):
            assert torch.equal(pull(x)[0], value)
        left, push = sf.linearize(drop, x)
        assert not torch.equal(left, value)
        for _ in range(2):
            assert torch.equal(push(x), left)
        before = sf.random.state.get()
        pull(x)
        assert all(torch.equal(x, before[tag]) for tag, x in sf.random.state.get().items())
