"""S7.3 and S7.4: ranks of groups where each rank has another group, and meshes whose ranks are not
in ascending order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from worlds import SimulatedTensor

import shardfn as sf

ZERO = torch.zeros((), dtype=torch.int64)


def every(fn: Any, n: int) -> list[Any]:
    """What each rank of a world gets."""
    found = sf.jit(fn, backend="aten")(SimulatedTensor([ZERO] * n))
    return [int(x) for x in found.shards]


def test_s7_4_the_ranks_of_a_group_are_each_ranks_own() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
        ranks = lambda x: (
            x + 10 * dist.get_process_group_ranks(tp)[0] + (dist.get_process_group_ranks(dp)[1])
        )
        assert every(ranks, 4) == [2, 3, 22, 23]
        first = lambda x: x + dist.get_global_rank(dp, 0)
        assert every(first, 4) == [0, 1, 0, 1]
        out = sf.jit(lambda x: (x, dist.get_process_group_ranks(None)), backend="aten")(ZERO)
        assert out[1] == [0, 1, 2, 3]
        own = lambda x: x + dist.get_global_rank(dp, dist.get_rank(dp))
        assert every(own, 4) == [0, 1, 2, 3]
        mine = lambda x: x + dist.get_group_rank(None, dist.get_rank())
        assert every(mine, 4) == [0, 1, 2, 3]
        with pytest.raises(sf.CaptureError, match="rank 1 has a different number"):
            every(lambda x: x + dist.get_group_rank(tp, 1), 4)
        with pytest.raises(sf.CaptureError, match="number of a rank, which is a tensor") as e:
            every(lambda x: x + dist.get_group_rank(tp, dist.get_rank()), 4)
        assert "FakeTensor" not in str(e.value)
        with pytest.raises(sf.ShardError):  # of global tensors
            sf.shard(first, mesh, backend="aten")(ZERO)


def test_s7_4_whether_this_rank_is_in_a_group() -> None:
    outside = dist.distributed_c10d._rank_not_in_group
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        some = dist.new_group([0, 2, 3])
        tp = mesh.get_group("tp")
        facts = lambda x: (x, outside(tp), outside(dist.group.WORLD))
        assert sf.jit(facts, backend="aten")(ZERO)[1:] == (False, False)
        with pytest.raises(sf.CaptureError, match="some ranks are in the group"):
            sf.jit(lambda x: x + outside(some))(ZERO)


def test_s7_3_a_mesh_of_ranks_in_another_order() -> None:
    with sf.fake_world(4):
        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))

        def numbers(x: Any) -> Any:
            mine = mesh.get_local_rank("tp") * 100  # on the axis of the mesh
            return x + mine + dist.get_rank() * 10 + mesh.get_group("tp").rank()

        # rows of the mesh: rank 3 is the first on its axis, and the last in its group
        assert every(numbers, 4) == [31, 110, 0, 121]
        world = lambda x: x + mesh.get_rank() * 10 + mesh["tp"].get_rank()
        assert every(world, 4) == [33, 11, 0, 22]

        def total(x: Any) -> Any:
            y = x + dist.get_rank()
            dist.all_reduce(y, group=mesh.get_group("tp"))
            return y

        assert every(total, 4) == [4, 4, 2, 2]
        rows = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(sf.CaptureError, match="not in ascending order") as error:
            gather = dist.all_gather_into_tensor
            fn = lambda x: gather(rows * 1, x[None] + dist.get_rank(), mesh.get_group("tp"))
            every(fn, 4)
        assert "sf.all_gather(x, 'tp')" in (error.value.fix or "")
