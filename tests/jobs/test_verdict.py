"""The verdict on a job follows from what its processes have published, and reads well."""

from __future__ import annotations

from typing import Any

import pytest

import shardfn as sf
from shardfn.jobs import presence
from shardfn.jobs.calls import RAISED, WHICH_RAISED, Event, Lane
from shardfn.jobs.verdict import (
    DECIDED,
    PATIENT,
    WAITING,
    Heard,
    Verdict,
    judged,
    unheard_of,
    unserved,
)

HERE = presence.here()
ELSEWHERE = {**HERE, "host": "node7", "process": 12}
ENDED = {**HERE, "start": "0"}


def process(
    rank: int, keys: list[int], *, waits: bool = False, age: float = 0.0, **changes: Any
) -> Heard:
    """A process that has begun these calls, and is in the last one if it waits."""
    lane = Lane("dp", (0, 1))
    for key in keys:
        lane.add(Event(lane, key, f"f{key}", {}))
    now = {
        "lane": "dp",
        "ranks": [0, 1],
        "call": lane.count,
        "text": f"f{keys[-1]}" if keys else "",
        "sends": "all_reduce over dp",
        "long": True,
    }
    status = {
        "place": ELSEWHERE,
        "lanes": {"dp": lane.shown()} if keys else {},
        "now": now if waits else None,
        "stage": None,
        "line": None,
        "left": None,
        **changes,
    }
    return Heard(rank, status, age)


def verdict(mine: Heard, other: Heard, patience: str = WAITING) -> Verdict | None:
    return judged(mine, [other], patience=patience)


def left(error: str | None, *, follows: bool = False) -> Any:
    return {"error": error, "follows": follows, "read": False}


MINE = process(0, [3, 4], waits=True)
LOST = {
    "it left after ValueError: bad": process(1, [3], left=left("ValueError: bad")),
    "its process ended": process(1, [3], place=ENDED),
}
LATER = {
    "it is not heard": process(1, [3, 4], waits=True, age=99.0),
    "the rank did not answer within the timeout": process(1, [3], stage="capture"),
}
DIFFER = {
    "from call 2 on\\n  rank 0: f4\\n  rank 1: f5": process(1, [3, 5], waits=True),
    "rank 1: at its end, after 1 calls": process(1, [3], left=left(None)),
}


@pytest.mark.parametrize("said", LOST)
def test_a_lost_rank_is_told_at_once(said: str) -> None:
    found = verdict(MINE, LOST[said])
    assert found and found.kind == "lost" and said in found.lines[0]


@pytest.mark.parametrize("said", LATER)
def test_a_rank_that_may_still_come_is_lost_only_at_the_end(said: str) -> None:
    assert verdict(MINE, LATER[said]) is None
    assert verdict(MINE, LATER[said], PATIENT) is None
    found = verdict(MINE, LATER[said], DECIDED)
    assert found and found.kind == "lost" and said in found.lines[0]


@pytest.mark.parametrize("said", DIFFER)
def test_ranks_in_different_calls_are_told_at_once(said: str) -> None:
    found = verdict(MINE, DIFFER[said])
    assert found
    assert said.replace("\\n", "\n") in str(found.error("shard(f)", None))
    assert isinstance(found.error("shard(f)", None), sf.DivergenceError)


def test_a_rank_outside_of_calls_differs_only_at_the_end() -> None:
    other = process(1, [3])
    assert verdict(MINE, other, PATIENT) is None
    found = verdict(MINE, other, DECIDED)
    assert found and found.lines[2] == "rank 1: in no call, after 1 calls"


def test_an_error_that_follows_that_of_another_rank_is_no_reason() -> None:
    other = process(1, [3], left=left("RankLostError: rank 2", follows=True))
    assert verdict(MINE, other) is None


def test_calls_that_cross_are_a_divergence() -> None:
    lane = Lane("world", (0, 1))
    lane.add(Event(lane, 0, "a comparison of g", {}))
    now = {**MINE.status["now"], "lane": "world", "call": 1, "text": "a comparison of g"}
    lanes = {"world": lane.shown(), **process(1, [3]).status["lanes"]}
    found = verdict(MINE, process(1, [3], lanes=lanes, now=now))
    assert found and found.lines[0] == "ranks are in different calls"
    short = {**now, "long": False}
    assert verdict(MINE, process(1, [3], lanes=lanes, now=short)) is None


def test_s16_a_rank_waits_in_a_collective_for_one_that_has_raised() -> None:
    lane = Lane("dp", (0, 1))
    for key, text in ((3, "f3"), (4, "f4"), (RAISED, f"f4{WHICH_RAISED}ValueError: bad")):
        lane.add(Event(lane, key, text, {}))
    other = process(1, [], lanes={"dp": lane.shown()})
    found = verdict(MINE, other)
    assert found and found.lines == (
        "ranks are in different calls, from call 3 on",
        "rank 0: in call 2, f4: all_reduce over dp",
        "rank 1: f4, which raised ValueError: bad",
    )
    for change in ({"sends": None}, {"long": False}):  # it may still raise, too
        mine = process(0, [3, 4], now={**MINE.status["now"], **change})
        assert verdict(mine, other) is None


def test_ranks_that_end_after_other_numbers_of_calls_differ() -> None:
    ends = {"left": left(None)}
    other = process(1, [3], **ends)
    assert verdict(process(0, [3], **ends), other) is None
    assert verdict(process(0, [3, 3], **ends), other)


def test_a_lost_rank_is_an_error_with_fields() -> None:
    found = verdict(MINE, LOST["it left after ValueError: bad"])
    assert found
    error = Verdict.of(found.text()).error("shard(f)", "train.py:3")
    assert isinstance(error, sf.RankLostError)
    assert (error.rank, error.host, error.heard) == (1, "node7", 0.0)
    assert str(error) == (
        "shard(f): rank 1 is lost: it left after ValueError: bad\n  host node7, process 12, "
        "last sign of life 0.0 s ago\n  it was at its end, after 1 calls\n  at: train.py:3\n  "
        "try: read the first error of rank 1; torchrun --max-restarts=3 restarts a failed job"
    )


def test_what_a_rank_did_has_its_call_its_collective_and_its_line() -> None:
    other = process(1, [3], waits=True, line="train.py:8", place=ENDED)
    found = verdict(MINE, other)
    assert found and found.doing == "in call 1, f3: all_reduce over dp, at train.py:8"


def test_a_rank_that_was_never_heard_and_a_store_that_is_gone() -> None:
    assert "given no sign of life" in unheard_of(1).lines[0]
    server = process(0, [3])
    said = unserved(server, "the store of the job").lines[0]
    assert said == "rank 0 is lost: the store of the job no longer answers, and this rank served it"
