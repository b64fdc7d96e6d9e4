"""Collectives over lists: what torch's own do on real ranks is compared in tests/dtensors; here the
lists that do not fit, and the calls that one rank makes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message import without_line
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf

X = torch.arange(8.0).view(4, 2)


def outputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.empty(shape) for shape in shapes]


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list that is too short": (
        lambda x: dist.all_gather(outputs((4, 2)), x),
        """torch.distributed.all_gather: tensor_list has 1 elements
  needed: 2
  try: pass one element for each rank of the group, or for each tensor""",
    ),
    "outputs of another shape": (
        lambda x: dist.all_gather(outputs((4, 2), (8,)), x),
        """torch.distributed.all_gather: tensor_list[1] has shape (8,), torch.float32
  needed: shape (4, 2), torch.float32, since all ranks share one program
  try: pad the tensors to equal size""",
    ),
    "inputs of two shapes": (
        lambda x: dist.reduce_scatter(x * 1, [x, x[:2]]),
        """torch.distributed.reduce_scatter: input_list[1] has shape (2, 2), torch.float32
  needed: shape (4, 2), torch.float32, since all ranks share one program
  try: pad the tensors to equal size""",
    ),
    "parts of two shapes": (
        lambda x: dist.all_to_all(outputs((1, 2), (3, 2)), [x[:1], x[1:]]),
        """torch.distributed.all_to_all: input_tensor_list[1] has shape (3, 2), torch.float32
  needed: shape (1, 2), torch.float32, since all ranks share one program
  try: pad the tensors to equal size""",
    ),
    "a list on one rank": (
        lambda x: dist.gather(x, outputs((4, 2), (4, 2)), 0),
        """torch.distributed.gather: torch accepts gather_list on one rank only, but all ranks \
share \
one program
  needed: the same call on all ranks
  try: dist.all_gather(outputs, x, group=group), with a list outputs on all ranks""",
    ),
    "a list of one rank": (
        lambda x: dist.scatter(x * 1, None, 0),
        """torch.distributed.scatter: torch accepts scatter_list on one rank only, but all \
ranks share \
one program
  needed: the same call on all ranks
  try: x = torch.distributed.nn.functional.scatter(tensors, src, group), with tensors on all \
ranks""",
    ),
    "no rank": (
        lambda x: dist.reduce(x * 1),
        """torch.distributed.reduce: neither dst nor group_dst is given, so the rank is unknown
  try: group_dst=0""",
    ),
    "two ranks": (
        lambda x: dist.reduce(x * 1, 0, group_dst=1),
        """torch.distributed.reduce: group_dst is 1, and dst is 0
  needed: either dst or group_dst, a number from 0 to 1
  try: group_dst=0""",
    ),
    "a send": (
        lambda x: dist.isend(x, 1),
        """jit(<lambda>): the function sends to one rank, or receives from one
  needed: one pure graph of tensor ops
  try: y = sf.ppermute(x, 'dp', [(0, 1)]), by axis name: rank 0 sends to rank 1, others get \
zeros""",
    ),
    "the number on a machine": (
        lambda x: x + dist.get_node_local_rank(),
        """jit(<lambda>): the function asks for the local rank, the number of this process on \
its machine
  needed: one pure graph of tensor ops
  try: mesh.get_local_rank(axis), which is a tensor; or read the number outside of the \
function""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named_with_what_to_do(case: str) -> None:
    fn, text = CASES[case]
    with sf.fake_world(2):
        sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.CaptureError) as caught:
            sf.jit(fn, backend="aten")(X)
    assert without_line(caught.value) == text


def test_a_rank_of_the_world_is_given_as_one_of_its_group() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        group = mesh.get_group("tp")
        with pytest.raises(sf.CaptureError, match="src is 3") as caught:
            sf.jit(lambda x: dist.broadcast(x * 1, 3, group=group))(X)
        assert caught.value.fix == "group_src=1"
        own = SimulatedTensor([X + 10 * k for k in range(4)])

        def fixed(x: Any) -> Any:
            y = x * 1
            dist.broadcast(y, group=group, group_src=1)
            return y

        found = sf.jit(fixed, backend="aten")(own)
        wanted = [own.shards[k] for k in (1, 1, 3, 3)]
        assert_close(found.shards, wanted)


def test_coalesced_collectives() -> None:
    def fn(x: Any) -> Any:
        y, z = x * 1, x * 2
        rows = [[torch.empty_like(x) for _ in range(2)] for _ in range(2)]
        with dist.distributed_c10d._coalescing_manager() as work:
            dist.all_reduce(y)
            dist.all_reduce(z)
        work.wait()
        done = dist.all_gather_coalesced(rows, [x, z], async_op=True)
        done.wait()
        return y, z, rows

    with sf.fake_world(2):
        sf.make_mesh((2,), ("dp",))
        y, z, rows = sf.jit(fn, backend="aten")(SimulatedTensor([X, X + 1]))
    total = 2 * X + 1
    assert_close(y.shards, [total] * 2)
    assert_close(z.shards, [2 * total] * 2)
    for k, row in enumerate(rows):
        assert_close(row[0].shards, [X + k] * 2)
        assert_close(row[1].shards, [2 * total] * 2)
