"""An op that starts an all-to-all, run for every rank of a group in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from shardfn import _compat


@attrs.frozen
class _Members:
    """A process group as an op sees it."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def exchanged(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[int], torch.Tensor], n: int
) -> list[torch.Tensor]:
    """What each of n ranks receives.

    Args:
        monkeypatch: of the test.
        start: runs the op on one rank.
        n: the number of ranks.
    """
    started: list[Any] = []
    results = []
    monkeypatch.setattr(_compat, "wait_later", lambda out, work: None)
    monkeypatch.setattr(
        dist,
        "all_to_all_single",
        lambda out, x, taken, sent, **_: started.append((out, x, taken, sent)),
    )
    for rank in range(n):
        members = _Members(rank, n)
        monkeypatch.setattr(_compat, "named_group", lambda _, m=members: m)
        results.append(start(rank))
    parts = [x.split(sent) for _, x, _, sent in started]
    for rank, (out, _, taken, _) in enumerate(started):
        mine = [row[rank] for row in parts]
        assert [part.numel() for part in mine] == taken, "both sides agree"
        out.copy_(torch.cat(mine))
    return results
