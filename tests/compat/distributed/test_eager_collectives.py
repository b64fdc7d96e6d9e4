"""What torch's ops of collectives are given, and what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn._compat.distributed import eager_collectives as eager

OP = torch.ops.c10d.allreduce_.default


def test_arguments_have_their_names_and_defaults() -> None:
    given = eager.bound(OP, ([1], "group", "op", None), {"timeout": 3})
    assert given["tensors"] == [1]
    assert given["reduce_op"] == "op"
    assert (given["async_op"], given["timeout"]) == (True, 3)


def test_a_result_is_a_handle_or_tensors_and_a_handle() -> None:
    tensors, handle = eager.returned(OP, ["x"])
    assert tensors == ["x"]
    alone = eager.returned(torch.ops.c10d.reduce_.default, ["x"])
    assert type(alone) is type(handle)


def test_the_groups_of_an_axis() -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        name = mesh.get_group("tp").group_name
        assert eager.groups_like(name) == [[0, 1, 2], [3, 4, 5]]
        assert eager.groups_like(mesh.get_group("dp")) == [[0, 3], [1, 4], [2, 5]]
        assert eager.groups_like(dist.group.WORLD) == [[0, 1, 2, 3, 4, 5]]
        backwards: Any = dist.new_group([2, 0], sort_ranks=False)
        with pytest.raises(AssertionError):
            eager.groups_like(backwards)


def test_reductions_have_names() -> None:
    assert eager.reduction_name("sum") == "SUM"
    assert eager.reduction_name(dist.ReduceOp.MAX) == "MAX"
    assert eager.reduction_name(dist.ReduceOp.PREMUL_SUM) is None


def test_kernels_are_replaced_for_a_time() -> None:
    calls: list[Any] = []

    def run(op: Any, *args: Any) -> Any:
        calls.append(op)
        return eager.returned(op, args[0])

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with eager.kernels_replaced(run):
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()
    assert calls == [OP]
