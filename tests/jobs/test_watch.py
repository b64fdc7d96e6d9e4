"""The watchdogs of a job of several ranks, here threads of one process over one store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import _compat, extensions
from shardfn.jobs import service
from shardfn.jobs.calls import Event
from shardfn.jobs.watch import Watch

SOON = 20.0  # seconds, in which a thread of a loaded machine gets its turn


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    store = _compat.tcp_store("127.0.0.1", 0, True, 5.0)
    both = [Watch(store, rank, 2, 2.0, set()) for rank in range(2)]
    yield both
    for watch in both:
        watch.is_over = True
        watch.woken.set()
    for watch in both:
        for thread in watch.threads:
            thread.join(SOON)


def together(*calls: Any) -> list[Any]:
    """What each call returns or raises, in threads."""
    found: list[Any] = [None] * len(calls)

    def run(k: int) -> None:
        try:
            found[k] = calls[k]()
        except sf.ShardError as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def event(watch: Watch, key: int) -> Event:
    return Event(watch.lane("dp", (0, 1)), key, f"f{key}", {}, event.__code__)


def told(watch: Watch) -> Any:
    with watch.told:
        watch.told.wait_for(lambda: watch.verdict is not None, SOON)
    return watch.verdict


def test_ranks_exchange_texts_any_number_of_times(watches: list[Watch]) -> None:
    for k in range(3):
        calls = [lambda w=w, k=k: w.gathered("f", f"{k} {w.rank}") for w in watches]
        assert together(*calls) == [[f"{k} 0", f"{k} 1"]] * 2


def test_a_rank_that_does_not_compare_is_lost_within_the_timeout(watches: list[Watch]) -> None:
    with pytest.raises(sf.RankLostError, match="rank 1 did not|rank 1 is lost") as caught:
        watches[0].gathered("f", "mine")
    assert caught.value.rank == 1


def test_other_orders_of_calls_are_found_on_all_ranks_beside_the_calls(
    watches: list[Watch],
) -> None:
    for watch, keys in zip(watches, ([3, 4], [4, 3]), strict=True):
        for key in keys:
            watch.enter(event(watch, key))
            watch.enter(None)
    first, second = map(told, watches)
    assert first == second and first.kind == "different"
    assert first.lines[0] == "ranks are in different calls, from call 1 on"
    for watch in watches:
        with pytest.raises(sf.DivergenceError, match="f5: ranks are in different"):
            watch.enter(event(watch, 5))


def test_the_connections_of_a_rank_that_waits_in_vain_are_shut_down(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = list[Any]()
    monkeypatch.setattr(_compat, "shut_down", lambda *x: cut.extend(x))
    watches[0].enter(event(watches[0], 3))
    watches[1].leave("ValueError: bad", follows=False)
    assert "ValueError: bad" in told(watches[0]).lines[0]
    assert cut[:2] == [watches[0].connections, watches[0].store]


def test_the_error_of_a_lost_rank_names_the_action_that_waits_for_it(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    action = "F of stage 1, microbatch 0, waiting for %add"
    monkeypatch.setattr(service, "doing", lambda frames: action if [*frames] else None)
    watches[0].enter(event(watches[0], 3))
    watches[1].leave("ValueError: bad", follows=False)
    told(watches[0])

    def run(_: Any) -> Any:
        raise torch.distributed.DistNetworkError("a receive failed")

    monkeypatch.setattr(service, "watch_of", lambda _: watches[0])
    monkeypatch.setattr(watches[0], "enter", lambda _: None)
    program = extensions.Program("step", ("dp", (0, 1)), "step of ()", {})
    with pytest.raises(sf.RankLostError, match=f"^step, {action}: rank 1 is lost"):
        service.watched(None, program, run)([])


def test_an_error_of_ones_own_asks_nobody(watches: list[Watch]) -> None:
    assert watches[0].why("f", ValueError("mine")) is None
    assert watches[0].why("f", RuntimeError("mine")) is None


def test_the_end_of_a_job_waits_for_those_who_are_behind(watches: list[Watch]) -> None:
    assert not watches[0].is_alone(serves=True)
    for watch in watches:
        watch.leave(None, follows=False)
    with watches[0].told:
        is_done = lambda: watches[0].is_alone(serves=False)
        assert watches[0].told.wait_for(is_done, SOON)


def test_a_store_that_is_gone_is_told_of(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise torch.distributed.DistNetworkError("gone")

    monkeypatch.setattr(Watch, "_beat", fails)
    error = torch.distributed.DistNetworkError("a collective failed")
    assert "the store of the job no longer answers" in str(watches[1].why("f", error))
