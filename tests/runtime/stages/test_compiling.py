"""Stage 4 of one rank's program: which inputs are donated."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import P
from shardfn.runtime.stages.compiling import donated_places

X = torch.ones(4, 4)


def test_donated_inputs_are_counted_among_the_inputs_of_the_program() -> None:
    one = sf.jit(lambda x, y: x + y, donate_argnums=1).lower(X, X)
    assert donated_places(one.traced.placed) == [1]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        step = sf.shard(lambda x, y: x + y, mesh, (P(), P("dp")), donate_argnums=1)
        placed = step.lower(X, X).traced.placed
    assert donated_places(placed) == [2]  # after the coordinate of the rank
