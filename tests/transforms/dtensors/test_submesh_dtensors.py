"""DTensors on a part of the mesh as arguments and results of the code of one rank: each rank's own
tensors, whose values may differ between the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf

R, S = Replicate(), Shard(0)
W = torch.arange(8.0, dtype=torch.float64).reshape(4, 2).sin()
X = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).cos()


def grid() -> Any:
    return sf.make_mesh((2, 2), ("dp", "tp"))


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(4):
        yield grid()


def own(rank: int) -> torch.Tensor:
    """The batch of a rank: ranks of a tp group have the same."""
    return X + rank // 2


def close(got: Any, wanted: torch.Tensor) -> None:
    assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_shards_of_different_sizes_are_refused_by_path(mesh: Any) -> None:
    d = distribute_tensor(X, mesh["tp"], [S])
    with pytest.raises(sf.PlacementError) as caught:
        sf.jit(lambda w: w["w"].full_tensor())({"w": d})
    assert caught.value.arg_path == "w['w']"
    assert "a DTensor on the submesh (tp=2) has shards of different sizes" in str(caught.value)


def test_parts_and_the_whole_mesh_keep_apart(mesh: Any) -> None:
    tp = distribute_tensor(W, mesh["tp"], [S])
    dp = DTensor.from_local(W, mesh["dp"], [Partial()])
    every = distribute_tensor(W, mesh, [S, Shard(1)])
    fn = lambda a, b, c: (a.full_tensor() + b.full_tensor() + c.full_tensor(), a, b)
    total, a, b = sf.jit(fn, backend="aten")(tp, dp, every)
    for x in total.shards:
        close(x, 4 * W)
    assert (a.device_mesh, b.device_mesh) == (mesh["tp"], mesh["dp"])
    close(b.full_tensor(), 2 * W)
    mixed = sf.jit(lambda a, b: a + b)
    with pytest.raises(sf.CaptureError, match="needed: one mesh"):
        mixed(tp, every)


def step(mesh: Any) -> Any:
    """A step of data parallelism over tensor parallelism, each on its part of the mesh."""

    def loss(w: Any, x: Any) -> Any:
        y = DTensor.from_local(x, mesh["tp"], [R]) @ w
        return y.sin().sum().full_tensor()

    def fn(w: Any, x: Any) -> Any:
        g = sf.grad(loss)(w, x)
        mean = g.to_local() / 2
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        placed = DTensor.from_local(mean, mesh["tp"], g.placements)
        return w - 0.1 * placed, g

    return fn


def gradient_of(rank: int) -> torch.Tensor:
    return torch.func.grad(lambda w: (own(rank) @ w).sin().sum())(W)


MEAN = (gradient_of(0) + gradient_of(2)) / 2


def test_a_step_of_two_parts_is_that_of_one_device(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    batch = SimulatedTensor([own(rank) for rank in range(4)])
    stepped = sf.jit(lambda w, x: step(mesh)(w, x)[0], backend="aten")
    for _ in range(2):
        out = stepped(w, batch)
        assert (out.device_mesh, out.placements) == (mesh["tp"], (Shard(1),))
        close(out.full_tensor(), W - 0.1 * MEAN)
    compiled = stepped.compile(w, batch)
    close(compiled(w, batch).full_tensor(), W - 0.1 * MEAN)
    with pytest.raises(sf.PlacementError, match="hold different values"):
        sf.jit(step(mesh), backend="aten")(w, batch)  # each part has its gradient


def test_a_function_closes_over_a_dtensor_on_a_part(mesh: Any) -> None:
    tp = distribute_tensor(W, mesh["tp"], [S])
    dp = distribute_tensor(W.t().contiguous(), mesh["dp"], [S]).t()

    def fn(x: Any) -> Any:
        y = DTensor.from_local(x, mesh["tp"], [R]) @ tp
        whole = y.full_tensor(grad_placements=[R])
        return whole + x @ dp.full_tensor(), tp * 2, tp.placements

    staged = sf.jit(fn, backend="aten")
    for factor in (1, 2):
        y, twice, placements = staged(X)
        for shard in y.shards:
            close(shard, X @ W * (factor + 1))
        close(twice.full_tensor(), 2 * factor * W)
        assert twice.device_mesh == mesh["tp"] and placements == (S,)
        tp.mul_(2)  # in place: it is read at each call
    tp.div_(4)
    loss = lambda x: fn(x)[0].square().sum()
    gradient = sf.jit(sf.grad(loss), backend="aten")(X)
    wanted = torch.func.grad(lambda x: (x @ W * 2).square().sum())(X)
    close(gradient.shards[3], wanted)


def test_a_closed_over_one_in_uneven_shards_is_refused(mesh: Any) -> None:
    d = distribute_tensor(X, mesh["tp"], [S])
    with pytest.raises(sf.PlacementError) as caught:
        sf.jit(lambda x: d.full_tensor() + x)(X)
    text = str(caught.value)
    assert text.startswith("a closed-over DTensor: a DTensor on the submesh (tp=2) has")
    assert "has shards of different sizes" in text
    assert "test_submesh_dtensors.py" in text
