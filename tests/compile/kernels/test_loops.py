"""The dims of loops that Inductor merges."""

from __future__ import annotations

import torch

from shardfn.compile.kernels import loops
from shardfn.compile.kernels.stored import Stored
from tests.support.stages.graphs import graph_of

X = torch.ones(2, 4, 6)


def test_dims_that_a_broadcast_value_reads_apart_are_not_merged() -> None:
    kernels = lambda fn, *xs: Stored(graph_of(fn, *xs), {}).kernels
    (plain,) = kernels(lambda x: [x + 1], X)
    (masked,) = kernels(lambda x, m: [x + m], X, torch.ones(4, 6))
    (row,) = kernels(lambda x: [x.sum(-1)], X)
    assert plain.loop.kept == (48,) and masked.loop.kept == (2, 24)
    assert (row.loop.kept, row.loop.reduced) == ((8,), (6,))


def test_a_loop_of_one_dim_fits_another_of_its_shape() -> None:
    one, other = loops.Loop((2, 6), (12,)), loops.Loop((2, 6), (2, 6))
    assert loops.is_reshaped(one, other) and not loops.fits(one, other)
    assert loops.fits(other, loops.Loop((2, 6), (2,), (6,)))
