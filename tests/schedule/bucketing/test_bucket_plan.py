"""The plan as the user sees it: every collective on the way to a gradient, and the leaves
without one.
"""

from __future__ import annotations

from shardfn.schedule import agenda
from shardfn.schedule.bucketing.bucket_plan import line_of
from shardfn.types import Marks
from tests.support.stages.plans import LOSS_ARGS, data_parallel, gradient_step, planned


def test_a_bucket_says_what_is_sent_when_and_for_whom() -> None:
    plan = agenda(data_parallel(), "f").plan
    (bucket,) = plan.buckets
    assert (plan.name, plan.mesh) == ("f", "(a=2)")
    assert (bucket.leaves, bucket.sizes) == (("w", "v"), (64, 64))
    assert (bucket.kind, bucket.axis, bucket.op) == ("all_reduce", "a", "sum")
    assert (bucket.dtype, bucket.phase) == ("float32", "backward")
    assert bucket.ready == "mm_4, model.py:mm_4", "the last of its gradients"
    assert bucket.riding == 4, "the loss"
    assert (bucket.inside, bucket.times) == ("", 1)


def test_an_ignored_leaf_is_sent_outside_of_buckets() -> None:
    plan = agenda(data_parallel(ignored=True), "f").plan
    assert plan.buckets == () and plan.ignored == ("w", "v")
    assert [u.leaves for u in plan.unbucketed] == [("w",), ("v",)]
    assert [u.nbytes for u in plan.unbucketed] == [64, 64]


def test_a_leaf_for_which_nothing_is_sent_is_local() -> None:
    ins: list[Marks] = [("R",)] * 3
    plan = agenda(planned(gradient_step(), LOSS_ARGS, ins), "f").plan
    assert plan.buckets == () and plan.local == ("w", "v")


def test_buckets_are_numbered_as_they_are_filled() -> None:
    plan = agenda(data_parallel(cap=1), "f").plan
    assert [(b.index, b.leaves) for b in plan.buckets] == [(0, ("w",)), (1, ("v",))]


def test_a_line_is_the_file_and_not_its_folder() -> None:
    node = data_parallel().steps[0].node
    node.meta["source"] = "/home/me/model.py:7"
    assert line_of("mm", node) == "mm, model.py:7"
    node.meta["source"] = None
    assert line_of("mm", node) == "mm"
