"""The plan of a save: each chunk is written once, and what ranks exchange is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shardfn._compat.distributed.checkpoint_plans import Held
from shardfn.checkpoints import plan


def _held(name: str, start: int, stop: int) -> Held:
    return Held(name, (start,), (stop - start,), (6,), torch.float16)


def test_a_rank_is_understood_by_another() -> None:
    chunks = [_held("w", 0, 3), Held("n", (), (), (), torch.int64)]
    assert plan.heard(json.loads(json.dumps(plan.told(chunks)))) == chunks


def test_each_chunk_is_written_once_and_all_ranks_write() -> None:
    both = [_held(name, 0, 6) for name in "ab"]
    half = [[_held("c", 0, 3)], [_held("c", 3, 6)]]
    places, chunks = plan.written([both + half[0], both + half[1]])
    assert places == [[0, 2], [1, 2]]
    assert [(x.name, x.offsets, x.part) for x in chunks] == [
        ("a", (0,), 0), ("c", (0,), 0), ("b", (0,), 1), ("c", (3,), 1),
    ]  # fmt: skip
    own = list(zip(both + half[1], torch.ones(3), strict=True))
    assert [x for x, _ in plan.numbered(own, places[1], 1)] == chunks[2:]


@pytest.mark.parametrize(
    "row",
    [
        ["w", [0], [-3], [6], "float16"],
        ["w", [0], [3], [6], "save"],
        ["w", [0], [3], [6]],
        ["w", 0, [3], [6], "float16"],
        3,
    ],
    ids=str,
)
def test_something_else_is_refused(row: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        plan.heard([row])


def test_chunks_that_leave_a_part_are_refused() -> None:
    with pytest.raises(ValueError, match="Failed to validate"):
        plan.written([[_held("w", 0, 3)], [_held("w", 4, 6)]])
