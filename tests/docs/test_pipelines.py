"""The page of pipelines prints what the code measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardfn as sf
from tests.support.reading.source import ROOT

PAGE = Path(ROOT, "docs", "pipelines.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\d) \| (yes|no) \| ([\d, ]+)(?: halves)? \| (\d+)", re.MULTILINE)


def test_the_table_has_every_schedule() -> None:
    assert sorted(row[0] for row in ROW.findall(PAGE)) == sorted(sf.schedules.__all__)


@pytest.mark.parametrize("name", sf.schedules.__all__)
def test_a_row_of_the_table_is_measured(name: str) -> None:
    schedule = getattr(sf.schedules, name)(4, 16)
    price = schedule.check(schedule.stages)
    half = " halves" if schedule.stages == 8 else ""
    (waits,) = {price.time - busy for busy in price.busy}
    cells = [
        f"`{name}`",
        str(schedule.stages),
        "yes" if schedule.parts else "no",
        ", ".join(map(str, price.alive)) + half,
        f"{waits:.0f}{half}",
        f"{price.idle:.1%}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_the_printed_schedule_and_error_are_those_of_the_code() -> None:
    assert f"```\n{sf.schedules.one_f_one_b(3, 4)}\n```" in PAGE
    rows = [
        [("F", 0, 0), ("F", 0, 1), ("BW", 0, 0), ("BW", 0, 1)],
        [("F", 1, 1), ("F", 1, 0), ("BW", 1, 0), ("BW", 1, 1)],
    ]
    with pytest.raises(sf.ScheduleError) as error:
        sf.Schedule("another order", rows).check(2)
    assert f"```\n{error.value}\n```" in PAGE
