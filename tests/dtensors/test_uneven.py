"""Shards of different sizes in the code of one rank: as eager torch computes them on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import asked
from ranks import run_ranks
from worlds import SimulatedTensor

import shardfn as sf
from tests.dtensors.compared import assert_same, of_rank, plain
from tests.dtensors.uneven import LOSSES, ON_TWO_AXES, PROGRAMS, Program, argument, same

MESHES = {(3,): ("dp",), (2, 2): ("dp", "tp")}


def _mesh(shape: tuple[int, ...]) -> Any:
    return sf.make_mesh(shape, MESHES[shape])


def _staged(program: Program, mesh: Any) -> Any:
    return sf.jit(lambda x, w: program(x, w, mesh), backend="aten")


def _gradients(loss: Program, mesh: Any) -> Any:
    fn = lambda x, w: loss(x, w, mesh)
    return sf.jit(sf.grad(fn, argnums=(0, 1)), backend="aten")


def _eager_gradients(loss: Program, mesh: Any, x: Any) -> Any:
    x, w = (y.detach().requires_grad_() for y in (x, same()[1]))
    return torch.autograd.grad(loss(x, w, mesh), (x, w), materialize_grads=True)


def _names(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ON_TWO_AXES if len(shape) == 2 else (*PROGRAMS, *LOSSES)


def _on_a_rank(shape: tuple[int, ...], names: list[str]) -> dict[str, Any]:
    """For each program what eager torch returns here, and what `jit` does."""
    mesh, rank = _mesh(shape), torch.distributed.get_rank()
    w, found = same()[1], {}
    for name in names:
        program = {**PROGRAMS, **LOSSES}[name]
        x = argument(name, mesh, lambda own: own(rank))
        if name in LOSSES:
            eager = plain(_eager_gradients(program, mesh, x))
            ours = plain(_gradients(program, mesh)(x, w))
        else:
            eager, staged = plain(program(x, w, mesh)), _staged(program, mesh)
            staged(x, w)
            ours = plain(staged(x, w))
        found[name] = eager, ours
    return found


Answers = Callable[[tuple[int, ...]], list[Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Answers:
    """The answers of each real rank of a mesh, to the programs that are asked for."""
    cases = asked(request, "shape", "name")

    @functools.cache
    def of(shape: tuple[int, ...]) -> list[Any]:
        names = [name for name in _names(shape) if (shape, name) in cases]
        return run_ranks(torch.Size(shape).numel(), _on_a_rank, shape, names)

    return of


CASES = [(shape, name) for shape in MESHES for name in _names(shape)]


@pytest.mark.parametrize(("shape", "name"), CASES, ids=str)
def test_s2_2_a_program_of_uneven_shards_answers_as_eager_torch_on_real_ranks(
    shape: tuple[int, ...], name: str, answers: Answers
) -> None:
    for eager, staged in (found[name] for found in answers(shape)):
        assert_same(staged, eager)


@pytest.mark.parametrize(("shape", "name"), CASES, ids=str)
def test_a_simulated_world_answers_as_real_ranks(
    shape: tuple[int, ...], name: str, answers: Answers
) -> None:
    ranks = answers(shape)
    with sf.fake_world(len(ranks)):
        mesh = _mesh(shape)
        staged = (
            _staged(PROGRAMS[name], mesh) if name in PROGRAMS else _gradients(LOSSES[name], mesh)
        )
        every = lambda own: SimulatedTensor(list(map(own, range(len(ranks)))))
        out = plain(staged(argument(name, mesh, every), same()[1]))
        for rank, found in enumerate(ranks):
            if name == "taken_apart" and rank > 0:
                out[1] = found[name][0][1]  # the number is that of rank 0
            assert_same(of_rank(out, rank), found[name][0])
