"""Where a rank's own rows are."""

from __future__ import annotations

import pytest

from shardfn.partition.propagation.sorted_rows.kinds import Own
from shardfn.types import Mark


@pytest.mark.parametrize(
    ("own", "elements", "mark"),
    [
        (Own(1), 0, 1),
        (Own(1), (0, 6), (1, 6)),
        (Own(0, 2), (0, 6), (0, 3)),
        (Own(0, 2), (0, 2), 0),
        (Own(0, 2), 0, 0),  # even shards are told without a unit
        (Own(2, 3), (0, 6, 4), (2, 2, 4)),
    ],
)
def test_rows_of_several_elements_are_sharded_in_smaller_units(
    own: Own, elements: Mark, mark: Mark
) -> None:
    assert own.mark(elements) == mark
