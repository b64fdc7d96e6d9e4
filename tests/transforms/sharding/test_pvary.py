"""A value that all ranks have, as each rank's own: its gradient is not summed over the axis."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

W = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
X = torch.arange(18.0, dtype=torch.float64).reshape(6, 3).sin()
MESHES = [((2,), ("dp",), "dp"), ((3,), ("dp",), "dp"), ((2, 3), ("dp", "tp"), ("dp", "tp"))]


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x * w).sin().sum() ** 2


def per_sample(w: torch.Tensor, x: torch.Tensor, axis: Any) -> torch.Tensor:
    return sf.vmap(sf.grad(loss), in_axes=(None, 0))(sf.pvary(w, axis), x)


def on_ranks(fn: Any, shape: Any, names: Any, axis: Any, out: P) -> torch.Tensor:
    """A function of W and of the rows of X that a rank holds."""
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, names)
        run = sf.shard_map(lambda w, x: fn(w, x, axis), mesh, (P(), P(axis)), out)
        return sf.full(run(W, X))


@pytest.mark.parametrize(("shape", "names", "axis"), MESHES)
def test_gradients_of_samples_are_those_of_one_device(shape: Any, names: Any, axis: Any) -> None:
    wanted = torch.func.vmap(torch.func.grad(loss), (None, 0))(W, X)
    assert_close(on_ranks(per_sample, shape, names, axis, P(axis)), wanted)


@pytest.mark.parametrize(("shape", "names", "axis"), MESHES)
def test_the_gradient_is_each_ranks_own_and_psum_adds_them(
    shape: Any, names: Any, axis: Any
) -> None:
    total = lambda w, x: torch.func.vmap(loss, (None, 0))(w, x).sum()
    own = lambda w, x, a: sf.psum(sf.grad(total)(sf.pvary(w, a), x), a)
    shared = lambda w, x, a: sf.grad(total)(w, x)
    wanted = torch.func.grad(total)(W, X)
    for fn in (own, shared):
        assert_close(on_ranks(fn, shape, names, axis, P()), wanted)


def test_a_derivative_of_the_call_is_the_sum() -> None:
    total = lambda w, x, a: sf.psum((sf.pvary(w, a) * x).sin().sum(), a)
    with simulated(dp=3) as mesh:
        run = sf.shard_map(lambda w, x: total(w, x, "dp"), mesh, (P(), P("dp")), P())
        got = sf.full(sf.grad(run)(W, X))
    assert_close(got, torch.func.grad(lambda w: (w * X).sin().sum())(W))


def test_a_value_that_varies_already_and_an_unknown_axis_are_refused() -> None:
    twice = lambda w, x, a: sf.pvary(x, a)
    with pytest.raises(sf.CaptureError, match="x varies over dp already"):
        on_ranks(twice, (2,), ("dp",), "dp", P("dp"))
    with pytest.raises(sf.ShardError, match="tp"):
        on_ranks(lambda w, x, a: sf.pvary(w, "tp") + x, (2,), ("dp",), "dp", P("dp"))


def of_closed_over(w: torch.Tensor, x: torch.Tensor, a: Any) -> torch.Tensor:
    return sf.vmap(lambda row: sf.grad(lambda w: loss(w, row))(w))(x)


SUMMED = {  # gradients of samples that are summed over ranks
    "of an argument": lambda w, x, a: sf.vmap(sf.grad(loss), (None, 0))(w, x),
    "of a closed-over value": of_closed_over,
    "by jacrev": lambda w, x, a: sf.jacrev(lambda w: torch.func.vmap(loss, (None, 0))(w, x))(w),
}
MEANT = {
    "by pvary": lambda w, x, a: per_sample(w, x, a),
    "without vmap": lambda w, x, a: sf.grad(loss)(w, x) + x,
    "of each of an ensemble": lambda w, x, a: sf.vmap(sf.grad(loss), (0, None))(x - x + w, x),
    "of a sum over ranks": lambda w, x, a: (
        sf.vmap(sf.grad(lambda w, row: sf.psum(loss(w, row), a)), (None, 0))(w, x) + x
    ),
}


@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_samples_that_are_summed_over_ranks_are_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=r"sf\.pvary\(w, 'dp'\)") as caught:
        on_ranks(SUMMED[name], (2,), ("dp",), "dp", P("dp"))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", MEANT)
def test_other_gradients_are_not_warned_of(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        on_ranks(MEANT[name], (2,), ("dp",), "dp", P("dp"))
