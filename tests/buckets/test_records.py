"""The records of a bucket plan: bytes, rows, and options that travel as text."""

from __future__ import annotations

import attrs
import pytest

from shardfn.buckets.records import Bucket, Row, Wish, uneven

BUCKET = Bucket(
    index=3, kind="all_reduce", axis="dp", op="sum", dtype="float32", phase="backward",
    leaves=("v", "w"), sizes=(60, 40), cap=100, ready="mm", first_use="result",
)  # fmt: skip
ROW = Row(0, "all_reduce", "dp", "backward", "float32", 60, 100, 0, 1, "sum")


def test_a_bucket_is_over_its_cap_only_beyond_it() -> None:
    assert (BUCKET.nbytes, BUCKET.extended) == (100, False)
    assert attrs.evolve(BUCKET, cap=99).extended
    assert not attrs.evolve(BUCKET, riding=50).extended, "without small reductions"


@pytest.mark.parametrize(
    "wish",
    [
        Wish("w", 100, 10),
        Wish("layers['a'].w", 1, 1, True, "bfloat16", 7),
        Wish("w", 1, 1, rows=(ROW, ROW._replace(op=None))),
        Wish("w", 1, 1, rows=()),
    ],
)
def test_options_are_read_back_as_they_were_written(wish: Wish) -> None:
    assert Wish.of(wish.text) == wish


def test_a_row_is_told_by_its_collective() -> None:
    assert ROW.what == ("all_reduce", "dp", "backward")


def test_a_bucket_has_one_size_for_each_leaf() -> None:
    assert uneven([BUCKET]) is None
    wrong = attrs.evolve(BUCKET, sizes=(100,))
    assert uneven([BUCKET, wrong]) == "bucket 3 has 2 leaves and 1 sizes"
