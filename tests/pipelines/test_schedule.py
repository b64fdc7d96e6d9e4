"""A schedule is a value: what it is made of, and what it says of itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import shardfn as sf

ROWS = [[("F", s, 0), ("BW", s, 0)] for s in range(2)]
WRONG: dict[str, tuple[Any, str]] = {
    "text": ("F0.0", "table is 'F0.0', a str"),
    "a row that is not a sequence": ([3], r"table is \[3\], a list"),
    "no row": ([], "table has no action"),
    "no action": ([[], []], "table has no action"),
    "a kind": ([[("X", 0, 0)]], r"table\[0\]\[0\] is \('X', 0, 0\), a tuple"),
    "a number": ([[("F", 0, -1)]], r"table\[0\]\[0\] is \('F', 0, -1\), a tuple"),
    "a flag": ([[("F", True, 0)]], r"table\[0\]\[0\] is \('F', True, 0\), a tuple"),
    "a field too few": ([[("F", 0, 0), ("F", 1)]], r"table\[0\]\[1\] is \('F', 1\), a tuple"),
    "a field that has no hash": ([[([], 0, 0)]], r"table\[0\]\[0\] is \(\[\], 0, 0\), a tuple"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_table_of_another_form_is_refused_by_place(case: str) -> None:
    table, said = WRONG[case]
    with pytest.raises(sf.ScheduleError, match=f"^Schedule, table: {said}") as error:
        sf.Schedule("mine", table)
    assert "needed: a sequence of actions for each pipeline rank, each action a tuple (kind" in str(
        error.value
    )


def test_all_wrong_actions_are_listed_at_once() -> None:
    with pytest.raises(sf.ScheduleError) as error:
        sf.Schedule("mine", [[("X", 0, 0)], [("F", 0, 0), ("F", 0, 0.5)]])
    first, second, *_ = str(error.value).split("\n")
    assert "table[0][0]" in first and "table[1][1]" in second


def test_a_name_is_text() -> None:
    with pytest.raises(sf.ShardError, match="^Schedule, name: name is 3"):
        sf.Schedule(3, ROWS)  # pyright: ignore[reportArgumentType]


def test_a_schedule_says_its_sizes() -> None:
    schedule = sf.Schedule("mine", ROWS)
    assert (schedule.coordinates, schedule.microbatches, schedule.stages) == (2, 1, 2)
    assert repr(schedule) == "Schedule('mine', coordinates=2, microbatches=1, stages=2)"
    assert [schedule.home(s) for s in range(2)] == [0, 1]


def test_gradients_of_weights_stand_apart_or_do_not() -> None:
    assert not sf.Schedule("mine", ROWS).parts
    assert sf.Schedule("mine", [[("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]]).parts


def test_schedules_are_equal_and_hash_alike_if_their_names_and_actions_are() -> None:
    schedule = sf.Schedule("mine", ROWS)
    again = sf.Schedule("mine", tuple([tuple([list(x) for x in row]) for row in ROWS]))
    assert schedule == again and hash(schedule) == hash(again)
    assert schedule != sf.Schedule("yours", ROWS)
    assert schedule != sf.Schedule("mine", ROWS[::-1])
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    with pytest.raises(AttributeError):
        schedule.name = "yours"  # pyright: ignore[reportAttributeAccessIssue]


def _stages_on(*homes: int) -> sf.Schedule:
    """Stages in this order of coordinates."""
    return sf.Schedule(
        "mine",
        [[("F", s, 0) for s, home in enumerate(homes) if home == c] for c in range(max(homes) + 1)],
    )


def test_the_order_of_stages_is_a_loop_a_v_or_another() -> None:
    assert _stages_on(0, 1, 2).order == "loop"
    assert _stages_on(0, 1, 0, 1, 0).order == "loop"
    assert _stages_on(0, 1, 2, 2, 1, 0).order == "v"
    assert _stages_on(1, 0).order == "other"
    assert _stages_on(0, 1, 1).order == "other"
    assert _stages_on(0, 0).order == "loop", "on one coordinate a v is a loop"


def test_a_stage_on_two_coordinates_has_no_home() -> None:
    twice = sf.Schedule("mine", [ROWS[0], ROWS[0]])
    assert twice.order == "other"
    with pytest.raises(sf.ScheduleError, match="mine: stage 0 is on pipeline ranks 0, 1"):
        twice.home(0)


def test_a_stage_that_does_not_exist_has_no_home() -> None:
    with pytest.raises(sf.ScheduleError, match=r"stage 7 is on no pipeline rank\n.*\n.* 0 to 1$"):
        sf.Schedule("mine", ROWS).home(7)
    with pytest.raises(sf.ShardError, match="^Schedule.home, stage: stage is -1"):
        sf.Schedule("mine", ROWS).home(-1)


def test_json_is_read_again_as_it_was_written() -> None:
    schedule = sf.schedules.interleaved(2, 3)
    assert sf.Schedule.from_json(schedule.to_json()) == schedule
    assert sf.Schedule.from_json(schedule.to_json()).to_json() == schedule.to_json()


NOT_JSON = {
    "damaged": ("{", "it is not JSON: "),
    "nested": ("[" * 100_000, "it is not JSON: "),
    "no text": (3, "it is not JSON: "),
    "a list": ("[]", r"it is \[\], a list"),
    "no table": ('{"name": "mine"}', r"it is \{'name': 'mine'\}, a dict"),
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_json_that_is_not_a_schedule_is_refused(case: str) -> None:
    text, said = NOT_JSON[case]
    with pytest.raises(sf.ScheduleError, match=f"^Schedule.from_json, text: {said}"):
        sf.Schedule.from_json(text)  # pyright: ignore[reportArgumentType]


def test_json_with_wrong_values_is_refused_as_the_values_are() -> None:
    with pytest.raises(sf.ScheduleError, match=r"^Schedule, table: table\[0\]\[0\] is \['F', 0\]"):
        sf.Schedule.from_json('{"name": "mine", "table": [[["F", 0]]]}')
    with pytest.raises(sf.ShardError, match="^Schedule, name: name is 3"):
        sf.Schedule.from_json('{"name": 3, "table": [[["F", 0, 0]]]}')
