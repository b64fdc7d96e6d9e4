"""Sorts that each rank may do on its own rows: those whose order no op tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.partition.propagation.sorted_rows.proof import sorted_rows
from tests.support.stages.graphs import calls, graph_of, op_of

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
    found = sorted_rows(graph_of(fn, X, IDS), "f")
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
    assert not sorted_rows(graph, "f")


def test_a_rule_of_the_user_is_not_overruled() -> None:
    rule = sf.rule(aten.sin.default, lambda call: [(("R",), ("R",))])
    try:
        assert not sorted_rows(graph_of(inverted, X, IDS), "f")
    finally:
        rule.remove()
    assert sorted_rows(graph_of(inverted, X, IDS), "f")


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
    assert bool(sorted_rows(graph_of(fn, X, IDS), "f")) == is_proven


@pytest.mark.parametrize("descending", [False, True])
def test_groups_may_be_counted_before_the_sort(descending: bool) -> None:
    def fn(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        ids = ids.clamp(min=0)
        counts = torch.histc(ids.view(-1).float(), 3, 0, 2)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return product(x, torch.argsort(ids, descending=descending), ends)

    found = sorted_rows(graph_of(fn, X, IDS), "f")
    earlier = [op_of(x) for rows in found.values() for x in rows.earlier]
    assert earlier == ([] if descending else ["histc", "cumsum"])
