"""Mistakes with DTensors, meshes, placements and ranks inside `jit`, `shard` and `shard_map`: each
is an error of ours with the user's line and what to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message import without_line
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(8.0).reshape(4, 2)
S, R = [Shard(0)], [Replicate()]


def staged(transform: str, fn: Callable[..., Any], mesh: Any, args: int) -> Any:
    """A transform of a function of some arguments."""
    if transform == "jit":
        return sf.jit(fn, backend="aten")
    if transform == "shard":
        return sf.shard(fn, mesh, (P("dp"),) * args, backend="aten")
    places = P("dp")
    return sf.shard_map(fn, mesh, in_placements=(places,) * args, out_placements=places)


def refused(kind: type[sf.ShardError], call: Callable[[], Any]) -> str:
    """The text of an error, which has a line of this file and a suggestion."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert f"  at: {__file__}:" in text, text
    assert "\n  try: " in text and caught.value.fix, text
    return without_line(caught.value)


def both(weights: Any, batch: Any, mesh: Any) -> Any:
    placed = DTensor.from_local(weights["w"], mesh, R)
    return (batch["x"] * placed).to_local()


def swapped(weights: Any, batch: Any, mesh: Any) -> Any:
    placed = DTensor.from_local(batch["x"], mesh, R)
    return (placed * weights["w"]).to_local()


@pytest.mark.parametrize("transform", ["jit", "shard_map"])
@pytest.mark.parametrize(("fn", "plain"), [(both, "b['x']"), (swapped, "w['w']")])
def test_of_equal_shapes_the_plain_tensor_is_named(fn: Any, plain: str, transform: str) -> None:
    """Both have one shape, so only names tell them apart."""
    with simulated(dp=2) as mesh:
        call = staged(transform, lambda w, b: fn(w, b, mesh), mesh, 2)
        text = refused(sf.CaptureError, lambda: call({"w": X}, {"x": X}))
    lines = text.split("\n")
    assert lines[0] == "mul: the op has a DTensor and a plain tensor as operands"
    shape = (4, 2) if transform == "jit" else (2, 2)
    assert f"  argument {plain}: a plain tensor of shape {shape}" in lines
    made = next(line for line in lines if "placed, made at" in line)
    assert made.endswith(f": a DTensor of shape {shape}")
    assert f"DTensor.from_local({plain}, mesh, placements)" in lines[-1]
    assert f"distribute_tensor({plain}, mesh, placements)" in lines[-1]
    assert lines[-1].endswith("or dtensor.to_local()")


def test_a_dtensor_argument_and_a_plain_one_are_named() -> None:
    with simulated(dp=2) as mesh:
        d = sf.distribute(X, mesh, P("dp"))
        fn = sf.jit(lambda a, b: (a + b).to_local(), backend="aten")
        text = refused(sf.CaptureError, lambda: fn(X, d))
        assert text == (
            """add: the op has a DTensor and a plain tensor as operands
  argument a: a plain tensor of shape (4, 2)
  argument b: a DTensor of shape (4, 2)
  try: DTensor.from_local(a, mesh, placements) if a differs between ranks, distribute_tensor(a, \
mesh, placements) if it is the same on all ranks; or b.to_local()"""
        )
        placed = lambda a, b: (distribute_tensor(a, mesh, S) + b).to_local()
        assert torch.equal(sf.jit(placed, backend="aten")(X, d).shards[1], 2 * X[2:])
        local = lambda a, b: a[:2] + b.to_local()
        both = sf.jit(local, backend="aten")(X, d)
        assert torch.equal(both.shards[1], X[:2] + X[2:])


def test_a_dtensor_that_a_shard_map_and_the_code_around_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated(dp=2) as mesh:
        d = sf.distribute(X, mesh, P("dp"))
        where = P("dp"), P("dp")

        # one of a global name is read where it is first used, one of a cell where the body is made
        monkeypatch.setitem(globals(), "GLOBAL", d)
        of_cell = lambda x: x + d.to_local().sum()
        of_global = lambda x: x + GLOBAL.to_local().sum()
        for body in (of_cell, of_global):
            of_ranks = sf.shard_map(body, mesh, P("dp"), P("dp"))
            beside = {
                of_cell: lambda x, f=of_ranks: f(x) + d,
                of_global: lambda x, f=of_ranks: f(x) + GLOBAL,
            }
            call = sf.shard(beside[body], mesh, P("dp"))
            text = refused(sf.CaptureError, lambda c=call: c(X))
            assert "as an argument of the function and of shard_map" in text

        mapped = sf.shard_map(lambda x, d: x + d.sum(), mesh, where, P("dp"))
        given = lambda x, d: mapped(x, d) + d
        out = sf.shard(given, mesh, where, backend="aten")(X, d)
        sums = torch.stack([X[:2].sum(), X[2:].sum()])
        wanted = 2 * X + sums.repeat_interleave(2)[:, None]
        assert_close(sf.full(out), wanted)


def test_a_closed_over_dtensor_and_a_plain_parameter_are_named() -> None:
    with simulated(dp=2) as mesh:
        layer = torch.nn.Linear(2, 4)
        weight = distribute_tensor(layer.weight.detach(), mesh, S)
        layer.weight = torch.nn.Parameter(weight)
        layer.requires_grad_(False)
        text = refused(sf.CaptureError, lambda: sf.jit(layer)(X))
        closed_over = "a closed-over tensor"
        assert f"  weight, {closed_over}: a DTensor of shape (4, 2)\n" in text
        assert f"  bias, {closed_over}: a plain tensor of shape (4,)\n" in text


GLOBAL: Any = None
MESHES: dict[str, Callable[[Any], Any]] = {
    "jit": lambda mesh: sf.jit(lambda x: DTensor.from_local(x, mesh, S).full_tensor()),
    "shard": lambda mesh: sf.shard(lambda x: x * 2, mesh, P("dp")),
    "shard, inside": lambda mesh: sf.shard(
        lambda x: distribute_tensor(x, mesh, S), sf.make_mesh((2,), ("dp",))
    ),
    "shard_map": lambda mesh: sf.shard_map(
        lambda x: x * 2, mesh, in_placements=P("dp"), out_placements=P("dp")
    ),
    "shard_map, inside": lambda mesh: sf.shard_map(
        lambda x: DTensor.from_local(x, mesh, S).full_tensor(),
        sf.make_mesh((2,), ("dp",)),
        in_placements=P("dp"),
        out_placements=P(),
    ),
}


@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_of_another_world(case: str) -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
    with sf.fake_world(2):
        call = MESHES[case](mesh)
        text = refused(sf.PlacementError, lambda: call(X))
    assert "the mesh has 4 ranks, but the world has 2" in text
    assert "try: make the mesh inside the world that uses the mesh" in text


def test_a_dtensor_of_another_world() -> None:
    with sf.fake_world(4):
        d = sf.distribute(X, sf.make_mesh((4,), ("dp",)), P("dp"))
    with simulated(dp=2) as mesh:
        mine = sf.distribute(X, mesh, P("dp"))
        closed_over = sf.jit(lambda x: (x + d).to_local())
        text = refused(sf.PlacementError, lambda: sf.jit(torch.sin)(d))
        assert "the mesh has 4 ranks, but the world has 2" in text
        text = refused(sf.PlacementError, lambda: sf.shard(lambda x: x, mesh)(d))
        assert "argument x: the DTensor is on another mesh, (dp=4)" in text
        text = refused(sf.PlacementError, lambda: closed_over(mine))
        assert text.startswith("a closed-over DTensor: the mesh has 4 ranks")


@pytest.mark.parametrize("transform", ["jit", "shard", "shard_map"])
def test_a_mesh_without_this_rank(transform: str) -> None:
    with sf.fake_world(4, numerics=False):
        part = dist.device_mesh.DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
        fn = lambda x: distribute_tensor(x, part, S)
        call = staged(transform, fn, part, 1)
        text = refused(sf.PlacementError, lambda: call(X))
    assert "rank 0 is not in the mesh, which has the ranks [1, 3]" in text


CONTRADICTING: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a dim that the tensor lacks": (
        lambda d, mesh: d.redistribute(mesh, [Shard(5)]),
        "DTensor.redistribute: Shard(5) of a tensor with 2 dims, shape (4, 2)",
    ),
    "more placements than axes": (
        lambda d, mesh: d.redistribute(mesh, [Shard(0), Shard(1)]),
        "DTensor.redistribute: 2 placements for a mesh of 1 axes ('dp',)",
    ),
    "a placement in place of a list": (
        lambda d, mesh: d.redistribute(mesh, Shard(0)),
        "DTensor.redistribute, placements: got Shard",
    ),
    "text among placements": (
        lambda d, mesh: d.redistribute(mesh, ["dp"]),
        "DTensor.redistribute, placements: got a list with a str",
    ),
    "a dim of a number": (
        lambda d, mesh: d.sum().redistribute(mesh, [Shard(0)]),
        "DTensor.redistribute: Shard(0) of a tensor with 0 dims, shape ()",
    ),
    "no placements": (
        lambda d, mesh: d.redistribute(mesh),
        "DTensor.redistribute: without placements",
    ),
    "terms of a value": (
        lambda d, mesh: d.redistribute(mesh, [Partial()]),
        "DTensor.redistribute: Partial over dp",
    ),
    "strides": (
        lambda d, mesh: DTensor.from_local(d.to_local(), mesh, S, shape=d.shape, stride=(1, 4)),
        "DTensor.from_local: stride=(1, 4) for a DTensor of shape (4, 2)",
    ),
    "of a gradient": (
        lambda d, mesh: d.to_local(grad_placements=[Shard(7)]),
        "DTensor.to_local, grad_placements: Shard(7) of a tensor with 2 dims",
    ),
    "of a gradient of from_local": (
        lambda d, mesh: DTensor.from_local(
            d.to_local(), mesh, S, grad_placements=[Shard(0), Shard(1)]
        ),
        "DTensor.from_local, grad_placements: 2 placements for a mesh of 1 axes",
    ),
    "of a gradient of full_tensor": (
        lambda d, mesh: d.full_tensor(grad_placements=[Shard(2)]),
        "DTensor.full_tensor, grad_placements: Shard(2) of a tensor with 2 dims",
    ),
    "a shape that the shards do not make": (
        lambda d, mesh: DTensor.from_local(
            d.full_tensor(), mesh, S, shape=d.shape, stride=d.stride()
        ),
        "DTensor.from_local: the global shape is (4, 2), but local tensors have shape (4, 2)",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTING)
def test_placements_that_contradict(case: str) -> None:
    fn, said = CONTRADICTING[case]
    with simulated(dp=2) as mesh:
        d = sf.distribute(X, mesh, P("dp"))
        call = sf.jit(lambda d: fn(d, mesh), backend="aten")
        kind = sf.CaptureError if case == "no placements" else sf.PlacementError
        assert refused(kind, lambda: call(d)).startswith(said)


@pytest.mark.parametrize("transform", ["shard", "shard_map"])
def test_a_dtensor_that_is_placed_otherwise_than_declared(transform: str) -> None:
    with simulated(dp=2) as mesh:
        d = sf.distribute(X, mesh, P(None, "dp"))
        call = staged(transform, torch.sin, mesh, 1)
        text = refused(sf.PlacementError, lambda: call(d))
    own, declared = "Shard(dim=1) on dp", "Shard(dim=0) on dp"
    assert f"the argument is placed {own}, but in_placements says {declared}" in text


def branches(x: Any, mesh: Any) -> Any:
    return x * 2 if dist.get_rank() == 0 else x


def counts(x: Any, mesh: Any) -> Any:
    for _ in range(mesh.get_local_rank()):
        x = x + 1
    return x


def picks(x: Any, mesh: Any) -> Any:
    return [x, x * 2][mesh.get_coordinate()[0]]


def converts(x: Any, mesh: Any) -> Any:
    return x * int(dist.get_rank())


def looks_up(x: Any, mesh: Any) -> Any:
    return {0: x, 1: x * 2}[mesh.get_local_rank("dp")]


BRANCHES = "the function branches or slices by the number of a rank"
COUNTS = "the function uses the number of a rank as a Python number"
PART = "x.index_select(0, rank * n + torch.arange(n))"
ONE_OF = (
    "torch.stack(values).index_select(0, rank.reshape(1)), which selects one of several "
    "values by rank"
)
RANKS = {
    branches: (BRANCHES, "torch.distributed.get_rank", "torch.where(rank == 0, a, b)"),
    counts: (COUNTS, "get_local_rank", PART),
    picks: (COUNTS, "get_coordinate", ONE_OF),
    converts: (".item() reads a tensor's value", "torch.distributed.get_rank", "no .item()"),
    looks_up: ("the number of a rank as a key of a dict", "get_local_rank", ONE_OF),
}


@pytest.mark.parametrize("transform", ["jit", "shard_map"])
@pytest.mark.parametrize("fn", RANKS, ids=lambda fn: fn.__name__)
def test_the_number_of_a_rank_as_a_python_number(fn: Any, transform: str) -> None:
    got, call, fix = RANKS[fn]
    with simulated(dp=2) as mesh:
        staging = staged(transform, lambda x: fn(x, mesh), mesh, 1)
        text = refused(sf.CaptureError, lambda: staging(X))
    assert got in text
    shared = "the number of a rank is a tensor inside the function, since ranks share one program"
    assert f"\n  {shared}; calls that return the number of a rank: {call}\n" in text
    assert fix in text.split("\n  try: ")[1]


def test_what_a_refused_rank_is_to_write_instead() -> None:
    def fn(x: Any) -> Any:
        rank = dist.get_rank()
        part = x.index_select(0, rank * 2 + torch.arange(2))
        placed = distribute_tensor(x, mesh, S).to_local()
        one = torch.stack([x, 3 * x]).index_select(0, rank.reshape(1)).squeeze(0)
        return part, x[2 * rank : 2 * rank + 2], placed, one, torch.where(rank == 0, x, -x)

    with simulated(dp=2) as mesh:
        found = [y.shards for y in sf.jit(fn, backend="aten")(X)]
    wanted = 3 * [(X[:2], X[2:])] + [(X, 3 * X), (X, -X)]
    assert_close([tuple(y) for y in found], wanted)


ON_STAGE = "the DTensor is on a pipeline stage of pp, which torch's DTensor methods do not support"
TO_STAGE = "a placement on a pipeline stage, which torch's DTensor methods do not support"
METHODS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "placements": (lambda x, mesh: x + len(x.placements), f"DTensor.placements: {ON_STAGE}"),
    "to_local": (lambda x, mesh: x.to_local(), f"DTensor.to_local: {ON_STAGE}"),
    "full_tensor": (lambda x, mesh: x.full_tensor(), f"DTensor.full_tensor: {ON_STAGE}"),
    "redistribute": (lambda x, mesh: x.redistribute(mesh, R), f"DTensor.redistribute: {ON_STAGE}"),
    "full_tensor of a result": (
        lambda x, mesh: (x + 1).full_tensor(),
        f"DTensor.full_tensor: {ON_STAGE}",
    ),
    "redistribute of a result": (
        lambda x, mesh: (x + 1).redistribute(mesh, S),
        f"DTensor.redistribute: {ON_STAGE}",
    ),
    "to_local of a result": (
        lambda x, mesh: (x + 1).to_local(),
        f"DTensor.to_local: torch cannot place this DTensor: a result: {ON_STAGE}",
    ),
    "from_local to a stage": (
        lambda x, mesh: DTensor.from_local(torch.ones(2), mesh, [sf.Stage(0)]),
        f"DTensor.from_local: {TO_STAGE}",
    ),
    "a factory": (
        lambda x, mesh: x + torch.distributed.tensor.ones(4, 2, placements=[sf.Stage(1)]),
        f"torch.distributed.tensor.ones: {TO_STAGE}",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_dtensor_on_a_stage_are_refused(name: str) -> None:
    fn, said = METHODS[name]
    with simulated(pp=2) as mesh:
        x = sf.distribute(X, mesh, P(pp=1))
        with sf.use_mesh(mesh):
            text = refused(sf.ShardError, lambda: sf.jit(lambda x: fn(x, mesh), backend="aten")(x))
        assert text.splitlines()[0] == said


def test_ops_of_a_dtensor_on_a_stage_stay_there() -> None:
    with simulated(pp=2) as mesh:
        x = sf.distribute(X, mesh, P(pp=1))
        y = sf.jit(lambda x: x * 2 + 1, backend="aten")(x)
        assert y.placements == x.placements and torch.equal(sf.full(y), 2 * X + 1)
        g = sf.grad(lambda x: (x * x).sum())(x)
        assert g.placements == x.placements and torch.equal(sf.full(g), 2 * X)


def test_a_redistribution_to_a_stage_inside_shard_is_refused() -> None:
    with simulated(pp=2) as mesh:
        f = sf.shard(lambda x: x.redistribute(mesh, [sf.Stage(0)]), mesh, backend="aten")
        text = refused(sf.PlacementError, lambda: f(X))
        assert text == (
            f"DTensor.redistribute: {TO_STAGE}\n  try: sf.constrain(x, P(axis=stage)) of a "
            "global tensor x, inside sf.shard"
        )
