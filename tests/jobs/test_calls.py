"""Two processes find the first call in which they differ, however far apart they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardfn.jobs.calls import Event, Lane, first_difference

LONG = 1000


def lane(keys: list[int]) -> Any:
    found = Lane("dp", (0, 1))
    for key in keys:
        found.add(Event(found, key, f"f{key}", {}))
    return json.loads(json.dumps(found.shown()))


@pytest.mark.parametrize("ahead", [0, 1, 7, 300])
def test_the_same_calls_agree_however_far_one_process_is_ahead(ahead: int) -> None:
    keys = [k % 7 for k in range(LONG)]
    assert first_difference(lane(keys[: LONG - ahead]), lane(keys)) is None


def test_a_recent_call_that_differs_is_named() -> None:
    keys = [3, 4, 5, 4]
    assert first_difference(lane(keys), lane([3, 5, 4, 4])) == (2, "f4", "f5")


@pytest.mark.parametrize("ahead", [1, 100])
def test_an_old_call_that_differs_is_found(ahead: int) -> None:
    keys = [3] * LONG
    other = [3] * 40 + [4] + [3] * (LONG - 41)
    at, _, _ = first_difference(lane(keys[:-ahead]), lane(other)) or (0, "", "")
    assert 41 <= at <= LONG


def test_the_marks_of_many_calls_are_few() -> None:
    shown = lane([3] * 100_000)
    assert len(shown["marks"]) < 40 and len(shown["recent"]) == 8
