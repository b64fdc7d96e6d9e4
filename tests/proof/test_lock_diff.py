"""Differences between two prices as text, for prices that are written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shardfn.collectives import COLLECTIVES
from shardfn.proof.locks.lock_diff import TOLERANCES, Differences, differences
from shardfn.proof.locks.lock_file import Bucket, Price, Sent
from shardfn.proof.locks.source_lines import SourceLines

LINE = "train.py::step::x = f(y)"
PLACES = {LINE: "train.py:41"}


def compared(old: Price, new: Price, **tolerances: float) -> Differences:
    lines = SourceLines(str(Path(__file__).parent / "locks"))
    return differences(old, new, lines, PLACES, {**TOLERANCES, **tolerances})


def lines(old: Price, new: Price, **tolerances: float) -> tuple[str, ...]:
    return compared(old, new, **tolerances).lines


def sending(what: str, *sent: int, **more: Any) -> Price:
    """A price of one line that sends something, beside one that stays."""
    rows = {f"{LINE} -> {what}": Sent(*sent)} if sent else {}
    return Price(collectives=rows, ops={LINE: {"mm": 1}}, torch="2.13", device="cpu", **more)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_kind_of_collective_has_a_verb(kind: str) -> None:
    verb = COLLECTIVES[kind].verb
    nothing, some = sending(""), sending(f"{kind}[tp]", 1, 2254857830)
    assert lines(nothing, some) == (f"train.py:41 now {verb} 2.1 GiB over tp (was 0)",)
    assert lines(some, nothing) == (f"train.py:41 no longer {verb} over tp (was 2.1 GiB)",)


def test_verbs_are_different() -> None:
    verbs = [row.verb for row in COLLECTIVES.values()]
    assert len({*verbs}) == len(verbs)


MESSAGES = {
    "a reduction": (
        ("all_reduce[max, dp]", 1, 8), ("all_reduce[max, dp]", 1, 16),
        "train.py:41 now reduces 16 B over dp (max) (was 8 B)",
    ),
    "a sum": (
        ("all_reduce[sum, dp]", 1, 8), ("all_reduce[sum, dp]", 1, 16),
        "train.py:41 now reduces 16 B over dp (was 8 B)",
    ),
    "another number": (
        ("all_gather[dp]", 2, 8), ("all_gather[dp]", 1, 8),
        "train.py:41 now gathers 8 B in 1 collective over dp (was 8 B in 2 collectives)",
    ),
    "nearly equal bytes": (
        ("all_gather[dp]", 1, 2**20), ("all_gather[dp]", 1, 2**20 + 4),
        "train.py:41 now gathers 1,048,580 B over dp (was 1,048,576 B)",
    ),
    "nobody asked": (
        ("all_gather[dp]", 1, 8, 0), ("all_gather[dp]", 1, 8, 1),
        "train.py:41 now gathers 8 B over dp, implicit (was 8 B)",
    ),
    "a kind of a later version": (
        ("broadcast[dp]", 1, 8), ("broadcast[dp]", 1, 16),
        "train.py:41 now runs broadcast of 16 B over dp (was 8 B)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_line_sends_is_said_with_what_it_sent(name: str) -> None:
    old, new, message = MESSAGES[name]
    assert lines(sending(*old), sending(*new)) == (message,)
    assert lines(sending(*new), sending(*new)) == ()


def test_a_collective_without_a_line_is_named_by_what_it_is_for() -> None:
    old = Price(collectives={"result -> all_reduce[sum, dp]": Sent(1, 4)})
    new = Price(collectives={"result -> all_reduce[sum, dp]": Sent(1, 8)})
    assert lines(old, new) == ("the result now reduces 8 B over dp (was 4 B)",)


def bucket(n: int, first: str, at: str = "") -> Bucket:
    return Bucket("all_reduce[sum, dp]", "float32", n, 1, first, first, at)


def test_buckets_are_compared_in_order_and_by_their_leaves() -> None:
    a, b, c = bucket(8, "a"), bucket(8, "b"), bucket(8, "c", "ready at mm, train.py:41")
    assert lines(Price(buckets=(a, b)), Price(buckets=(a, b))) == ()
    assert lines(Price(buckets=(a, b)), Price(buckets=(b, a))) == (
        "the order of buckets has changed",
    )
    assert lines(Price(buckets=(a, b)), Price(buckets=(a, c))) == (
        "bucket 1, ready at mm, train.py:41, is now all_reduce[sum, dp] of 8 B in float32, "
        "1 leaf: c",
        "bucket 1 was all_reduce[sum, dp] of 8 B in float32, 1 leaf: b",
    )
    assert lines(Price(buckets=(a, b)), Price(buckets=(a, c)), collectives=0.1) == ()
    assert lines(Price(buckets=(a, b)), Price(buckets=(a,)), collectives=0.1)[0] == (
        "1 bucket of all_reduce[sum, dp] (was 2)"
    )
    assert lines(Price(buckets=(a,)), Price(buckets=(bucket(9, "a"),)), bytes=0.2) == ()
    assert lines(Price(buckets=(a,)), Price(buckets=(bucket(9, "a"),)), bytes=0.1) != ()


def test_figures_may_vary_by_their_share_in_either_direction() -> None:
    old = Price(peak_bytes={"step": 1000}, ms={"step": 10.0}, hardware="H100")
    for factor in (0.96, 1.04):
        new = Price(
            peak_bytes={"step": int(1000 * factor)}, ms={"step": 10 * factor}, hardware="H100"
        )
        assert lines(old, new) == ()
    more = Price(peak_bytes={"step": 1060}, ms={"step": 8.8}, hardware="H100")
    assert lines(old, more) == (
        "the peak is 1.0 KiB (was 1000 B, 6% more; 5% is allowed)",
        "the predicted time on H100 is 8.8 ms (was 10 ms, 12% less; 10% is allowed)",
    )
    assert lines(old, more, peak_bytes=math.inf, ms=0.2) == ()
    stages = Price(peak_bytes={"step": 1000, "backward": 8}, ms={"step": 10.0}, hardware="H100")
    assert lines(old, stages) == ("the peak of the backward is 8 B, and was not known",)
    assert lines(stages, old) == ("the peak of the backward is no longer known",)


def test_what_a_shortened_lock_lacks_is_not_compared_and_said() -> None:
    new = sending("all_gather[dp]", 1, 8, peak_bytes={"step": 3})
    result = compared(Price(peak_bytes={"step": 3}), new)
    assert result.lines == ()
    assert result.notes == ("the lock file has no entry for device, torch, collectives, ops",)


def test_many_differences_of_a_kind_are_counted() -> None:
    new = Price(arguments={f"w{chr(97 + i)}": "f32[3]" for i in range(15)})
    found = lines(Price(arguments={}), new)
    assert found[0] == "argument wa is f32[3], was absent"
    assert len(found) == 13 and found[-1] == "and 3 more lines of this kind"


def test_layers_with_one_difference_are_one_line() -> None:
    old = {f"layers[{i}]['w']": "f32[3]" for i in range(4)}
    new = dict.fromkeys(old, "f32[3@tp]")
    assert lines(Price(results=old), Price(results=new)) == (
        "layers[*]['w'], 4 of them, are f32[3@tp], were f32[3]",
    )
    new["layers[3]['w']"] = "f32[3]"
    assert lines(Price(results=old), Price(results=new)) == (
        "layers[*]['w'], 3 of them, are f32[3@tp], were f32[3]",
    )
