"""Reads and writes of rows by the places that a sort gives."""

from __future__ import annotations

import torch

from shardfn.partition.propagation.sorted_rows.kinds import POSITIONS, Own, Rows
from tests.support.stages.graphs import op_of
from tests.support.stages.sorted_rows import member, members


def read(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    perm = torch.argsort(ids)
    at = (perm.to(torch.int32) // 2).long()
    return [torch.gather(x, 0, at[:, None].expand(-1, 3)).sum()]


def put(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    perm = torch.argsort(ids)
    places = torch.empty_like(perm).index_put((perm,), torch.arange(8))
    return [x.index_select(0, perm // 2)[places]]


def written(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    perm = torch.argsort(ids)
    rows = torch.zeros(8, 3).index_put((perm,), x[perm // 2].sin())
    places = (torch.argsort(perm),)
    again = torch.zeros(8, 3).index_put(places, rows, accumulate=True)
    token = perm[:, None].expand(-1, 3) // 2
    return [torch.zeros(4, 3).scatter_add(0, token, again)]


def test_numbers_stay_numbers_in_views_and_wide_dtypes() -> None:
    found = member(read, "gather")
    assert found.ins == (Own(0, 2), Own(0))
    assert found.kinds == (Rows(0),)


def test_a_permutation_is_inverted_by_writing_the_numbers_from_0() -> None:
    found = member(put, "index_put")
    assert found.kinds == (Rows(0, numbers=POSITIONS),)
    assert found.ins == (Own(0), Own(0), "R")
    assert member(put, "index").kinds == (None,)


def test_rows_are_written_in_their_order_and_in_that_of_the_sort() -> None:
    first, second = (
        found.kinds
        for node, found in members(written).members.items()
        if op_of(node) == "index_put"
    )
    assert (first, second) == ((None,), (Rows(0),))
    last = member(written, "scatter_add")
    assert (last.outs, last.kinds) == ((Own(0, 2),), (None,))
