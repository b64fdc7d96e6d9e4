"""Donated arguments of the code of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import simulated

import shardfn as sf

GONE = """jit(step): the tensor was donated to this call, so its memory is gone
  try: use the call's results, or leave the argument out of donate_argnums"""


def _step(mesh: Any, backend: str = "aten") -> Any:
    def step(d: Any, x: Any, y: Any) -> Any:
        return d * 2 + 1, DTensor.from_local(x * y, mesh, [Shard(0)]), y + 1

    return sf.jit(step, donate_argnums=(0, 1), backend=backend)


def _arguments(mesh: Any) -> tuple[Any, ...]:
    whole = torch.arange(10.0).reshape(5, 2)
    return distribute_tensor(whole, mesh, [Shard(0)]), torch.ones(3), torch.ones(3)


def _checked(mesh: Any, backend: str = "aten") -> None:
    step = _step(mesh, backend)
    for _ in range(3):
        d, x, y = _arguments(mesh)
        whole = d.full_tensor()
        a, b, c = step(d, x, y)
        assert torch.equal(a.full_tensor(), whole * 2 + 1)
        assert torch.equal(b.full_tensor(), torch.ones(6))
        assert torch.equal(c + y, torch.full((3,), 3.0))
        for gone in (d, x):
            with pytest.raises(sf.ShardError) as caught:
                gone.sum()
            assert without_line(caught.value) == GONE
        with pytest.raises(sf.ShardError, match="was donated to this call"):
            step(_arguments(mesh)[0], x, y)


def test_donated_arguments_are_gone_in_a_simulated_world() -> None:
    with simulated(dp=2) as mesh:
        _checked(mesh)


def _on_a_rank(backend: str) -> None:
    _checked(sf.make_mesh((2,), ("dp",)), backend)


@pytest.mark.inductor
def test_donated_arguments_are_gone_on_real_ranks() -> None:
    run_ranks(2, _on_a_rank, "inductor")
