"""Collectives that a script calls in a simulated world. `test_dtensor.py` compares them with those
of real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import SimulatedTensor

import shardfn as sf

OWN = [torch.arange(4.0) + 10 * rank for rank in range(4)]


def own() -> SimulatedTensor:
    """A tensor of which each of four ranks has its own."""
    return SimulatedTensor([x.clone() for x in OWN])


def shards(x: Any) -> list[list[float]]:
    return [y.tolist() for y in x.shards]


def test_each_group_of_an_axis_has_its_own_sum() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        x = own()
        dist.all_reduce(x, group=mesh.get_group("dp"))
        first, second = (OWN[0] + OWN[2]).tolist(), (OWN[1] + OWN[3]).tolist()
        assert shards(x) == [first, second, first, second]


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_reductions_of_what_all_ranks_have(op: str) -> None:
    wanted = {"SUM": 12.0, "PRODUCT": 81.0}.get(op, 3.0)
    with sf.fake_world(4):
        x = torch.full((2,), 3.0)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    assert x.tolist() == [wanted] * 2


def test_bits_and_lists_and_one_rank() -> None:
    with sf.fake_world(4):
        bits = torch.tensor([1, 6])
        dist.all_reduce(bits, op=dist.ReduceOp.BXOR)
        assert bits.tolist() == [0, 0]
        x, rows = own(), [torch.empty(4) for _ in range(4)]
        dist.gather(x, rows, 0)
        assert [row.tolist() for row in rows] == [y.tolist() for y in OWN]
        dist.scatter(x, rows[::-1], 0)
        assert shards(x) == [y.tolist() for y in OWN[::-1]]
        each: Any = [None] * 4
        dist.gather_object("a", each, 0)
        assert each == ["a"] * 4


def test_parts_of_given_sizes_are_exchanged() -> None:
    with sf.fake_world(2):
        x = SimulatedTensor([torch.arange(4.0), torch.arange(4.0) + 10])
        out = SimulatedTensor([torch.empty(2), torch.empty(6)])
        dist.all_to_all_single(out, x, None, [1, 3])
        assert shards(out) == [[0.0, 10.0], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]]


def _sent() -> None:
    dist.send(torch.ones(2), 1)


def _exchanged() -> None:
    dist.all_to_all_single(torch.empty(4), torch.arange(4.0))


def _of_other_values() -> None:
    dist.all_gather_into_tensor(torch.empty(8), SimulatedTensor([torch.ones(4)] * 2))


def _coalesced() -> None:
    names: Any = torch.ops._c10d_functional
    group = dist.group.WORLD
    assert group is not None
    names.all_reduce_coalesced([own()], "sum", group.group_name)


def _from_another() -> None:
    dist.scatter(torch.empty(4), None, 1)


REFUSED: dict[str, tuple[Any, str]] = {
    "a message": (_sent, "a message between two ranks"),
    "an exchange": (_exchanged, "the result differs between ranks, but is written"),
    "ranks of a part": (_of_other_values, "the tensor belongs to 2 ranks, but the world has 4"),
    "coalesced": (_coalesced, "the collective is called on a simulated tensor"),
    "a list elsewhere": (_from_another, "the list of tensors is passed only on another rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_process_cannot_hold_is_refused(case: str) -> None:
    call, problem = REFUSED[case]
    with sf.fake_world(4), pytest.raises(sf.ShardError) as caught:
        call()
    assert problem in str(caught.value)
    assert caught.value.fix


def test_after_the_world_torchs_own_kernels_are_back() -> None:
    with sf.fake_world(2):
        pass
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


CALLS = {
    "allreduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "alltoall_base": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    "allgather": lambda x: dist.all_gather_object([None] * 4, 3),
    "send": lambda x: dist.send(x, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_of_values_in_a_world_without_values_is_refused(name: str) -> None:
    with sf.fake_world(4, numerics=False):
        wanted = rf"torch.distributed, {name}(_base)?: the collective needs values"
        with pytest.raises(sf.FakeValueError, match=wanted) as caught:
            CALLS[name](torch.ones(4))
        assert "numerics=True" in str(caught.value)
        assert __file__ in str(caught.value) or name == "allgather"
