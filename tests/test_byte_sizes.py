"""Numbers of bytes as people write and read them, and the caps of buckets."""

from __future__ import annotations

from typing import Any

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import shardfn as sf
from shardfn.byte_sizes import bytes_of, check_caps, human_bytes

SIZES = {
    1: 1,
    "1": 1,
    "7B": 7,
    "512KB": 512_000,
    "25MB": 25_000_000,
    "2GB": 2 * 10**9,
    "1TB": 10**12,
    "1KiB": 1024,
    "1MiB": 2**20,
    "1GiB": 2**30,
    "1TiB": 2**40,
    "1.5KB": 1500,
    "0.5KiB": 512,
    "4.1MB": 4_100_000,
    "1.001KB": 1001,
    " 25 MB ": 25_000_000,
    10**20: 10**20,
}


@pytest.mark.parametrize("said", list(SIZES), ids=repr)
def test_a_size_is_a_number_or_text_in_thousands_or_1024s(said: int | str) -> None:
    assert bytes_of(said) == SIZES[said]


@given(
    st.integers(1, 10**15), st.sampled_from(["KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"])
)
@examples(50)
def test_a_size_written_in_words_is_exact(n: int, unit: str) -> None:
    base, power = (1024 if "i" in unit else 1000), "KMGT".index(unit[0]) + 1
    assert bytes_of(f"{n}{unit}") == n * base**power


UNREADABLE = [  # the last one is in Arabic digits
    "",
    "MB",
    "25mb",
    "25 M",
    "25XB",
    "1e6",
    "-1MB",
    "1_000",
    "1,5MB",
    "1..5MB",
    None,
    1.5,
    True,
    b"1MB",
    float("nan"),
    [1],
    "\u0663MB",
]


@pytest.mark.parametrize("said", UNREADABLE, ids=repr)
def test_what_is_no_number_of_bytes_is_refused(said: Any) -> None:
    with pytest.raises(ValueError) as error:
        bytes_of(said)
    assert str(error.value) == f"{said!r} is not a number of bytes"


@pytest.mark.parametrize("said", [0, -1, "0", "0MB", "0.0GiB", "0.4B"], ids=repr)
def test_a_size_that_is_not_positive_is_refused(said: Any) -> None:
    with pytest.raises(ValueError) as error:
        bytes_of(said)
    assert str(error.value) == f"{said!r} is not positive"


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 2**20, 25_000_000, 2**30, 2**43)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "23.8 MiB", "1.0 GiB", "8192.0 GiB",
    ]  # fmt: skip
    assert human_bytes(2**20 - 1) == "1.0 MiB", "never 1024.0 of a smaller unit"


def test_caps_as_numbers_with_the_first_one_at_most_one_mebibyte() -> None:
    assert check_caps("f", ("25MB", None, "1GiB")) == (25_000_000, 2**20, 2**30)
    assert check_caps("f", (100, None, 7)) == (100, 100, 7)


@pytest.mark.parametrize(
    ("caps", "text"),
    [
        ((0, None, 1), "f, cap: 0 is not positive"),
        (("9MB", "big", 1), "f, first_cap: 'big' is not a number of bytes"),
        ((9, 9, -1), "f, max_in_flight: -1 is not positive"),
        (("1KB", "1KiB", 1), "f, first_cap: first_cap '1KiB' is above cap '1KB'"),
    ],
)
def test_a_cap_that_cannot_be_is_refused_by_its_name(caps: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        check_caps("f", caps)
    assert str(caught.value).startswith(text)
