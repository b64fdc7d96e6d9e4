"""vmap over trees, next to torch.func."""

from __future__ import annotations

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


def test_samples_without_dims_are_not_rolled_into_each_other() -> None:
    for roll in (lambda x: x.roll(1), lambda x: torch.roll(shifts=(2,), input=x) * x):
        want = torch.stack([roll(x) for x in X[0]])
        close(sf.vmap(roll)(X[0]), want)
        close(sf.vmap(sf.value_and_grad(roll))(X[0])[0], want)
    close(sf.vmap(lambda x: x.roll(1))(X), X.roll(1, 1))
