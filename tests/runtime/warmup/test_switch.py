"""Ranks agree on a call without a collective, whatever the order in which they compile and call."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from shardfn.errors import DivergenceError, RankLostError
from shardfn.runtime.warmup import Switch
from shardfn.runtime.warmup import switch as module_of_switches


def switches(n: int) -> list[Switch]:
    store: Any = dist.HashStore()
    return [Switch("f", store, rank, n) for rank in range(n)]


def test_one_rank_alone_switches_at_its_next_call() -> None:
    mine = Switch("f")
    assert not mine.is_compiled()
    mine.compiled()
    assert mine.is_compiled() and mine.is_compiled()


def test_ranks_that_have_started_different_numbers_of_calls_switch_at_one() -> None:
    ranks = switches(3)
    for rank, calls in zip(ranks, (0, 5, 2), strict=True):
        assert not any(rank.is_compiled() for _ in range(calls))
    threads = [threading.Thread(target=rank.compiled) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    firsts = {rank.first for rank in ranks}
    assert firsts == {4 + module_of_switches.AHEAD + 1}
    flags = [[rank.is_compiled() for _ in range(rank.calls, 20)] for rank in ranks]
    assert [row.index(True) + 20 - len(row) for row in flags] == [13, 13, 13]


def test_a_rank_that_has_promised_waits_for_the_decision() -> None:
    mine, other = switches(2)
    threads = [threading.Thread(target=rank.compiled) for rank in (mine, other)]
    threads[0].start()
    assert not any(mine.is_compiled() for _ in range(50)), "no promise yet: one is not ready"
    threads[1].start()
    calls = 50
    while not mine.is_compiled():
        calls += 1
    for thread in threads:
        thread.join(30)
    assert calls == mine.first == other.first


def test_a_rank_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_switches, "PATIENCE", 0.01)
    (mine,) = switches(1)
    mine.bound = 0
    assert not mine.is_compiled()
    with pytest.raises(DivergenceError, match="a rank has not announced"):
        mine.is_compiled()


def test_a_rank_that_is_lost_ends_the_wait() -> None:
    def raise_lost(name: str) -> NoReturn:
        raise RankLostError.of(name, "rank 1 is lost")

    mine = Switch("f", dist.HashStore(), 0, 2, raise_lost=raise_lost)
    mine.bound = 0
    assert not mine.is_compiled()
    with pytest.raises(RankLostError, match="rank 1 is lost"):
        mine.is_compiled()
