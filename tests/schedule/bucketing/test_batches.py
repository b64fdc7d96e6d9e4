"""Batches: what depends on what, and the order of a given plan."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.buckets import Wish
from shardfn.schedule.bucketing.batches import Batch, follow, reaches, sort_leaves
from shardfn.schedule.flow import Transfer


def transfer(leaf: str, kind: str = "all_reduce", phase: str = "backward") -> Transfer:
    wish = Wish(leaf, 1, 1) if leaf else None
    return Transfer(leaf or "loss", kind, "a", "sum", torch.float32, 4, phase, 0, wish, "0")


def batch(index: int, *leaves: str, wanted: int | None = None, depends: int = 0) -> Batch:
    members = [transfer(leaf) for leaf in leaves]
    return Batch(index, members, depends, wanted=wanted)


def names(batches) -> list[list[str]]:
    return [[t.key for t in b.members] for b in batches]


def test_a_batch_is_reached_through_others() -> None:
    batches = [batch(0, "a"), batch(1, "b", depends=0b1), batch(2, "c", depends=0b10)]
    chained = 0b110
    assert reaches(batches, chained, 0b100, batches[0])
    assert not reaches(batches, chained, 0b1, batches[2])
    assert not reaches(batches, chained, 0, batches[0])


def test_leaves_are_sorted_around_small_reductions() -> None:
    mixed = Batch(0, [transfer("b"), transfer(""), transfer("a")])
    sort_leaves(mixed, lambda t: t.key)
    assert [t.key for t in mixed.members] == ["a", "loss", "b"]
    assert mixed.bucketed and mixed.reduces and len(mixed.leaves) == 2


def test_a_plan_in_the_order_of_the_program_changes_nothing() -> None:
    batches = [batch(0, "a", wanted=0), batch(1, "b", wanted=1)]
    followed, after = follow(batches, {"a": 0, "b": 0}, "f")
    assert names(followed) == [["a"], ["b"]] and after == {}


def test_a_plan_in_another_order_chains_the_batches() -> None:
    batches = [batch(0, "a", wanted=1), batch(1, "b", wanted=0), batch(2, "c")]
    followed, after = follow(batches, {"a": 0, "b": 0}, "f")
    assert names(followed) == [["b"], ["a"], ["c"]]
    assert [b.index for b in followed] == [0, 1, 2]
    assert after == {1: 0}, "a starts after b"


def test_the_leaves_of_a_bucket_take_their_places() -> None:
    batches = [batch(0, "a", "b", "c", wanted=0)]
    followed, _ = follow(batches, {"a": 2, "b": 0, "c": 1}, "f")
    assert names(followed) == [["b", "c", "a"]]


def test_gathers_of_two_phases_have_no_order_among_each_other() -> None:
    gather = lambda leaf, phase: [transfer(leaf, "all_gather", phase)]
    batches = [
        Batch(0, gather("a", "forward"), wanted=1),
        Batch(1, gather("b", "backward"), wanted=0),
    ]
    _, after = follow(batches, {"a": 0, "b": 0}, "f")
    assert after == {}


def test_dependencies_are_numbered_with_the_batches() -> None:
    batches = [batch(0, "a", wanted=1), batch(1, "b", wanted=0), batch(2, "c", depends=0b1)]
    followed, _ = follow(batches, {"a": 0, "b": 0}, "f")
    assert followed[2].depends == 0b10, "still on a"


def test_a_bucket_before_one_on_which_it_depends_is_refused() -> None:
    batches = [batch(0, "a", wanted=1), batch(1, "b", wanted=0, depends=0b1)]
    with pytest.raises(sf.TreeError) as caught:
        follow(batches, {"a": 0, "b": 0}, "f")
    text = str(caught.value)
    assert "f, plan" in text
    assert "the bucket of b stands before that of a, on which it depends" in text
