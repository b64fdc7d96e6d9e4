"""torch.distributions, whose checks are on by default, are the plain function's under every
transform: a program leaves out the checks of values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributions as D
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.errors import CaptureError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(7, 3, dtype=torch.float64, generator=GENERATOR)
S = torch.rand(7, 3, dtype=torch.float64, generator=GENERATOR) + 0.5
ONE = torch.eye(3, dtype=torch.float64)[[0, 2, 1, 0, 1, 2, 2]]
WHOLE = torch.tensor([0, 2, 1, 0, 1, 2, 2])
COUNTS = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)

Tensor = torch.Tensor
between = D.kl_divergence


@pytest.fixture(autouse=True)
def values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are on, as in a fresh process. The first torch.compile of a process turns them off."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


def matrix(s: Tensor) -> Tensor:
    return torch.diag_embed(s) + 0.1


def chosen(x: Tensor, s: Tensor) -> Tensor:
    policy = D.Categorical(logits=x)
    return (policy.log_prob(WHOLE) * s[:, 0]).sum() + policy.entropy().mean()


VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normal": lambda x, s: D.Normal(x, s).log_prob(x.tanh()) + D.Normal(x, s).entropy(),
    "numbers": lambda x, s: D.Normal(0.0, 1.0).log_prob(x) * s,
    "categorical": chosen,
    "probs": lambda x, s: D.Categorical(probs=s).log_prob(WHOLE) + x[:, 0],
    "bernoulli": lambda x, s: D.Bernoulli(torch.sigmoid(x)).log_prob(ONE) * s,
    "beta": lambda x, s: D.Beta(s, s + 1).log_prob(torch.sigmoid(x)) + D.Beta(s, s).entropy(),
    "dirichlet": lambda x, s: D.Dirichlet(s).log_prob(x.softmax(-1)) + D.Dirichlet(s).entropy(),
    "scale_tril": lambda x, s: D.MultivariateNormal(x, scale_tril=matrix(s).tril()).log_prob(s),
    "covariance": lambda x, s: D.MultivariateNormal(x, matrix(s)).log_prob(s),
    "precision": lambda x, s: D.MultivariateNormal(x, precision_matrix=matrix(s)).entropy(),
    "low_rank": lambda x, s: D.LowRankMultivariateNormal(x, s[..., None], s).log_prob(x * s),
    "independent": lambda x, s: D.Independent(D.Normal(x, s), 1).log_prob(x.tanh()),
    "gamma": lambda x, s: D.Gamma(s, s + x.exp()).log_prob(s),
    "squashed": lambda x, s: D.TransformedDistribution(
        D.Normal(x, s), [D.transforms.TanhTransform(cache_size=1)]
    ).log_prob(torch.tanh(x * s)),
    "mixture": lambda x, s: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, s)).log_prob(
        s[:, 0]
    ),
    "one_hot": lambda x, s: D.OneHotCategorical(logits=x).log_prob(ONE) + s[:, 0],
    "multinomial": lambda x, s: D.Multinomial(3, logits=x).log_prob(COUNTS) + s[:, 0],
    "uniform": lambda x, s: D.Uniform(x, x + s).log_prob(x + 0.3 * s),
    "geometric": lambda x, s: D.Geometric(torch.sigmoid(x)).log_prob(COUNTS) + s,
    "continuous": lambda x, s: D.ContinuousBernoulli(torch.sigmoid(x), validate_args=True).log_prob(
        s / 2
    ),
    "wishart": lambda x, s: D.Wishart(s[:, 0] + 6, matrix(s)).log_prob(matrix(x.exp())),
    "lkj": lambda x, s: D.LKJCholesky(3, s[:, 0]).log_prob(torch.eye(3, dtype=x.dtype)) + x[:, 0],
    "kl_normal": lambda x, s: between(D.Normal(x, s), D.Normal(0.0, 1.0)),
    "kl_categorical": lambda x, s: between(D.Categorical(logits=x), D.Categorical(logits=s)),
    "kl_bernoulli": lambda x, s: between(D.Bernoulli(logits=x), D.Bernoulli(logits=s)),
    "kl_beta": lambda x, s: between(D.Beta(s, x.exp()), D.Beta(s + 1, s)),
    "kl_dirichlet": lambda x, s: between(D.Dirichlet(s), D.Dirichlet(x.exp())),
    "kl_multivariate": lambda x, s: between(
        D.MultivariateNormal(x, matrix(s)), D.MultivariateNormal(s, matrix(s + 1))
    ),
    "kl_independent": lambda x, s: between(
        D.Independent(D.Normal(x, s), 1), D.Independent(D.Normal(s, s), 1)
    ),
}


def differentiated(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return sf.value_and_grad(lambda x, s: VALUES[name](x, s).sum(), argnums=(0, 1))


def plain(name: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, s = X.clone().requires_grad_(), S.clone().requires_grad_()
    loss = VALUES[name](x, s).sum()
    return loss.detach(), torch.autograd.grad(loss, (x, s), materialize_grads=True)


@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients_are_the_plain_functions(name: str) -> None:
    want = plain(name)  # first: torch.distributions.kl looks its rules up once, in eager code
    got = sf.jit(differentiated(name), backend="aten")(X, S)
    assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", VALUES)
def test_so_they_are_on_a_mesh(name: str) -> None:
    want = plain(name)
    with simulated(dp=4) as mesh:
        step = sf.shard(differentiated(name), mesh, (P("dp"), P("dp")), backend="aten")
        got = sf.full(step(X, S))
    assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_checks_that_are_asked_for_are_left_out_too() -> None:
    def fn(x: Tensor) -> Tensor:
        return D.Normal(x, 2.0, validate_args=True).log_prob(x**2).sum()

    assert_close(sf.grad(fn)(X), torch.func.grad(fn)(X))
    assert_close(sf.vmap(fn)(X), torch.stack([fn(row) for row in X]))
    assert sf.jit(lambda x: D.Normal(x, -x.exp()).log_prob(x), backend="aten")(X).isnan().all()


def test_a_sample_of_the_wrong_shape_is_still_an_error() -> None:
    with pytest.raises(ValueError, match="must match event_shape"):
        sf.jit(lambda x: D.Dirichlet(x.exp()).log_prob(x[:, :2].exp()))(X)


def test_a_constraint_outside_of_a_check_is_not_taken_for_true() -> None:
    check = D.constraints.positive_definite.check
    with pytest.raises(CaptureError, match="branches on a tensor's value"):
        sf.jit(lambda x: check(x))(X[:3])
    assert not sf.jit(D.constraints.positive.check, backend="aten")(X).all()


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        chosen = D.Beta(y.exp(), y.exp()).log_prob(torch.sigmoid(x))
        return chosen + D.MultivariateNormal(y, matrix(y.exp())).log_prob(x)[:, None]


def test_a_module_that_is_functionalized_checks_no_values() -> None:
    policy = Policy()
    forward, params, buffers = sf.functionalize(policy)
    with simulated(dp=4) as mesh:
        call = sf.shard(forward, mesh, (P(), P(), P("dp")), backend="aten")
        got = sf.full(call(params, buffers, X))[0]
    assert_close(got, policy(X).detach(), rtol=1e-10, atol=1e-10)
