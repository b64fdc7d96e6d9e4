"""distribute, from_local and full: between single-device trees and DTensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import simulated

import shardfn as sf
from shardfn import P
from tests.support.ranks import run_ranks


def test_from_local_takes_each_ranks_own_shard() -> None:
    with simulated(dp=3) as mesh:
        x = sf.from_local(
            [torch.full((2,), 1.0), torch.full((2,), 2.0), torch.full((1,), 3.0)], mesh, P("dp")
        )
        assert sf.full(x).tolist() == [1, 1, 2, 2, 3]
        pending = sf.from_local([torch.ones(2)] * 3, mesh, sf.Partial())
        assert sf.full(pending).tolist() == [3, 3]
        out = sf.shard(lambda x, y: x.sum() + y, mesh, (P("dp"), sf.Partial()), backend="aten")(
            x, pending
        )
        assert sf.full(out).tolist() == [12, 12]
        with pytest.raises(
            sf.PlacementError, match=r"the shard of the rank at \(1,\) has shape \(1,\)"
        ):
            sf.from_local([torch.ones(2), torch.ones(1), torch.ones(2)], mesh, P("dp"))


@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P(("b", "a"))], ids=str)
def test_from_local_takes_what_to_local_gives_with_uneven_shards(spec: P) -> None:
    x = torch.arange(21.0).view(7, 3)
    with simulated(a=2, b=2) as mesh:
        placed = sf.distribute(x, mesh, spec)
        again = sf.from_local(placed.to_local(), mesh, spec)
        assert again.shape == x.shape
        assert torch.equal(sf.full(again), x)


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.float16], ids=str
)
def test_a_pending_value_read_whole_keeps_its_dtype(dtype: torch.dtype, kind: str) -> None:
    shards = [torch.tensor([1, 0, 3]).to(dtype), torch.tensor([1, 0, 0]).to(dtype)]
    with sf.fake_world(2):
        pending = sf.from_local(shards, mesh := sf.make_mesh((2,), ("dp",)), sf.Partial(kind))
        reduced = sf.shard(lambda x: x.clone(), mesh, backend="aten")(pending)
        wanted = {
            "sum": shards[0] + shards[1],
            "max": torch.maximum(*shards),
            "min": torch.minimum(*shards),
        }[kind]
        for got in (sf.full(pending), sf.full(reduced)):
            assert got.dtype == dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 12])
def test_from_local_puts_uneven_shards_of_two_axes_on_one_dim_together(rows: int) -> None:
    x = torch.arange(2.0 * rows).reshape(rows, 2)
    with simulated(dp=2, tp=3) as mesh:
        placed = sf.distribute(x, mesh, P(("dp", "tp")))
        shards = placed._local_tensor.shards
        again = sf.from_local(shards, mesh, P(("dp", "tp")))
        assert again.shape == x.shape and torch.equal(sf.full(again), x)


def test_distribute_and_full_are_inverse_on_uneven_shards_and_two_axes_on_one_dim() -> None:
    x = torch.arange(70.0).reshape(7, 10)
    with simulated(dp=3, tp=2) as mesh:
        for spec in (P(), P("dp"), P("tp", "dp"), P(("dp", "tp")), P(None, ("dp", "tp"))):
            d = sf.distribute(x.t(), mesh, spec)
            assert torch.equal(sf.full(d), x.t())
            assert d.stride() == x.t().stride()


def test_s4_1_distribute_detaches_once_and_leaves_the_callers_autograd_alone() -> None:
    w = torch.ones(4, requires_grad=True)
    with simulated(dp=2) as mesh:
        d = sf.distribute(w * 2, mesh, P("dp"))
        assert not d.requires_grad
    (w * 3).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [3, 3, 3, 3]


def test_distribute_keeps_memory_of_its_own_so_that_donation_leaves_the_callers_alone() -> None:
    mesh = sf.make_mesh((1,), ("dp",))
    try:
        mine = torch.arange(8.0)
        fn = sf.shard(lambda x: x * 2, mesh, P(), backend="aten", donate_argnums=0)
        assert torch.equal(sf.full(fn(sf.distribute(mine, mesh, P()))), 2 * torch.arange(8.0))
        assert torch.equal(mine, torch.arange(8.0))
        assert sf.distribute(mine, mesh, P()).to_local().data_ptr() != mine.data_ptr()
    finally:
        torch.distributed.destroy_process_group()


STAGES = [
    ({"pp": 2}, P(pp=1)),
    ({"pp": 3}, P(pp=0)),
    ({"pp": 3}, P(pp=sf.Stage(2, chunk=1))),
    ({"pp": 2, "tp": 3}, P("tp", pp=1)),
    ({"tp": 3, "pp": 2}, P(None, "tp", pp=1)),
    ({"pp": 2, "tp": 2}, P(pp=1, tp=0)),
    ({"tp": 2, "pp": 2}, P("tp*2", pp=0)),
    ({"dp": 2, "pp": 2, "tp": 3}, P("tp", "dp", pp=1)),
    ({"dp": 2, "pp": 2, "tp": 2}, P(("tp", "dp"), pp=1)),
]


@pytest.mark.parametrize(("axes", "spec"), STAGES, ids=str)
def test_a_stage_alone_has_shards_and_other_ranks_have_none(axes: dict[str, int], spec: P) -> None:
    x = torch.arange(84.0).reshape(12, 7)
    names = (*axes,)
    without = P(*spec.parts)
    with simulated(**axes) as mesh:
        placed = sf.distribute(x.t().contiguous().t(), mesh, spec)
        alike = sf.distribute(x, mesh, without)
        coordinates = itertools.product(*map(range, axes.values()))
        rows = zip(coordinates, placed.to_local().shards, alike.to_local().shards, strict=True)
        for at, shard, wanted in rows:
            stages = zip(names, at, placed.placements, strict=True)
            is_here = all(p.coordinate == c for _, c, p in stages if isinstance(p, sf.Stage))
            assert torch.equal(shard, wanted if is_here else torch.empty(0))
        assert placed.shape == (12, 7) and torch.equal(sf.full(placed), x)
        assert torch.equal(sf.full(sf.from_local(placed.to_local(), mesh, spec)), x)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 5)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint32], ids=str
)
def test_a_stage_has_tensors_of_all_shapes_and_dtypes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype)
    with simulated(pp=2, tp=2) as mesh:
        placed = sf.distribute(x, mesh, P(pp=1))
        assert [tuple(shard.shape) for shard in placed.to_local().shards] == [(0,)] * 2 + [
            shape
        ] * 2
        back = sf.full(placed)
        assert back.dtype == dtype and back.shape == shape
        assert back.to(torch.complex128).tolist() == x.to(torch.complex128).tolist()


def test_terms_of_a_sum_on_a_stage_are_added_there() -> None:
    with simulated(pp=2, tp=2) as mesh:
        shards = [torch.empty(0), torch.empty(0), torch.ones(3), 2 * torch.ones(3)]
        x = sf.from_local(shards, mesh, [sf.Stage(1), sf.Partial()])
        assert x.shape == (3,) and sf.full(x).tolist() == [3, 3, 3]


def test_the_gradient_of_a_global_value_is_on_the_stage_of_its_dtensor() -> None:
    x = torch.arange(15.0).reshape(5, 3)
    with simulated(pp=2, tp=2) as mesh:
        placed = sf.distribute(x, mesh, P("tp", pp=1)).requires_grad_()
        for times in (1, 2):
            sf.full(placed).square().sum().backward()
            assert placed.grad is not None and placed.grad.placements == placed.placements
            assert torch.equal(sf.full(placed.grad), times * 2 * x)


def test_from_local_takes_the_shape_of_uneven_shards() -> None:
    with sf.fake_world(3, rank=2, numerics=False):
        mesh = sf.make_mesh((3,), ("dp",))
        assert sf.from_local(torch.ones(1, 2), mesh, P("dp"), shape=(5, 2)).shape == (5, 2)
        with pytest.raises(sf.PlacementError) as error:
            sf.from_local(torch.ones(2, 2), mesh, P("dp"), shape=(5, 2))
        assert str(error.value) == (
            "from_local: the shard of the rank at (2,) has shape (2, 2)\n  needed: (1, 2), "
            "torch.chunk's share of (5, 2)"
        )


@pytest.mark.parametrize(("rank", "local"), [(0, (0,)), (1, (4, 3))])
def test_a_rank_knows_the_global_shape_of_a_tensor_of_another_stage(
    rank: int, local: tuple[int, ...]
) -> None:
    with sf.fake_world(2, rank=rank, numerics=False):
        mesh = sf.make_mesh((2,), ("pp",))
        placed = sf.distribute(torch.ones(4, 3), mesh, P(pp=1))
        assert placed.shape == (4, 3) and placed.to_local().shape == local
        again = sf.from_local(torch.empty(local), mesh, P(pp=1), shape=(4, 3))
        assert again.shape == (4, 3) and again.to_local().shape == local
        with pytest.raises(sf.PlacementError) as error:
            sf.from_local(torch.empty(local), mesh, P(pp=1))
        assert str(error.value) == (
            "from_local: P(pp=1) needs a shape, because ranks of other stages do not know the "
            "shape\n  try: sf.from_local(x, mesh, placements, shape=(...)) with the global "
            "shape"
        )


def test_ranks_of_other_stages_bring_nothing() -> None:
    with simulated(pp=2) as mesh:
        for shards in (torch.ones(3), [torch.ones(3)] * 2):
            with pytest.raises(sf.PlacementError) as error:
                sf.from_local(shards, mesh, P(pp=1))
            assert str(error.value) == (
                "from_local: the shard of the rank at (0,) has shape (3,)\n  needed: shape "
                "(0,), since with Stage(1) on pp another stage holds the value\n  try: "
                "torch.empty(0, dtype=x.dtype) on ranks of other stages"
            )
        with pytest.raises(
            sf.PlacementError, match=r"Stage\(2\) on axis 'pp', which has the stages"
        ):
            sf.from_local([torch.ones(3)] * 2, mesh, sf.Stage(2))
        with pytest.raises(
            sf.PlacementError, match=r"\['w'\]: Stage\(2\) on axis 'pp', which has the st"
        ):
            sf.distribute({"w": torch.ones(3)}, mesh, {"w": P(pp=2)})
        with pytest.raises(sf.ShardError, match="shape is 3, a int, and must be a tuple of sizes"):
            sf.from_local(torch.ones(3), mesh, P(), shape=3)


def of_ops_on_dtensors(mesh: Any) -> dict[str, torch.Tensor]:
    x = distribute_tensor(torch.arange(1.0, 16.0).reshape(5, 3), mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([0, 4, 2]), mesh, [Replicate()])
    values = {
        "norm": torch.linalg.vector_norm(x),
        "product": x.prod(0),
        "all": (x > 2).all(0),
        "embedding": torch.nn.functional.embedding(rows, x),
    }
    return {name: sf.full(value) for name, value in values.items()}


def on_ranks() -> dict[str, torch.Tensor]:
    return of_ops_on_dtensors(sf.make_mesh((2,), ("a",)))


def test_full_of_terms_that_only_torch_reduces() -> None:
    x = torch.arange(1.0, 16.0).reshape(5, 3)
    wanted = {
        "norm": torch.linalg.vector_norm(x),
        "product": x.prod(0),
        "all": (x > 2).all(0),
        "embedding": x[[0, 4, 2]],
    }
    with simulated(a=2) as mesh:
        found = of_ops_on_dtensors(mesh)
    real = run_ranks(2, on_ranks)
    for each in (found, *real):
        assert each.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(each[name], value)
