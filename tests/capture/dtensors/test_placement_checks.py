"""Mistakes with DTensors and collectives inside a captured function: what the errors say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message import without_line
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import shardfn as sf

HERE = "HERE"
X = torch.ones(4, 2)
S, R = [Shard(0)], [Replicate()]
Case = tuple[Callable[[Any, Any], Any], str]


def from_local(x: Any, mesh: Any, placements: Any = S, **options: Any) -> Any:
    return DTensor.from_local(x, mesh, placements, **options)


def written(x: Any, mesh: Any) -> Any:
    d = from_local(x * 1, mesh)
    d.to_local().add_(1)
    return d


def written_after(x: Any, mesh: Any) -> Any:
    y = x * 1
    d = from_local(y, mesh)
    y.add_(1)
    return d


def written_before_it_is_read(x: Any, mesh: Any) -> Any:
    d = from_local(x * 1, mesh)
    local = d.to_local()
    d.add_(1)
    return local


def written_through_its_double(x: Any, mesh: Any) -> Any:
    d = from_local(x * 1, mesh)
    d.redistribute(mesh, S).mul_(2)
    return d


def of_three_rows(x: Any, mesh: Any) -> Any:
    return from_local(x[:3], mesh, R).redistribute(mesh, S).to_local()


def of_a_branch(x: Any, mesh: Any) -> Any:
    return x if dist.get_rank() == 0 else x * 2


def strided(x: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x.view(2, 2, 2), mesh, [Shard(1)])
    return d.view(-1, 2).to_local()


CASES: dict[str, Case] = {
    "a DTensor and a plain tensor": (
        lambda x, mesh: from_local(x, mesh) + x[:1],
        f"""add: the op has a DTensor and a plain tensor as operands
  placed, made at {HERE}: a DTensor of shape (8, 2)
  getitem, made at {HERE}: a plain tensor of shape (1, 2)
  try: DTensor.from_local(plain, mesh, placements) if plain differs between ranks, \
distribute_tensor(plain, mesh, placements) if it is the same on all ranks; or \
dtensor.to_local()""",
    ),
    "a number of each rank": (
        lambda x, mesh: from_local(x, mesh) * x.sum(),
        """mul: the op combines a DTensor with a number or a condition that differs \
between ranks of dp
  try: make the number equal on all ranks, by dist.all_reduce or sf.psum; or compute on each \
rank's shard: DTensor.from_local(x.to_local() * number, mesh, x.placements)""",
    ),
    "a condition of each rank": (
        lambda x, mesh: sf.cond(
            x.sum() > 0, lambda d: d + 1, lambda d: d - 1, from_local(x, mesh)
        ).full_tensor(),
        """a DTensor: the op combines a DTensor with a number or a condition that differs \
between ranks of dp
  try: make the number equal on all ranks, by dist.all_reduce or sf.psum; or compute on each \
rank's shard: DTensor.from_local(x.to_local() * number, mesh, x.placements)""",
    ),
    "a condition of each rank, for a result": (
        lambda x, mesh: sf.cond(x.sum() > 0, lambda d: d + 1, lambda d: d - 1, from_local(x, mesh)),
        """a DTensor: the op combines a DTensor with a number or a condition that differs \
between ranks of dp
  try: make the number equal on all ranks, by dist.all_reduce or sf.psum; or compute on each \
rank's shard: DTensor.from_local(x.to_local() * number, mesh, x.placements)""",
    ),
    "a derivative of a term": (
        lambda x, mesh: sf.grad(lambda x: (from_local(x, mesh, [Partial()]) * 2).to_local().sum())(
            x
        ),
        """DTensor.to_local: to_local of a Partial DTensor that an op made is not defined under a \
derivative
  needed: a DTensor that is not Partial, or a result of from_local
  try: call x.redistribute(mesh, placements) with Replicate() or Shard(dim) first""",
    ),
    "shards that are not in one place": (
        strided,
        """DTensor.to_local: torch gave the DTensor the unsupported placement _StridedShard over dp
  needed: Shard or Replicate
  try: call x.redistribute(mesh, placements) with Replicate() or Shard(dim) first""",
    ),
    "a rank that the group does not have": (
        lambda x, mesh: dist.broadcast(x * 1, 2),
        """torch.distributed.broadcast: src is 2, a global rank, which is not in each group \
over world
  needed: a rank of the group
  try: group_src=0""",
    ),
    "other placements than those of local_map": (
        lambda x, mesh: local_map(
            torch.sin, out_placements=S, in_placements=(S,), device_mesh=mesh
        )(from_local(x, mesh, R)),
        """jit(<lambda>): local_map: the placements of a DTensor differ from in_placements
  needed: one pure graph of tensor ops
  try: redistribute_inputs=True of local_map, or x.redistribute(mesh, placements) before the \
call""",
    ),
    "a process group as a result": (
        lambda x, mesh: (from_local(x, mesh).to_local(), mesh.get_group()),
        """jit(<lambda>): the function returns a process group, or passes one in place of a tensor
  needed: one pure graph of tensor ops
  try: mesh.get_group(axis) outside of the function""",
    ),
    "a mesh as a result": (
        lambda x, mesh: (from_local(x, mesh).to_local(), mesh),
        """jit(<lambda>): the function returns a mesh, in the code of one rank \
(sf.jit or sf.shard_map)
  needed: one pure graph of tensor ops
  try: use the mesh outside of the function: the mesh that the function closes over, or \
x.device_mesh of a returned DTensor x""",
    ),
    "shards of two sizes in a shard_map": (
        lambda x, mesh: sf.shard_map(
            lambda x: from_local(x[:3], mesh, R).redistribute(mesh, S).to_local(),
            mesh,
            in_placements=sf.P(),
            out_placements=sf.P("dp"),
        )(x),
        """DTensor.to_local: dim 0 has 3 elements, which the 2 ranks of dp cannot share equally
  needed: shards of equal size, since all ranks share one program
  try: x.full_tensor(), x.redistribute to another dim, or pad the dim to a multiple of the ranks""",
    ),
    "a shape that the shards do not make": (
        lambda x, mesh: from_local(x, mesh, shape=(6, 2), stride=(2, 1)),
        """DTensor.from_local: the global shape is (6, 2), but local tensors have shape (4, 2)
  needed: local tensors of shape (3, 2) on the rank at dp=0
  try: pad the tensor""",
    ),
    "uneven shards without a shape": (
        lambda x, mesh: from_local(of_three_rows(x, mesh), mesh),
        """DTensor.from_local: local tensors make a DTensor of shape (4, 2) on one rank, but of \
shape (2, 2) on another
  needed: one global shape
  try: pass shape= and stride= of the global tensor""",
    ),
    "other ops for each size": (
        lambda x, mesh: (
            of_three_rows(x, mesh).sin()
            if of_three_rows(x, mesh).shape[0] == 2
            else of_three_rows(x, mesh).cos()
        ),
        """jit(<lambda>): ranks whose shards differ in size run different ops
  one rank: call_method sin
  another: call_method cos
  try: run the same ops for each size; ops on an empty tensor are correct and cost nothing""",
    ),
    "other results for each size": (
        lambda x, mesh: {of_three_rows(x, mesh).shape[0]: of_three_rows(x, mesh)},
        """jit(<lambda>): ranks with shards of different sizes return different trees
  try: return the same tree of tensors for every size""",
    ),
    "a DTensor and a size of each rank": (
        lambda x, mesh: from_local(x, mesh) * of_three_rows(x, mesh).shape[0],
        """mul: the op combines a DTensor with a number or a condition that differs \
between ranks of dp
  try: make the number equal on all ranks, by dist.all_reduce or sf.psum; or compute on each \
rank's shard: DTensor.from_local(x.to_local() * number, mesh, x.placements)""",
    ),
    "a loop of a size of each rank": (
        lambda x, mesh: sf.scan(
            lambda c, i: (c + 1, c), torch.zeros(2), None, length=of_three_rows(x, mesh).shape[0]
        ),
        """jit(<lambda>): scan: a loop, a branch or a collective depends on a size that differs \
between \
ranks
  try: use a size that is equal on all ranks, such as x.shape of the DTensor x""",
    ),
    "a write to a value of all by a size of each rank": (
        lambda x, mesh: torch.zeros(2).add_(of_three_rows(x, mesh).shape[0]),
        """jit: add_: a write to a value that is equal on all ranks depends on a size that differs \
between ranks
  try: use a size that is equal on all ranks, such as x.shape of the DTensor x""",
    ),
    "too many placements": (
        lambda x, mesh: from_local(x, mesh, [Shard(0), Shard(1)]),
        """DTensor.from_local: 2 placements for a mesh of 1 axes ('dp',)
  try: give one placement for each axis""",
    ),
    "no such dim": (
        lambda x, mesh: from_local(x, mesh, [Shard(2)]),
        """DTensor.from_local: Shard(2) of a tensor with 2 dims, shape (4, 2)
  needed: a dim from -2 to 1
  try: Shard of a dim that the tensor has, or Replicate()""",
    ),
    "a reduction that is not known": (
        lambda x, mesh: from_local(x, mesh, [Partial("product")]),
        """DTensor.from_local: product is not a placement that shardfn supports
  needed: Shard, Replicate, or Partial of sum, avg, max, min
  try: use Replicate(), and apply the op to values that are equal on all ranks""",
    ),
    "redistribute to terms": (
        lambda x, mesh: from_local(x, mesh).redistribute(mesh, [Partial()]),
        """DTensor.redistribute: Partial over dp
  needed: Shard or Replicate
  try: DTensor.from_local(x, mesh, placements), where x is this rank's term of the sum""",
    ),
    "a plain tensor taken apart": (
        lambda x, mesh: from_local(x, mesh) * 1 if x.to_local() is None else x,
        """DTensor.to_local: the method is called on a plain tensor
  needed: a DTensor
  try: DTensor.from_local(x, mesh, placements), or distribute_tensor""",
    ),
    "a dtype of the gradient": (
        lambda x, mesh: from_local(x, mesh).redistribute(mesh, R, backward_dtype="float16"),
        """DTensor.redistribute, backward_dtype: a str
  try: a dtype, such as torch.bfloat16""",
    ),
    "a write to an argument": (
        lambda x, mesh: (dist.all_reduce(x), x)[1],
        """jit(<lambda>): copy_ writes to the memory of an argument or a \
closed-over tensor
  needed: a function without side effects
  try: return the new value, or write to a copy: x.clone(); for the buffers of a module use fn, \
params, buffers = sf.functionalize(module), whose fn returns new buffers; with DTensor \
parameters pass clones of the buffers to torch.func.functional_call(module, buffers, args) and \
return them""",
    ),
    "a write to the local tensor of a DTensor": (
        written,
        """jit(<lambda>): add_ writes to the memory of a DTensor
  needed: a function without side effects
  try: return the new value, or write to a copy: x.clone()""",
    ),
    "a write to what a DTensor was made of": (
        written_after,
        """jit(<lambda>): add_ writes to the memory of a DTensor
  needed: a function without side effects
  try: return the new value, or write to a copy: x.clone()""",
    ),
    "a write to a DTensor whose local tensor is read later": (
        written_before_it_is_read,
        """jit(<lambda>): add_ writes to the memory of a DTensor
  needed: a function without side effects
  try: return the new value, or write to a copy: x.clone()""",
    ),
    "a write to a DTensor by another name": (
        written_through_its_double,
        """jit(<lambda>): mul_ writes to the memory of a DTensor
  needed: a function without side effects
  try: return the new value, or write to a copy: x.clone()""",
    ),
    "a DTensor made of a DTensor": (
        lambda x, mesh: from_local(from_local(x, mesh), mesh),
        """DTensor.from_local: the op has a DTensor as operand
  needed: a plain tensor, the local tensor of each rank
  try: pass x.to_local(), or x.redistribute(mesh, placements)""",
    ),
    "a collective of a DTensor": (
        lambda x, mesh: sf.psum(from_local(x, mesh), "dp"),
        """psum: the op has a DTensor as operand
  needed: a plain tensor, the local tensor of each rank
  try: pass x.to_local(), or x.redistribute(mesh, placements)""",
    ),
    "an op that a collective does not have": (
        lambda x, mesh: functional.all_reduce(x, "middle", mesh),
        """all_reduce: op is 'middle'
  needed: one of sum, avg, max, min, product, band, bor, bxor
  try: op=dist.ReduceOp.SUM; in place of PREMUL_SUM reduce x * factor""",
    ),
    "uneven splits": (
        lambda x, mesh: dist.all_to_all_single(x * 1, x, [1, 3], [3, 1]),
        """torch.distributed.all_to_all_single: split sizes [1, 3]
  needed: equal parts
  try: pad the parts to equal size""",
    ),
    "the rank as a number": (
        of_a_branch,
        """jit(<lambda>): the function branches or slices by the number of a rank
  the number of a rank is a tensor inside the function, since ranks share one program; calls that \
return the number of a rank: torch.distributed.get_rank
  needed: one pure graph of tensor ops
  try: torch.where(rank == 0, a, b) in place of a branch; for this rank's part of x use \
distribute_tensor(x, mesh, [Shard(0)]).to_local(), or x.index_select(0, rank * n + \
torch.arange(n)); in shard_map sf.axis_index(axis_name) is the rank""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named_with_what_to_do(case: str) -> None:
    fn, text = CASES[case]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        staged = sf.jit(lambda x: fn(x, mesh), backend="aten")
        with pytest.raises(sf.ShardError) as caught:
            staged(X)
    said = re.sub(re.escape(__file__) + r":\d+", HERE, without_line(caught.value))
    assert said == text
    assert (caught.value.source or "").startswith(__file__)


def test_a_group_that_no_mesh_has() -> None:
    with sf.fake_world(4):
        sf.make_mesh((4,), ("dp",))
        pair = dist.new_group([0, 1])
        fn = sf.jit(lambda x: dist.all_reduce(x * 1, group=pair))
        with pytest.raises(sf.CaptureError, match="an axis of 0 meshes") as caught:
            fn(X)
    assert "use_mesh(mesh)" in (caught.value.fix or "")


def test_two_meshes_in_one_function() -> None:
    with sf.fake_world(2):
        mesh, other = sf.make_mesh((2,), ("dp",)), sf.make_mesh((2,), ("tp",))
        fn = lambda x: (from_local(x, mesh), from_local(x, other))
        with pytest.raises(sf.PlacementError, match=r"the mesh used here is \(tp=2\)"):
            sf.jit(fn)(X)


def test_a_mesh_of_a_world_that_has_ended() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
    with sf.fake_world(2), pytest.raises(sf.PlacementError, match="has ended"):
        sf.jit(lambda x: from_local(x, mesh))(X)


def test_a_mesh_that_this_rank_is_not_in() -> None:
    with sf.fake_world(4, numerics=False):
        part = dist.device_mesh.DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
        for call in (
            lambda: sf.jit(lambda x: from_local(x, part).full_tensor())(X),
            lambda: sf.shard(lambda x: x * 2, part)(X),
            lambda: sf.distribute(X, part, sf.P("dp")),
        ):
            with pytest.raises(sf.PlacementError) as caught:
                call()
            text = without_line(caught.value).split(": ", 1)[1]
            assert (
                text
                == """rank 0 is not in the mesh, which has the ranks [1, 3]
  try: call the function only on ranks of the mesh: if mesh.get_coordinate() is not None"""
            )


def test_an_argument_of_a_program_of_dtensors_has_its_gradient() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = sf.jit(lambda x: from_local(x, mesh).full_tensor())
        x = X.clone().requires_grad_()
        (fn(x) * 3).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(X, 3.0))


def test_placements_that_torch_does_not_know() -> None:
    def fn(x: Any) -> Any:
        d = from_local(x, mesh)
        y = torch.cdist(d, d)  # torch has no strategy for it
        return y.to_local()

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.CaptureError) as caught:
            sf.jit(fn)(X)
    assert "torch cannot place this DTensor" in str(caught.value)
    assert "x.redistribute(mesh, placements)" in (caught.value.fix or "")


@pytest.mark.parametrize("is_closed_over", [False, True])
def test_a_write_to_a_dtensor_of_the_caller(is_closed_over: bool) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        d = distribute_tensor(X, mesh, S)
        held = (lambda x: d.add_(1).full_tensor()) if is_closed_over else None
        fn = held or (lambda x: x.add_(1).to_local())
        with pytest.raises(sf.CaptureError, match="add_ writes to the memory of an arg"):
            sf.jit(fn)(d)
