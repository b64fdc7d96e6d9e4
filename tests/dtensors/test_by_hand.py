"""S7.3: collectives by hand inside `jit`, over one axis of two and over all ranks: as eager torch
computes them on four Gloo processes, with their derivatives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import asked
from ranks import run_ranks
from worlds import SimulatedTensor

import shardfn as sf
from tests.dtensors.by_hand import BY_HAND, loss_of_forms, loss_of_lists, loss_of_lists_by_sums
from tests.dtensors.compared import assert_same, of_rank, plain
from tests.dtensors.programs import own

# each with a loss whose gradient eager torch has
LOSSES = {
    "loss_of_forms": (loss_of_forms, loss_of_forms),
    "loss_of_lists": (loss_of_lists, loss_of_lists_by_sums),
}


def _mesh() -> Any:
    return sf.make_mesh((2, 2), ("dp", "tp"))


def _staged(name: str, mesh: Any) -> Any:
    if name in BY_HAND:
        return sf.jit(lambda x, w: BY_HAND[name](x, w, mesh), backend="aten")
    loss, _ = LOSSES[name]
    gradient = sf.grad(lambda x, w: loss(x, w, mesh), argnums=(0, 1))
    return sf.jit(gradient, backend="aten")


def _eager(name: str, mesh: Any, x: Any, w: Any) -> Any:
    if name in BY_HAND:
        return BY_HAND[name](x, w, mesh)
    args = x.requires_grad_(), w.requires_grad_()
    return torch.autograd.grad(LOSSES[name][1](*args, mesh), args)


def _on_a_rank(names: set[str]) -> dict[str, Any]:
    """For each program what eager torch returns here, and what `jit` does."""
    mesh, rank = _mesh(), torch.distributed.get_rank()
    return {
        name: (plain(_eager(name, mesh, *own(rank))), plain(_staged(name, mesh)(*own(rank))))
        for name in (*BY_HAND, *LOSSES)
        if name in names
    }


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Any:
    """The answers of each of four real ranks, to the programs that are asked for."""
    return run_ranks(4, _on_a_rank, asked(request, "name"))


@pytest.mark.parametrize("name", [*BY_HAND, *LOSSES])
def test_s7_3_collectives_by_hand_answer_as_eager_torch(name: str, answers: Any) -> None:
    with sf.fake_world(4):
        columns = zip(*map(own, range(4)), strict=True)
        out = plain(_staged(name, _mesh())(*map(SimulatedTensor, columns)))
        for rank, found in enumerate(answers):
            eager, staged = found[name]
            assert_same(staged, eager)
            assert_same(of_rank(out, rank), eager)
