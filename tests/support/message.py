"""The text of an error, apart from the user's line in it."""

from __future__ import annotations

import os

TESTS = os.path.dirname(os.path.dirname(__file__))


def without_line(error: BaseException) -> str:
    """An error's text without its `at:` line, which must name a line of the tests."""
    lines = str(error).split("\n")
    places = [line.removeprefix("  at: ") for line in lines if line.startswith("  at: ")]
    assert all(place.startswith(TESTS) for place in places), places
    return "\n".join([line for line in lines if not line.startswith("  at: ")])
