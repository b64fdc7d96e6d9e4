"""DTensors and collectives by hand inside `jit`: as eager torch computes them on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import asked
from ranks import run_ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf
from tests.dtensors.compared import assert_same, of_rank, plain
from tests.dtensors.programs import (
    LOSSES,
    PROGRAMS,
    Program,
    loss_of_equal_rows,
    loss_of_rows_unsaid,
    own,
)

MESHES = {(2,): ("dp",), (2, 2): ("dp", "tp")}


def _mesh(shape: tuple[int, ...]) -> Any:
    return sf.make_mesh(shape, MESHES[shape])


def _staged(program: Program, mesh: Any, backend: str) -> Any:
    return sf.jit(lambda x, w: program(x, w, mesh), backend=backend)


def _gradients(loss: Program, mesh: Any, backend: str) -> Any:
    fn = lambda x, w: loss(x, w, mesh)
    return sf.jit(sf.grad(fn, argnums=(0, 1)), backend=backend)


def _eager_gradients(loss: Program, mesh: Any, x: Any, w: Any) -> Any:
    x, w = x.requires_grad_(), w.requires_grad_()
    return torch.autograd.grad(loss(x, w, mesh), (x, w))


def _on_part(mesh: Any, rank: int, around: Any = lambda fn: fn) -> Any:
    """A DTensor on the last axis of the mesh, of which each group of ranks has its own values."""
    x, w = own(rank)
    part = mesh[mesh.mesh_dim_names[-1]]
    d = DTensor.from_local(x, part, [Shard(0)])
    fn = lambda d, w: (d * 2, d.full_tensor() @ w, d.t(), (d @ d.t()).full_tensor())
    return around(fn)(d, w)


def _closed_over(mesh: Any, rank: int, around: Any = lambda fn: fn) -> Any:
    """The same as `_on_part`, of a DTensor that the function closes over."""
    x, w = own(rank)
    part = mesh[mesh.mesh_dim_names[-1]]
    d = DTensor.from_local(x, part, [Shard(0)])
    return around(lambda w: (d * 2, d.full_tensor() @ w))(w)


def _in_shard(mesh: Any, rank: int, around: Any, held: int = 1) -> Any:
    """A global tensor of DTensors on the last axis of the mesh: an argument, and a closed-over
    one of a rank.
    """
    part = mesh[mesh.mesh_dim_names[-1]]
    d, other = (DTensor.from_local(own(k)[0], part, [Shard(0)]) for k in (rank, held))
    return around(lambda d: (d * 2 + other).cos().sum(0))(d).full_tensor()


def _other_parts(mesh: Any, rank: int, held: int) -> str:
    """Why `shard` refuses DTensors on parts of the mesh that hold other values."""
    try:
        _in_shard(mesh, rank, lambda fn: sf.shard(fn, mesh, backend="aten"), held)
    except sf.DivergenceError as error:
        return str(error)
    return ""


def _refusal(mesh: Any, rank: int) -> str:
    """Why the gradient of `loss_of_rows_unsaid` is refused."""
    try:
        _gradients(loss_of_rows_unsaid, mesh, "aten")(*own(rank))
    except sf.CaptureError as error:
        return str(error)
    return ""


def _of_equal(mesh: Any, rank: int) -> tuple[Any, Any]:
    x, w = own(rank)[0], own(0)[1]  # all ranks have one w
    eager = _eager_gradients(loss_of_equal_rows, mesh, x, w)
    staged = _gradients(loss_of_equal_rows, mesh, "aten")
    return eager, staged(x.detach(), w.detach())


def _of_compiled(mesh: Any, rank: int) -> tuple[Any, Any]:
    program = PROGRAMS["functions"]
    staged = _staged(program, mesh, "aten").compile(*own(rank))
    return program(*own(rank), mesh), staged(*own(rank))


def _of_shard(mesh: Any, rank: int) -> tuple[Any, Any]:
    column = mesh.get_local_rank(mesh.ndim - 1)
    by_shard = lambda fn: sf.shard(fn, mesh, backend="aten")
    return _in_shard(mesh, column, lambda fn: fn), _in_shard(mesh, column, by_shard)


# calls of another form: (what eager torch returns, what a staged function does)
CALLED: dict[str, Callable[[Any, int], tuple[Any, Any]]] = {
    "compiled": _of_compiled,
    "part": lambda mesh, rank: (_on_part(mesh, rank), _on_part(mesh, rank, sf.jit)),
    "in shard": _of_shard,
    "closed over": lambda mesh, rank: (_closed_over(mesh, rank), _closed_over(mesh, rank, sf.jit)),
    "equal": _of_equal,
}


def _on_a_rank(shape: tuple[int, ...], names: set[str]) -> dict[str, Any]:
    """For each program what eager torch returns here, and what `jit` does."""
    mesh, rank = _mesh(shape), torch.distributed.get_rank()
    found = {
        name: (plain(program(*own(rank), mesh)), plain(_staged(program, mesh, "aten")(*own(rank))))
        for name, program in PROGRAMS.items()
        if name in names
    }
    for name in filter(names.__contains__, CALLED):  # in one order on all ranks
        found[name] = tuple(map(plain, CALLED[name](mesh, rank)))
    found["unsaid"] = _refusal(mesh, rank)
    column = mesh.get_local_rank(mesh.ndim - 1)
    refusals = [_other_parts(mesh, rank, 1), _other_parts(mesh, column, rank)]
    found["of other parts"] = refusals
    for name in filter(names.__contains__, LOSSES):
        loss = LOSSES[name]
        found[name] = (
            plain(_eager_gradients(loss, mesh, *own(rank))),
            plain(_gradients(loss, mesh, "aten")(*own(rank))),
        )
    return found


@pytest.fixture(scope="module", params=MESHES, ids=str)
def answers(request: pytest.FixtureRequest) -> Any:
    """(shape of the mesh, the answers of each real rank)."""
    shape = request.param
    size = torch.Size(shape).numel()
    cases = asked(request, "answers", "name")
    names = {name for mesh, name in cases if mesh == shape}
    return shape, run_ranks(size, _on_a_rank, shape, names)


NAMES = [*PROGRAMS, *LOSSES, *CALLED]


@pytest.mark.parametrize("name", NAMES)
def test_s2_2_a_program_answers_as_eager_torch_on_real_ranks(name: str, answers: Any) -> None:
    _, ranks = answers
    for eager, staged in (found[name] for found in ranks):
        assert_same(staged, eager)


@pytest.mark.parametrize("name", [*PROGRAMS, *LOSSES])
def test_a_simulated_world_answers_as_real_ranks(name: str, answers: Any) -> None:
    shape, ranks = answers
    with sf.fake_world(len(ranks)):
        mesh = _mesh(shape)
        staged = (
            _staged(PROGRAMS[name], mesh, "aten")
            if name in PROGRAMS
            else _gradients(LOSSES[name], mesh, "aten")
        )
        columns = zip(*map(own, range(len(ranks))), strict=True)
        out = plain(staged(*map(SimulatedTensor, columns)))
        for rank, found in enumerate(ranks):
            assert_same(of_rank(out, rank), found[name][0])


def test_a_gradient_that_torch_may_have_wrong_is_refused(answers: Any) -> None:
    _, ranks = answers
    for found in ranks:
        text = found["unsaid"]
        assert text.startswith("DTensor.to_local: a value that is equal on all ranks of dp")
        assert (
            "needed: grad_placements of to_local, which say whether all ranks compute equal "
            "gradients, or each rank computes one term of a sum" in text
        )
        assert "or [Partial()] to sum over ranks" in text
        assert "programs.py" in text


def test_parts_that_hold_other_values_are_refused_in_shard(answers: Any) -> None:
    shape, ranks = answers
    for found in ranks:
        names = "argument d", "closed-over other"
        for name, text in zip(names, found["of other parts"], strict=True):
            refusal = f"{name}: the DTensor is on a submesh"
            assert (refusal in text) is (len(shape) > 1)


def _compiled(shape: tuple[int, ...]) -> Any:
    mesh, rank = _mesh(shape), torch.distributed.get_rank()
    return [
        (
            plain(PROGRAMS[name](*own(rank), mesh)),
            plain(_staged(PROGRAMS[name], mesh, "inductor")(*own(rank))),
        )
        for name in ("sequence_parallel", "functions")
    ]


def _arriving() -> Any:
    mesh = _mesh((2,))
    x, _ = own(torch.distributed.get_rank())
    total = functional.all_reduce(x, "sum", mesh.get_group())
    assert type(total) is not torch.Tensor
    wanted = sum(own(rank)[0] for rank in range(2)) + 1
    return [sf.jit(lambda x: x + 1, backend="aten")(total) for _ in range(2)], wanted


def test_s2_2_an_argument_that_is_still_arriving_is_awaited() -> None:
    for found, wanted in run_ranks(2, _arriving):
        for x in found:
            assert_close(x, wanted)


@pytest.mark.inductor
def test_s2_2_a_compiled_program_answers_as_eager_torch() -> None:
    for rank in run_ranks(2, _compiled, (2,)):
        for eager, staged in rank:
            assert_same(staged, eager)
