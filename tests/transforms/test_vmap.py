"""vmap over trees, next to torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close

import shardfn as sf

G = torch.Generator().manual_seed(5)
X, Y = (torch.randn(5, 3, generator=G, dtype=torch.float64) for _ in range(2))
TREE = {"w": X}


def test_vmap_takes_prefixes_negative_axes_and_shared_arguments() -> None:
    fn = lambda p, y, k: {"a": p["w"] * y, "b": (p["w"].sum() + y.sum()) * k}
    got = sf.vmap(fn, in_axes=({"w": -1}, 1, None), out_axes={"a": 1, "b": 0})(
        TREE, Y, torch.tensor(2.0)
    )
    close(
        got,
        torch.func.vmap(fn, in_dims=({"w": -1}, 1, None), out_dims={"a": 1, "b": 0})(
            TREE, Y, torch.tensor(2.0)
        ),
    )


def test_vmap_of_nothing_mapped_repeats_axis_size_times() -> None:
    close(sf.vmap(lambda x: x + 1, in_axes=None, axis_size=3)(X[0]), (X[0] + 1).expand(3, 3))


def test_closed_over_mapped_values_keep_their_shape() -> None:
    outer = lambda x: sf.vmap(lambda y: (x * y).sum())(Y)
    close(sf.vmap(outer)(X), X @ Y.T)


NOTHING = torch.zeros(0, 3, dtype=torch.float64)
OF_NOTHING: dict[str, Callable[..., Any]] = {
    "a product": lambda r: r * 2,
    "a reduction": lambda r: r * r.mean(),  # torch.func.vmap refuses it without samples
    "a derivative": sf.grad(lambda r: (r * r.mean()).sum()),
    "samples of samples": sf.vmap(lambda x: x * NOTHING.sum(), in_axes=0),
    "a tree": lambda r: {"sum": r.sum(), "number": 3, "pair": (r, r.sort().values)},
}


@pytest.mark.parametrize("name", OF_NOTHING)
def test_no_samples_have_results_without_samples(name: str) -> None:
    fn = OF_NOTHING[name]
    one = sf.vmap(fn)(torch.ones(1, 3, dtype=torch.float64))
    for call in (sf.vmap(fn), sf.jit(sf.vmap(fn))):
        close(call(NOTHING), sf.tree_map(lambda x: x[:0], one))
    shared = sf.vmap(lambda r: (r.sum(), X.sum()), out_axes=(0, None))
    close(sf.jit(shared)(NOTHING), (NOTHING.sum(1), X.sum()))


def test_a_sum_over_no_samples_is_zero() -> None:
    fn = lambda r: (r * 2, sf.psum(r.exp(), "samples"))
    summed = sf.vmap(fn, out_axes=(0, None), axis_name="samples")
    close(sf.jit(summed)(NOTHING), (NOTHING, torch.zeros(3, dtype=torch.float64)))


def test_gradients_of_no_samples_are_zero() -> None:
    loss = lambda w, x: sf.vmap(lambda r: (r @ w) * r.mean())(x).sum()
    gradients = sf.jit(sf.grad(loss, argnums=(0, 1)))(X.T, NOTHING)
    close(gradients, (torch.zeros_like(X.T), NOTHING))
