"""The agenda: what shares a bucket, and in which order all runs, equal for equal plans."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import shardfn as sf
from shardfn.schedule.agenda import agenda, all_gradients, rewished
from tests.support.stages.plans import data_parallel

PLAN = data_parallel()


def leaves(plan: Any) -> list[tuple[str, ...]]:
    return [bucket.leaves for bucket in agenda(plan, "f").plan.buckets]


def test_the_cap_closes_buckets() -> None:
    assert leaves(PLAN) == [("w", "v")]
    assert leaves(data_parallel(cap=64)) == [("w",), ("v",)]


def test_every_transfer_is_in_one_batch_that_starts_and_is_waited_for_once() -> None:
    told = agenda(data_parallel(cap=1), "f")
    members = [key for batch in told.members for key in batch]
    assert sorted(map(str, members)) == sorted(map(str, told.batch_of))
    numbers = list(range(len(told.members)))
    for kind in ("start", "wait"):
        assert sorted(i for k, i in told.sequence if k == kind) == numbers
    assert sorted(told.starts) == numbers


def test_a_step_runs_after_what_it_reads() -> None:
    plan = data_parallel(cap=1)
    told = agenda(plan, "f")
    position = {item: i for i, item in enumerate(told.sequence)}
    made: dict[int, Any] = {}
    for i, step in enumerate(plan.steps):
        made.update((slot.number, i) for slot in step.made)
        for slot in step.read:
            if ("run", i) in position and slot.number in made:
                assert position["run", made[slot.number]] < position["run", i]


def test_other_caps_make_other_buckets_of_the_same_plan() -> None:
    assert leaves(rewished(PLAN, "f", 1, None, None)) == [("w",), ("v",)]
    assert rewished(PLAN, "f", None, None, None) is PLAN
    assert {g.wish.cap for g in all_gradients(PLAN)} == {10**6}, "left as it was"


def test_a_plan_that_is_given_back_is_followed() -> None:
    two = agenda(rewished(PLAN, "f", 1, None, None), "f").plan
    assert leaves(rewished(PLAN, "f", None, None, two)) == [("w",), ("v",)]
    swapped = rewished(PLAN, "f", None, None, two.merge(0, 1))
    assert leaves(swapped) == [("w", "v")]


REFUSED = {
    "a size that is none": (("big", None, None), "'big' is not a number of bytes"),
    "a first cap above": ((10, 20, None), "first_cap 20 is above cap 10"),
    "no plan": ((None, None, "plan"), "f, plan: a str"),
    "caps and a plan": ((1, None, agenda(PLAN, "f").plan), "lower is given caps and a plan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_fit_are_refused(case: str) -> None:
    options, text = REFUSED[case]
    with pytest.raises(sf.ShardError) as caught:
        rewished(PLAN, "f", *options)
    assert text in str(caught.value)


def test_a_plan_with_collectives_that_the_program_does_not_send_is_refused() -> None:
    given = agenda(PLAN, "f").plan
    rows = [attrs.evolve(bucket, axis="z") for bucket in given.buckets]
    other = attrs.evolve(given, buckets=tuple(rows))
    with pytest.raises(sf.TreeError) as caught:
        agenda(rewished(PLAN, "f", None, None, other), "f")
    assert "w has an all_reduce over a in the backward" in str(caught.value)
