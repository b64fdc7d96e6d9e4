"""The data flow of a plan, and the collectives that its steps need."""

from __future__ import annotations

import torch

from shardfn.schedule.flow import flow
from shardfn.types import Marks
from tests.support.stages.plans import LOSS_ARGS, data_parallel, gradient_step, planned


def read(plan):
    return flow(plan, [None] * len(plan.outs))


def test_a_reduction_belongs_to_its_gradient_and_any_other_to_none() -> None:
    found = read(data_parallel())
    sent = [t for ts in found.transfers.values() for t in ts]
    assert [(t.kind, t.axis, t.op, t.nbytes) for t in sent] == [
        ("all_reduce", "a", "sum", 64),
        ("all_reduce", "a", "sum", 64),
        ("all_reduce", "a", "sum", 4),
    ]
    assert [t.wish and t.wish.leaf for t in sent] == ["w", "v", None]
    assert [t.phase for t in sent] == ["backward", "backward", "forward"]
    assert all(t.reduces for t in sent)


def test_a_gather_belongs_to_its_parameter_even_where_it_is_transposed() -> None:
    ins: list[Marks] = [(0,), (0,), (0,)]
    backward = ["t", "mm_2", "t_1", "t_2", "mm_3", "mm_4"]
    plan = planned(gradient_step(), LOSS_ARGS, ins, [("R",), (0,), (0,)], backward=backward)
    found = read(plan)
    sent = [t for ts in found.transfers.values() for t in ts]
    gathers = [(t.wish and t.wish.leaf, t.phase) for t in sent if t.kind == "all_gather"]
    assert gathers == [("v", "forward"), ("w", "forward"), ("w", "backward")]


def test_the_dtype_of_a_reduction_is_that_of_its_options() -> None:
    found = read(data_parallel(reduce_dtype="bfloat16"))
    sent = [t for ts in found.transfers.values() for t in ts]
    assert [(t.dtype, t.nbytes) for t in sent] == [
        (torch.bfloat16, 32),
        (torch.bfloat16, 32),
        (torch.float32, 4),
    ]


def test_sources_and_readers_are_two_sides_of_one_relation() -> None:
    found = read(data_parallel())
    for step, readers in found.readers.items():
        assert all(step in found.sources(reader) for reader in readers)
    edges = sum(len(readers) for readers in found.readers.values())
    assert edges == sum(len(found.sources(i)) for i in found.readers)


def test_a_transposed_input_is_only_rearranged() -> None:
    found = read(data_parallel())
    named = {step.node.name: i for i, step in enumerate(found.plan.steps)}
    assert found.rearranges_input(named["t_2"]), "w.t()"
    assert not found.rearranges_input(named["t"]), "h.t(), which is computed"
    assert not found.rearranges_input(named["mm"])


def test_axes_of_one_rank_send_nothing() -> None:
    ins: list[Marks] = [("R",), ("R",), (0,)]
    plan = planned(gradient_step(), LOSS_ARGS, ins, sizes=(1,))
    assert read(plan).transfers == {}
