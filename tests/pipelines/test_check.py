"""`check` proves that a schedule runs, however long messages take, or says why it does not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardfn as sf

Row = list[tuple[str, int, int]]
Table = list[Row]
MAKERS = [getattr(sf.schedules, name) for name in sf.schedules.__all__]


def table_of(schedule: sf.Schedule) -> Table:
    """A copy of a schedule's rows."""
    return [[(x.kind, x.stage, x.microbatch) for x in row] for row in schedule.table]


def lines_of(table: Table, stages: int | None = None, **options: Any) -> list[str]:
    """The lines of the error that a table meets."""
    with pytest.raises(sf.ScheduleError) as error:
        sf.Schedule("mine", table).check(stages, **options)
    where, _, rest = str(error.value).partition("Schedule.check, mine: ")
    assert not where
    return [line.strip() for line in rest.split("\n")]


def f_b(*stages: int, microbatches: int = 1) -> Row:
    """F of all microbatches, then BW of all, of stages of one coordinate."""
    forwards = [("F", s, k) for s in stages for k in range(microbatches)]
    return forwards + [("BW", s, k) for s in stages[::-1] for k in range(microbatches)]


def test_a_missing_action_is_named_with_its_coordinate() -> None:
    table = [f_b(0, microbatches=2), f_b(1, microbatches=2)]
    table[1].remove(("F", 1, 1))
    assert (
        lines_of(table)[0] == "missing: pipeline rank 1 does not run F1.1 (stage 1, microbatch 1)"
    )


def test_a_missing_backward_is_two_results() -> None:
    table = [f_b(0), [("F", 1, 0)]]
    first, second, *_ = lines_of(table)
    assert first == "missing: pipeline rank 1 does not run B1.0 (stage 1, microbatch 0)"
    assert second == "missing: pipeline rank 1 does not run W1.0 (stage 1, microbatch 0)"


def test_a_stage_that_no_coordinate_has_is_missing() -> None:
    first, *_ = lines_of([f_b(0)], stages=2)
    assert first == "missing: no pipeline rank runs F1.0 (stage 1, microbatch 0)"


def test_a_doubled_action_is_named_with_both_places() -> None:
    table = [[*f_b(0), ("F", 0, 0)], f_b(1)]
    assert lines_of(table)[0] == (
        "computed twice: pipeline rank 0 runs F0.0 (stage 0, microbatch 0) at position 2, but "
        "pipeline rank 0 runs F0.0 at position 0"
    )


def test_bw_doubles_b_and_w() -> None:
    for kind in "BW":
        table = [[("F", 0, 0), ("BW", 0, 0), (kind, 0, 0)]]
        assert lines_of(table)[0].startswith(
            f"computed twice: pipeline rank 0 runs {kind}0.0 (stage 0, microbatch 0) at position "
            "2, but pipeline rank 0 runs BW0.0"
        )


def test_a_stage_that_does_not_exist_is_unmatched() -> None:
    assert lines_of([f_b(0), f_b(1)], stages=1)[:2] == [
        "unknown stage: pipeline rank 1 runs F1.0 (stage 1, microbatch 0), but the pipeline has "
        "only 1 stages",
        "unknown stage: pipeline rank 1 runs BW1.0 (stage 1, microbatch 0), but the pipeline has "
        "only 1 stages",
    ]


def test_a_stage_on_two_coordinates_is_unmatched() -> None:
    table = [f_b(0), [*f_b(1), ("F", 0, 1), ("BW", 0, 1), ("F", 1, 1), ("BW", 1, 1)]]
    assert lines_of(table)[0] == (
        "stage on two ranks: pipeline rank 1 runs F0.1 (stage 0, microbatch 1), but pipeline rank "
        "0 runs F0.0 of the same stage"
    )


def test_an_action_before_what_it_needs_is_early() -> None:
    backward_first = [[("BW", 0, 0), ("F", 0, 0)]]
    assert lines_of(backward_first)[0] == (
        "too early: pipeline rank 0 runs BW0.0 (stage 0, microbatch 0) at position 0, before it "
        "runs F0.0 at position 1"
    )
    weights_first = [[("F", 0, 0), ("W", 0, 0), ("B", 0, 0)]]
    assert lines_of(weights_first)[0].startswith("too early: pipeline rank 0 runs W0.0 (stage 0")
    later_stage_first = [[("F", 1, 0), ("F", 0, 0), ("BW", 1, 0), ("BW", 0, 0)]]
    assert lines_of(later_stage_first)[0].startswith("too early: pipeline rank 0 runs F1.0 (stage")
    assert (
        "needed: for each stage and microbatch, one pipeline rank runs an action F, and either"
        in lines_of(backward_first)[1]
    )


def test_all_problems_are_listed_at_once_up_to_eight() -> None:
    table = [[("BW", 0, 0), ("F", 0, 0), ("F", 0, 0)], f_b(1)[:1]]
    lines = lines_of(table)
    assert [line.split(":")[0] for line in lines] == [
        *("computed twice", "missing", "missing", "too early", "needed", "try")
    ]
    many = lines_of([f_b(0)], stages=9)
    assert many[8] == "and more" and len(many) == 11


def test_coordinates_that_wait_for_each_other_are_a_circle() -> None:
    """Coordinate 0 wants the gradient of microbatch 1 before it sends microbatch 0."""
    table = [
        [("F", 0, 1), ("BW", 0, 1), ("F", 0, 0), ("BW", 0, 0)],
        [("F", 1, 0), ("BW", 1, 0), ("F", 1, 1), ("BW", 1, 1)],
    ]
    lines = lines_of(table, on_the_way=9)
    assert lines[:3] == [
        "circular wait:",
        "pipeline rank 0, at position 1, BW0.1 (stage 0, microbatch 1), waits for the message of "
        "BW1.1, at position 3 of pipeline rank 1",
        "pipeline rank 1, at position 0, F1.0 (stage 1, microbatch 0), waits for the message of "
        "F0.0, at position 2 of pipeline rank 0",
    ]
    assert lines[3].startswith("try: swap two actions")


def test_messages_read_in_another_order_are_a_circle_if_there_is_room_for_one() -> None:
    table = [
        [("F", 0, 0), ("F", 0, 1), ("BW", 0, 0), ("BW", 0, 1)],
        [("F", 1, 1), ("F", 1, 0), ("BW", 1, 0), ("BW", 1, 1)],
    ]
    assert lines_of(table)[1:3] == [
        "pipeline rank 0, at position 1, F0.1 (stage 0, microbatch 1), waits to send "
        "to pipeline rank 1, which has 1 unread and reads the next message in F1.1, at position 0",
        "pipeline rank 1, at position 0, F1.1 (stage 1, microbatch 1), waits for the message of "
        "F0.1, at position 1 of pipeline rank 0",
    ]
    assert sf.Schedule("mine", table).check(on_the_way=2).alive == (2, 2)


def test_two_coordinates_that_wait_for_room_are_a_circle() -> None:
    """Two stages on each of two coordinates, and one backward after each forward from the start."""
    table = []
    for c, ahead in enumerate((5, 3)):
        groups = [range(2), range(2, 4)]
        f = [("F", s, k) for group in groups for s in (c, c + 2) for k in group]
        b = [("BW", s, k) for group in groups for s in (c + 2, c) for k in group]
        pairs = [x for pair in zip(b, f[ahead:], strict=False) for x in pair]
        table.append([*f[:ahead], *pairs, *b[len(f) - ahead :]])
    lines = lines_of(table)
    assert lines[0] == "circular wait:"
    assert "waits to send to pipeline rank 1, which has 1 unread and reads" in lines[1]
    assert "waits to send to pipeline rank 0, which has 1 unread and reads" in lines[2]
    assert sf.Schedule("mine", table).check(on_the_way=2).alive == (5, 3)


def test_memory_over_a_limit_names_the_action_that_exceeds_it() -> None:
    table = table_of(sf.schedules.gpipe(2, 3))
    lines = lines_of(table, alive=2)
    assert lines[0] == (
        "too many activations: pipeline rank 0 keeps 3 activations when it runs F0.2 (stage 0, "
        "microbatch 2) at position 2"
    )
    kept = "too many activations: pipeline rank 1 keeps 3 activations when it runs F1.2"
    assert lines[1].startswith(kept)
    assert lines[2] == "needed: at most 2 activations on each pipeline rank at any time"
    assert sf.Schedule("mine", table).check(alive=3).alive == (3, 3)


def test_w_frees_an_activation_and_b_does_not() -> None:
    late = [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1), ("W", 0, 0), ("W", 0, 1)]]
    soon = [[("F", 0, 0), ("B", 0, 0), ("W", 0, 0), ("F", 0, 1), ("B", 0, 1), ("W", 0, 1)]]
    assert sf.Schedule("late", late).check().alive == (2,)
    assert sf.Schedule("soon", soon).check().alive == (1,)


def test_times_are_those_of_the_costs() -> None:
    schedule = sf.Schedule("one", [f_b(0), f_b(1)])
    price = schedule.check(costs={"F": 2, "B": 3, "W": 4})
    assert (price.time, price.busy, price.idle) == (18, (9, 9), 0.5)
    assert schedule.check(costs={"F": 2, "BW": 5}).time == 14
    assert schedule.check(costs={"F": 0, "BW": 0}).idle == 0


COSTS: dict[str, tuple[dict[str, float], str]] = {
    "one is missing": ({"F": 1, "B": 1}, "costs lack W"),
    "all are missing": ({}, "costs lack B\n  costs lack F\n  costs lack W"),
    "one is unknown": ({"F": 1, "BW": 1, "X": 1}, "costs have 'X'"),
}


@pytest.mark.parametrize("case", COSTS)
def test_costs_are_those_of_the_kinds_of_a_schedule(case: str) -> None:
    costs, said = COSTS[case]
    with pytest.raises(
        sf.ScheduleError, match=f"^Schedule.check, costs: {said}\n  needed: the time"
    ):
        sf.Schedule("one", [f_b(0)]).check(costs=costs)


@pytest.mark.parametrize("option", ["stages", "on_the_way", "alive"])
def test_options_are_counts_from_one(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(sf.ShardError, match=f"^Schedule.check, {option}: {option} is 0, a int"):
        sf.Schedule("one", [f_b(0)]).check(**options)


# An oracle that shares no code with the package: coordinates as processes with bounded boxes.


def needs(action: tuple[str, int, int], stages: int) -> Iterator[tuple[str, int, int]]:
    kind, s, k = action
    if kind == "F" and s > 0:
        yield "F", s - 1, k
    if kind in ("B", "BW"):
        yield "F", s, k
        if s + 1 < stages:
            yield "B", s + 1, k
    if kind == "W":
        yield "B", s, k


def runs(table: Table, stages: int, room: int, pick: Callable[[list[Any]], Any]) -> bool:
    """Whether the coordinates reach the ends of their rows, if messages arrive at random times and
    no more than `room` of them are between two coordinates.
    """
    home = {s: c for c, row in enumerate(table) for _, s, _ in row}
    here: list[set[tuple[str, int, int]]] = [set() for _ in table]
    boxes: dict[tuple[int, int], list[Any]] = {}  # sent; True once arrived
    unsent: list[deque[tuple[int, Any]]] = [deque() for _ in table]
    at = [0] * len(table)
    while True:
        moves: list[tuple[str, Any]] = []
        for c, row in enumerate(table):
            if unsent[c]:
                target, _ = unsent[c][0]
                if len(boxes.setdefault((c, target), [])) < room:
                    moves.append(("send", c))
            elif at[c] < len(row):
                absent = [x for x in needs(row[at[c]], stages) if x not in here[c]]
                if all([x, True] in boxes.get((home[x[1]], c), []) for x in absent):
                    moves.append(("run", c))
        moves += [("arrive", m) for box in boxes.values() for m in box if not m[1]]
        if not moves:
            return at == [len(row) for row in table]
        kind, what = pick(moves)
        if kind == "arrive":
            what[1] = True
        elif kind == "send":
            target, result = unsent[what].popleft()
            boxes[what, target].append([result, False])
        else:
            action = table[what][at[what]]
            for x in needs(action, stages):
                if x not in here[what]:
                    boxes[home[x[1]], what].remove([x, True])
                    here[what].add(x)
            kind, s, k = action
            results = [("B", s, k), ("W", s, k)] if kind == "BW" else [action]
            here[what].update(results)
            at[what] += 1
            reader = {"F": s + 1, "B": s - 1}.get(results[0][0], -1)
            if reader in range(stages) and home[reader] != what:
                unsent[what].append((home[reader], results[0]))


def is_once_each(table: Table, stages: int, microbatches: int) -> bool:
    """Whether each result is computed once, each stage on one coordinate."""
    results = [
        (part, s, k)
        for row in table
        for kind, s, k in row
        for part in (kind if kind != "F" else "F")
    ]
    every = {(kind, s, k) for kind in "FBW" for s in range(stages) for k in range(microbatches)}
    homes = {(s, c) for c, row in enumerate(table) for _, s, _ in row}
    return sorted(results) == sorted(every) and len(homes) == stages


def changed(table: Table, how: str, rng: random.Random) -> Table:
    """A table with two actions of a row swapped, or two neighbours, or one dropped, one doubled,
    or one moved to another coordinate.
    """
    rows = [row for row in table if len(row) > 1]
    if not rows:
        return table
    row = rng.choice(rows)
    i, j = rng.sample(range(len(row)), 2)
    if how == "exchange":
        i, j = max(i, 1), max(i, 1) - 1
    if how in ("swap", "exchange"):
        row[i], row[j] = row[j], row[i]
    elif how == "drop":
        del row[i]
    elif how == "double":
        row.insert(j, row[i])
    else:
        rng.choice(table).append(row.pop(i))
    return table


@settings(deadline=None)
@given(
    st.sampled_from(MAKERS),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["swap", "exchange", "exchange", "drop", "double", "move"]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_check_refuses_what_does_not_run_and_nothing_else(
    make: Callable[[int, int], sf.Schedule],
    n: int,
    m: int,
    how: str,
    times: int,
    room: int,
    rng: random.Random,
) -> None:
    schedule = make(n, m)
    table = table_of(schedule)
    for _ in range(times):
        table = changed(table, how, rng)
    broken = sf.Schedule("broken", table)
    right = is_once_each(table, schedule.stages, broken.microbatches) and runs(
        table, schedule.stages, room, rng.choice
    )
    try:
        broken.check(schedule.stages, on_the_way=room)
    except sf.ScheduleError:
        assert not right
    else:
        assert right


@pytest.mark.parametrize("make", MAKERS)
def test_the_oracle_runs_what_check_proves(make: Callable[[int, int], sf.Schedule]) -> None:
    rng = random.Random(7)
    for n, m in ((1, 3), (2, 5), (3, 4), (4, 7)):
        schedule = make(n, m)
        assert runs(table_of(schedule), schedule.stages, 1, rng.choice)
