"""bucket, before and after in text: one collective for the leaves of a bucket."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from shardfn import schedule
from shardfn.partition import Plan, emit
from shardfn.types import Marks
from tests.support.stages.local_graphs import same_text, text
from tests.support.stages.plans import LOSS_ARGS, data_parallel, gradient_step, planned


def sent(plan: Plan) -> tuple[str, str]:
    """The text of rank 0 before the pass and after it, without the ops that compute."""
    agenda = schedule.agenda(plan, "f")
    names = tuple(f"group:{a}" for a in plan.axes.names)
    graph = emit(plan, (0,) * len(names), names, "cpu")
    after = schedule.bucket(graph, agenda)
    schedule.check(after, plan.axes)
    return _of_collectives(text(graph, plan.axes)), _of_collectives(text(after, plan.axes))


def _of_collectives(lines: str) -> str:
    skipped = ("= mm(", "= t(", "= cos(", "= sin(", "= sum(")
    return "\n".join(line for line in lines.splitlines() if not any(s in line for s in skipped))


def test_gradients_and_the_loss_are_reduced_as_one() -> None:
    before, after = sent(data_parallel())
    assert before.count("all_reduce[sum, a]") == 3
    same_text(
        after,
        """
        %pack = pack([%mm_2, %sum, %mm_4]): f32[33]
        %all_reduce = all_reduce[sum, a](%pack): f32[33] 132 B
        %wait_tensor = wait_tensor(%all_reduce): f32[33]
        %slice = slice(%wait_tensor, 0, 0, 16): f32[16]
        %view = view(%slice, [4, 4]): f32[4, 4]
        %slice_1 = slice(%wait_tensor, 0, 16, 17): f32[1]
        %view_1 = view(%slice_1, []): f32[]
        %slice_2 = slice(%wait_tensor, 0, 17, 33): f32[16]
        %view_2 = view(%slice_2, [4, 4]): f32[4, 4]
        return %view_1, %view, %view_2
        """,
    )


def test_a_bucket_of_one_leaf_stays_as_it_is() -> None:
    ins: list[Marks] = [("R",), ("R",), (0,)]
    fn = lambda *args: gradient_step(1)(*args)[1:]
    plan = planned(fn, LOSS_ARGS, ins, [("R",), ("R",)])
    before, after = sent(plan)
    assert before == after and "pack" not in after


def test_a_bucket_is_reduced_in_another_dtype_if_asked_to() -> None:
    _, after = sent(data_parallel(reduce_dtype="bfloat16"))
    assert "all_reduce[sum, a](%pack): bf16[32] 64 B" in after, "gradients alone"
    assert "all_reduce[sum, a](%sum): f32[] 4 B" in after


def sharded(cap: int) -> Plan:
    """The plan with parameters sharded on rows: gathers, and reductions to shards."""
    ins: list[Marks] = [(0,), (0,), (0,)]
    outs: list[Any] = [("R",), (0,), (0,)]
    return planned(
        gradient_step(cap),
        LOSS_ARGS,
        ins,
        outs,
        backward=["t", "mm_2", "t_1", "t_2", "mm_3", "mm_4"],
    )


def test_a_reduce_scatter_packs_the_rows_of_each_rank_together() -> None:
    """A row of the buffer for each rank, with its part of each leaf."""
    before, after = sent(sharded(10**6))
    assert before.count("reduce_scatter[sum, a]") == 2
    assert after.count("reduce_scatter[sum, a]") == 1
    packed = [line.split(": ")[1] for line in after.splitlines() if "= cat(" in line]
    assert packed == ["f32[2, 16]"]


def test_buckets_know_their_number_and_their_batch() -> None:
    plan = data_parallel(cap=1)
    agenda = schedule.agenda(plan, "f")
    graph = schedule.bucket(emit(plan, (0,), ("group:a",), "cpu"), agenda)
    starts = [n for n in graph.nodes if "collective" in n.meta]
    assert [n.meta["collective"].bucket for n in starts] == [0, 1]
    assert [n.meta["batch"] for n in starts] == [0, 1]


def test_a_graph_without_batches_of_several_is_left_alone() -> None:
    plan = data_parallel()
    agenda = schedule.agenda(plan, "f")
    alone = attrs.evolve(
        agenda,
        members=tuple((key,) for key in agenda.batch_of),
        batch_of={key: i for i, key in enumerate(agenda.batch_of)},
        bucket_of={},
    )
    graph = emit(plan, (0,), ("group:a",), "cpu")
    assert text(schedule.bucket(graph, alone), plan.axes) == text(graph, plan.axes)


@pytest.mark.parametrize("coordinate", [0, 1])
def test_ranks_pack_alike(coordinate: int) -> None:
    plan = sharded(10**6)
    agenda = schedule.agenda(plan, "f")
    graph = emit(plan, (coordinate,), ("group:a",), "cpu")
    mine = text(schedule.bucket(graph, agenda), plan.axes)
    first = emit(plan, (0,), ("group:a",), "cpu")
    assert mine == text(schedule.bucket(first, agenda), plan.axes)
    assert isinstance(graph, torch.fx.Graph)
