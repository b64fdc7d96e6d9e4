"""A schedule prints as a grid, and draws as a picture."""

from __future__ import annotations

from xml.etree import ElementTree

import shardfn as sf

SVG = "{http://www.w3.org/2000/svg}"
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
    assert note.startswith("it does not run to its end")


def boxes(schedule: sf.Schedule) -> dict[str, dict[str, str]]:
    """Each action's rectangle in the picture of a schedule."""
    picture = ElementTree.fromstring(schedule._repr_html_())
    groups = picture.iter(f"{SVG}g")
    return {
        group.findtext(f"{SVG}title", ""): rect.attrib
        for group in groups
        for rect in group.iter(f"{SVG}rect")
    }


def test_a_picture_has_a_box_for_each_action() -> None:
    schedule = sf.schedules.zbv(2, 3)
    assert sorted(boxes(schedule)) == sorted(str(x) for row in schedule.table for x in row)


def test_a_picture_has_a_colour_for_each_kind_and_a_shade_for_each_microbatch() -> None:
    found = boxes(sf.schedules.zero_bubble(1, 2))
    hues = {name: box["fill"].split(",")[0] for name, box in found.items()}
    assert hues["F0.0"] == hues["F0.1"]
    assert len({hues["F0.0"], hues["B0.0"], hues["W0.0"]}) == 3
    assert len({box["fill"] for box in found.values()}) == 6


def test_a_box_is_as_wide_as_its_time_and_in_the_row_of_its_coordinate() -> None:
    found = boxes(sf.schedules.gpipe(2, 1))
    assert float(found["BW0.0"]["width"]) == 2 * float(found["F0.0"]["width"])
    assert float(found["F1.0"]["x"]) == float(found["F0.0"]["x"]) + float(found["F0.0"]["width"])
    assert float(found["F1.0"]["y"]) > float(found["F0.0"]["y"])


def test_a_picture_of_one_that_does_not_run_says_so_and_names_are_text() -> None:
    picture = BROKEN._repr_html_()
    assert "a&lt;b: 2 coordinates" in picture and "does not run to its end" in picture
    assert set(boxes(BROKEN)) == {"BW0.0", "F0.0", "F1.0"}
