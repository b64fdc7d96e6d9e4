"""A schedule prints as a grid."""

from __future__ import annotations

import shardfn as sf

BROKEN = sf.Schedule("a<b", [[("BW", 0, 0), ("F", 0, 0)], [("F", 1, 0)]])


def test_a_grid_has_a_row_for_each_coordinate_and_a_column_for_each_unit() -> None:
    assert str(sf.schedules.one_f_one_b(2, 2)) == "\n".join([
        "one_f_one_b: 2 coordinates, 2 stages, 2 microbatches",
        "  0 | F0.0  F0.1  .     .     BW0.0 -     .     BW0.1 -",
        "  1 | .     F1.0  BW1.0 -     F1.1  BW1.1 -     .     .",
    ])  # fmt: skip


def test_parted_gradients_take_a_unit_each() -> None:
    assert str(sf.schedules.zero_bubble(2, 2)).split("\n")[1:] == [
        "  0 | F0.0 F0.1 .    B0.0 W0.0 B0.1 W0.1",
        "  1 | .    F1.0 B1.0 F1.1 B1.1 W1.0 W1.1",
    ]


def test_a_long_grid_ends_in_dots() -> None:
    row = str(sf.schedules.gpipe(1, 100)).split("\n")[1]
    assert row.endswith("BW0.9  - ...")
    assert row.count("F0.") == 100 and row.count("BW0.") == 10


def test_a_schedule_that_does_not_run_prints_row_by_row() -> None:
    title, first, second, note = str(BROKEN).split("\n")
    assert title == "a<b: 2 coordinates, 2 stages, 1 microbatches"
    assert (first, second) == ("  0 | BW0.0 -     F0.0", "  1 | F1.0  .     .")
    assert note.startswith("the schedule deadlocks")


def test_a_grid_of_one_that_does_not_run_says_so() -> None:
    assert "the schedule deadlocks" in str(BROKEN)
