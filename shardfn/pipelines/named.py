"""Pipeline schedules by name, for the number of stages of a program."""

from __future__ import annotations

from . import schedules
from .schedule import Schedule

# the public name of a schedule: the function of `sf.schedules` that makes it
NAMES = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved": "interleaved",
    "zero_bubble": "zero_bubble",
    "zbv": "zbv",
    "dualpipev": "dualpipev",
}


def schedule_of(text: str, coordinates: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule that a text says: the name of one, or its JSON.

    Args:
        text: of a schedule.
        coordinates: of the mesh axis.
        microbatches: slices of the batch.
        chunks: how many stages a coordinate has, for a schedule that takes any number.
    """
    if text not in NAMES:
        return Schedule.from_json(text)
    make = getattr(schedules, NAMES[text])
    if text == "interleaved":
        return make(coordinates, microbatches, chunks=chunks)
    return make(coordinates, microbatches)
