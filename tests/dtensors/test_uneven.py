"""Shards of different sizes in the code of one rank: as eager torch computes them on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import shardfn as sf
from tests.dtensors.compared import assert_same, of_rank, plain
from tests.dtensors.uneven import LOSSES, PROGRAMS, Program, same

MESHES = {(3,): ("dp",), (2, 2): ("dp", "tp")}


def _mesh(shape: tuple[int, ...]) -> Any:
    return sf.make_mesh(shape, MESHES[shape])


def _staged(program: Program, mesh: Any) -> Any:
    return sf.jit(lambda x, w: program(x, w, mesh), backend="aten")


def _gradients(loss: Program, mesh: Any) -> Any:
    fn = lambda x, w: loss(x, w, mesh)
    return sf.jit(sf.grad(fn, argnums=(0, 1)), backend="aten")


def _eager_gradients(loss: Program, mesh: Any) -> Any:
    x, w = (y.requires_grad_() for y in same())
    return torch.autograd.grad(loss(x, w, mesh), (x, w), materialize_grads=True)


def _on_a_rank(shape: tuple[int, ...]) -> dict[str, Any]:
    """For each program what eager torch returns here, and what `jit` does."""
    mesh = _mesh(shape)
    found = {}
    for name, program in PROGRAMS.items():
        staged = _staged(program, mesh)
        ours = [plain(staged(*same())) for _ in range(2)]
        found[name] = plain(program(*same(), mesh)), ours[1]
    for name, loss in LOSSES.items():
        found[name] = (
            plain(_eager_gradients(loss, mesh)),
            plain(_gradients(loss, mesh)(*same())),
        )
    return found


@pytest.fixture(scope="module", params=MESHES, ids=str)
def answers(request: pytest.FixtureRequest) -> Any:
    """(shape of the mesh, the answers of each real rank)."""
    shape = request.param
    return shape, run_ranks(torch.Size(shape).numel(), _on_a_rank, shape)


@pytest.mark.parametrize("name", [*PROGRAMS, *LOSSES])
def test_s2_2_a_program_of_uneven_shards_answers_as_eager_torch_on_real_ranks(
    name: str, answers: Any
) -> None:
    _, ranks = answers
    for eager, staged in (found[name] for found in ranks):
        assert_same(staged, eager)


@pytest.mark.parametrize("name", [*PROGRAMS, *LOSSES])
def test_a_simulated_world_answers_as_real_ranks(name: str, answers: Any) -> None:
    shape, ranks = answers
    with sf.fake_world(len(ranks)):
        mesh = _mesh(shape)
        staged = (
            _staged(PROGRAMS[name], mesh)
            if name in PROGRAMS
            else _gradients(LOSSES[name], mesh)
        )
        out = plain(staged(*same()))
        for rank, found in enumerate(ranks):
            if name != "taken_apart" or rank == 0:  # its number is that of rank 0
                assert_same(of_rank(out, rank), found[name][0])
