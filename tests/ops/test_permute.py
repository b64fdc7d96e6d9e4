"""permute: each rank has the value of the rank that sends to it, or zeros."""

from __future__ import annotations

import pytest
import torch

from shardfn import _compat
from shardfn.ops.permute import permute
from tests.support.stages.exchange import exchanged

PAIRS = {
    "ring": [(0, 1), (1, 2), (2, 0)],
    "shift": [(0, 1), (1, 2)],
    "itself": [(1, 1)],
    "nothing": [],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_rank_receives_from_its_source_or_zeros(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [source for source, _ in PAIRS[name]]
    targets = [target for _, target in PAIRS[name]]
    mine = lambda rank: torch.tensor([1.0, 2.0]) + 10 * rank
    got = exchanged(monkeypatch, lambda rank: permute(mine(rank), sources, targets, "g"), 3)
    source_of = dict(zip(targets, sources, strict=True))
    for rank, value in enumerate(got):
        source = source_of.get(rank)
        wanted = torch.zeros(2) if source is None else mine(source)
        assert torch.equal(value, wanted)


def test_a_fake_result_is_like_the_value() -> None:
    with _compat.FakeTensorMode():
        x = permute(torch.empty(7, dtype=torch.int32), [0], [1], "g")
    assert (x.shape, x.dtype) == ((7,), torch.int32)
