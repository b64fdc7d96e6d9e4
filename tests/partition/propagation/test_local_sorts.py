"""Sorts that each rank may do on its own rows: those whose order no op tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.partition.propagation.local_sorts import is_at_least, is_constant_along, local_sorts
from shardfn.types import MeshPlacements
from tests.support.stages.graphs import calls, graph_of, op_of
from tests.support.stages.plans import planned, told

aten = torch.ops.aten
X = torch.ones(4, 3)
IDS = torch.tensor([1, 0, 2, 1, 0, 0, 1, 2])  # 2 for each row
Fn = Callable[..., list[torch.Tensor]]


def restored(rows: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, 3).index_put((perm // 2,), rows, accumulate=True)


def once(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    ids, perm = torch.sort(ids)
    return [restored(x[perm // 2] * ids[:, None], perm)]


def twice(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    (again,) = once(x, ids)
    return once(again, ids)


def inverted(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    perm = torch.argsort(ids)
    return [x[perm // 2].sin()[torch.argsort(perm)]]


def summed(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    ids, perm = torch.sort(ids)
    return [ids.sum(), x[perm // 2].amax(0)]


@pytest.mark.parametrize(("fn", "count"), [(once, 1), (twice, 2), (inverted, 1), (summed, 1)])
def test_a_sort_is_of_each_rank_where_rows_are_put_back(fn: Fn, count: int) -> None:
    found = local_sorts(graph_of(fn, X, IDS), "f")
    assert [op_of(x) for x in found] == ["sort"] * count
    for rows in found.values():
        assert rows.each in ([1], [1, 2])


def mixed(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    perm = torch.argsort(ids)
    other = torch.argsort(-ids)
    return [(x[perm // 2] @ x[other // 2].t()).sum()]


def shifted(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    _, perm = torch.sort(ids)
    return [restored(x[perm // 2], (perm + 1) % 8)]


def overwritten(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """The last row of those with one number stays."""
    _, perm = torch.sort(ids)
    return [torch.zeros(4, 3).index_put((perm // 2,), x[perm // 2])]


def of_rows(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """Each column is sorted, not one row of elements."""
    return [torch.sort(x, 0)[0].sum()]


@pytest.mark.parametrize(
    "fn",
    [
        mixed,
        shifted,
        overwritten,
        of_rows,
        lambda x, ids: [torch.sort(ids)[0]],
        lambda x, ids: [torch.sort(ids)[1]],
        lambda x, ids: [torch.sort(ids)[0][:3].sum()],
        lambda x, ids: [x[torch.sort(ids)[1] // 2].view(4, 6).sum(1)],
        lambda x, ids: [x[torch.sort(ids)[1] // 4].sum(0)],  # numbers of 2 rows only
        lambda x, ids: [aten.bernoulli.p(x[torch.sort(ids)[1] // 2], 0.5).sum(0)],
        lambda x, ids: [(x[torch.argsort(ids) // 2] + x.repeat(2, 1)).sin().sum(0)],
        lambda x, ids: [torch.argsort(torch.argsort(ids)).sum()],
    ],
)
def test_no_sort_is_whose_order_some_op_tells(fn: Fn) -> None:
    graph = graph_of(fn, X, IDS)
    assert calls(graph, "sort")
    assert not local_sorts(graph, "f")


def test_a_rule_of_the_user_is_not_overruled() -> None:
    rule = sf.rule(aten.sin.default, lambda call: [(("R",), ("R",))])
    try:
        assert not local_sorts(graph_of(inverted, X, IDS), "f")
    finally:
        rule.remove()
    assert local_sorts(graph_of(inverted, X, IDS), "f")


def counted(ids: torch.Tensor, low: int = 0, descending: bool = False) -> Any:
    ids, perm = torch.sort(ids, descending=descending)
    counts = torch.histc(ids.float(), 3, low, 2)
    return perm, torch.cumsum(counts, 0, dtype=torch.int32)


def product(x: torch.Tensor, perm: torch.Tensor, ends: torch.Tensor) -> list[Any]:
    w = torch.ones(3, 8, 16, dtype=torch.bfloat16)
    rows = x.repeat(1, 3)[:, :8].bfloat16()[perm // 2]
    return [torch.ops.aten._grouped_mm(rows, w, ends).sum(0)]


@pytest.mark.parametrize(
    ("fn", "is_proven"),
    [
        (lambda x, ids: product(x, *counted(ids.clamp(min=0))), True),
        # an element below the first group shifts the groups of all others
        (lambda x, ids: product(x, *counted(ids)), False),
        (lambda x, ids: product(x, *counted(ids.clamp(min=0), 1)), False),
        (lambda x, ids: product(x, *counted(ids.clamp(min=0), 0, True)), False),
        # groups that are not those of the elements
        (lambda x, ids: product(x, torch.sort(ids)[1], x.view(-1)[:3].int()), False),
        (lambda x, ids: product(x, counted(ids.clamp(min=0))[0], ids[:3].int()), False),
    ],
)
def test_products_by_groups_need_the_groups_of_the_sort(fn: Fn, is_proven: bool) -> None:
    assert bool(local_sorts(graph_of(fn, X, IDS), "f")) == is_proven


@pytest.mark.parametrize("descending", [False, True])
def test_groups_may_be_counted_before_the_sort(descending: bool) -> None:
    def fn(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        ids = ids.clamp(min=0)
        counts = torch.histc(ids.view(-1).float(), 3, 0, 2)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return product(x, torch.argsort(ids, descending=descending), ends)

    found = local_sorts(graph_of(fn, X, IDS), "f")
    earlier = [op_of(x) for rows in found.values() for x in rows.earlier]
    assert earlier == ([] if descending else ["histc", "cumsum"])


def result(fn: Callable[..., Any], *args: torch.Tensor) -> torch.fx.Node:
    (output,) = graph_of(fn, *args).find_nodes(op="output")
    (node,) = output.all_input_nodes
    return node


@pytest.mark.parametrize(
    ("fn", "is_constant"),
    [
        (lambda x: torch.zeros(6, 4), True),
        (lambda x: x.sum(0).expand(6, 4), True),
        (lambda x: x.sum().expand(6, 4), True),
        (lambda x: x.sum(0, keepdim=True), True),
        (lambda x: x.sum(0).expand(6, 4).sin() + torch.ones(6, 1), True),
        (lambda x: torch.ops.aten.copy(x, torch.ones(6, 4)), True),
        (lambda x: x.sin(), False),
        (lambda x: x.sum(1, keepdim=True).expand(6, 4), False),
        (lambda x: x.sum(0).expand(6, 4) + x, False),
        (lambda x: torch.ops.aten.copy(torch.ones(6, 4), x), False),
    ],
)
def test_rows_are_the_same_where_the_program_says_so(
    fn: Callable[..., Any], is_constant: bool
) -> None:
    assert is_constant_along(result(fn, torch.ones(6, 4)), 0) == is_constant


@pytest.mark.parametrize(
    ("fn", "is_enough"),
    [
        (lambda x, ids: x.topk(2)[1].view(-1), True),
        (lambda x, ids: x.argmax(0).long() + 0 * ids[:4], False),
        (lambda x, ids: x.argmax(0).float(), True),
        (lambda x, ids: x.max(0)[1], True),
        (lambda x, ids: x.sort(1)[1][:, 0], True),
        (lambda x, ids: ids.clamp(min=0), True),
        (lambda x, ids: ids.to(torch.uint8), True),
        (lambda x, ids: ids, False),
        (lambda x, ids: ids.clamp(min=-1), False),
        (lambda x, ids: ids.clamp(max=3), False),
        (lambda x, ids: x.topk(2)[0].view(-1), False),
        (lambda x, ids: x.topk(2)[1].to(torch.int8), False),
    ],
)
def test_places_are_no_less_than_zero(fn: Callable[..., Any], is_enough: bool) -> None:
    assert (
        is_at_least(result(fn, torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)), 0) == is_enough
    )
    assert not is_at_least(result(fn, torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)), 1)


def experts(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    ids, perm = torch.sort(ids)
    rows = x[perm // 2] * ids[:, None]
    return [torch.zeros(5, 4).index_put((perm // 2,), rows, accumulate=True)]


def steps(x: MeshPlacements, ids: MeshPlacements, sizes: tuple[int, ...] = (2,)) -> list[str]:
    return told(
        planned(
            experts, (torch.ones(5, 4), torch.zeros(10, dtype=torch.int64)), [x, ids], [None], sizes
        )
    )


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


def sent_for_counts(dtype: torch.dtype) -> list[str]:
    """A product by groups that are counted, in some dtype, before the sort."""

    def fn(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        ids = ids.clamp(min=0)
        counts = torch.histc(ids.float(), 3, 0, 2).to(dtype)
        perm = torch.argsort(ids)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = x[perm // 2].repeat(1, 4).bfloat16()
        w = torch.ones(3, 16, 8, dtype=torch.bfloat16)
        return [torch.ops.aten._grouped_mm(rows, w, ends).sum(0)]

    return told(
        planned(
            fn, (torch.ones(5, 4), torch.zeros(10, dtype=torch.int64)), [(0,), ((0, 2),)], [None]
        )
    )


def test_counts_of_each_ranks_own_elements_are_read_as_they_are() -> None:
    sent = [x for x in sent_for_counts(torch.float32) if "redistribute" in x]
    assert sent == ["redistribute output: sum -> R by all_reduce"]
    # a cast to integers before the sort has added the counts of all ranks
    assert any("redistribute sort" in x for x in sent_for_counts(torch.int64))
