"""distribute, from_local and full: between single-device trees and DTensors."""

from __future__ import annotations

import pytest
import torch
from worlds import simulated

import shardfn as sf
from shardfn import P


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
            sf.PlacementError, match=r"the shard of rank at \(1,\) has shape \(1,\)"
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
