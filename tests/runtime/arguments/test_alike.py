"""Arguments that must be the same on all ranks of an axis."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

import shardfn as sf
from shardfn.simulated import SimulatedTensor

X = torch.arange(3.0, dtype=torch.float64)


def test_each_call_of_a_simulated_world_compares_the_ranks_of_a_group() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        part = mesh["tp"]
        w = distribute_tensor(X, part, [Replicate()])
        loss = lambda w, t: (w.to_local() * t).sum()
        gradient = sf.jit(sf.grad(loss), backend="aten")
        alone = gradient(w, X)
        torch.testing.assert_close(alone.full_tensor(), X)
        of_tp = SimulatedTensor([X + rank % 2 for rank in range(4)])
        for _ in range(2):
            with pytest.raises(sf.DivergenceError, match="argument t: it differs"):
                gradient(w, of_tp)
        same = SimulatedTensor([X.clone() for _ in range(4)])
        torch.testing.assert_close(gradient(w, same).full_tensor(), X)


def test_a_call_of_a_compiled_program_compares_them_too() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("tp",))
        w = distribute_tensor(X, mesh, [Replicate()])
        loss = lambda w, t: (w.to_local() * t).sum()
        for fn in (sf.grad(loss), sf.jit(sf.value_and_grad(loss), backend="aten")):
            compiled = fn.compile(w, X)
            differing = SimulatedTensor([X + rank for rank in range(4)])
            for _ in range(2):
                compiled(w, X)
                with pytest.raises(sf.DivergenceError, match="argument t: it differs"):
                    compiled(w, differing)
