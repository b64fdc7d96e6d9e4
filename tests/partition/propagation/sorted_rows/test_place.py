"""Sorted rows in a plan: where the elements are sharded, nothing is sent between a sort and the
rows that are back in their order.
"""

from __future__ import annotations

import torch

from shardfn.types import Marks
from tests.support.stages.plans import planned, told

X = torch.ones(5, 4)
IDS = torch.zeros(10, dtype=torch.int64)


def experts(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    ids, perm = torch.sort(ids)
    rows = x[perm // 2] * ids[:, None]
    return [torch.zeros(5, 4).index_put((perm // 2,), rows, accumulate=True)]


def steps(x: Marks, ids: Marks, sizes: tuple[int, ...] = (2,)) -> list[str]:
    return told(planned(experts, (X, IDS), [x, ids], [None], sizes))


def test_each_rank_sorts_its_own_elements() -> None:
    # 5 rows over 2 ranks, each with its 2 elements
    plan = steps((0,), ((0, 2),))
    assert plan[0] == "apply sort: (0, 2) -> (0, 2), (0, 2)"
    assert plan[-1] == "apply index_put: 0, (0, 2), (0, 2) -> 0"
    assert not any("redistribute" in line for line in plan)


def test_rows_of_a_tensor_that_all_ranks_have_are_sliced() -> None:
    sent = [line for line in steps(("R",), ((0, 2),)) if "redistribute" in line]
    assert sent == ["redistribute index: R -> 0 by slice (implicit)"]


def test_elements_of_one_row_on_two_ranks_are_gathered() -> None:
    # of 10 elements, 4 ranks have 3, 3, 3 and 1
    plan = steps((0,), (0,), (4,))
    assert plan[0] == "redistribute sort: 0 -> R by all_gather (implicit)"


def test_elements_that_all_ranks_have_are_sorted_by_each() -> None:
    assert steps((1,), ("R",))[0] == "apply sort: R -> R, R"


def test_another_axis_may_shard_what_is_not_a_row() -> None:
    plan = steps((0, 1), ((0, 2), "R"), (2, 2))
    assert not any("redistribute" in line for line in plan)
    assert plan[-1].endswith("-> 0|1")


def test_another_axis_shards_no_row() -> None:
    plan = steps((0, 0), ((0, 2), "R"), (2, 2))
    sent = [line for line in plan if "redistribute" in line]
    assert sent == ["redistribute index: 0|0 -> 0|R by all_gather (implicit)"]


def counted(dtype: torch.dtype) -> list[str]:
    """A product by groups that are counted, in some dtype, before the sort."""

    def fn(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        ids = ids.clamp(min=0)
        counts = torch.histc(ids.float(), 3, 0, 2).to(dtype)
        perm = torch.argsort(ids)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = x[perm // 2].repeat(1, 4).bfloat16()
        w = torch.ones(3, 16, 8, dtype=torch.bfloat16)
        return [torch.ops.aten._grouped_mm(rows, w, ends).sum(0)]

    return told(planned(fn, (X, IDS), [(0,), ((0, 2),)], [None]))


def test_counts_of_each_ranks_own_elements_are_read_as_they_are() -> None:
    sent = [x for x in counted(torch.float32) if "redistribute" in x]
    assert sent == ["redistribute output: sum -> R by all_reduce"]
    # a cast to integers before the sort has added the counts of all ranks
    assert any("redistribute sort" in x for x in counted(torch.int64))
