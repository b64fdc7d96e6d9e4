"""overlap: the same nodes in the order of the agenda."""

from __future__ import annotations

import attrs

from shardfn import schedule
from shardfn.partition import emit
from tests.support.stages.local_graphs import text
from tests.support.stages.plans import data_parallel


def bucketed(cap: int):
    plan = data_parallel(cap)
    agenda = schedule.agenda(plan, "f")
    graph = schedule.bucket(emit(plan, (0,), ("group:a",), "cpu"), agenda)
    return plan, agenda, graph


def names(graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op == "call_function"]


def test_the_first_reduction_starts_before_the_second_gradient_is_computed() -> None:
    plan, agenda, graph = bucketed(cap=1)
    after = schedule.overlap(graph, agenda)
    schedule.check(after, plan.axes)
    order = [line.split(" ")[0] for line in text(after, plan.axes).splitlines()]
    at = order.index
    assert at("%all_reduce") < at("%mm_4") < at("%all_reduce_1") < at("%wait_tensor")


def test_no_node_is_added_or_lost() -> None:
    _, agenda, graph = bucketed(cap=1)
    after = schedule.overlap(graph, agenda)
    assert sorted(names(after)) == sorted(names(graph)) != names(after)


def test_an_agenda_in_another_order_is_followed() -> None:
    plan, agenda, graph = bucketed(cap=1)
    waits_first = [("start", 0), ("wait", 0), ("start", 1), ("wait", 1)]
    early = attrs.evolve(agenda, sequence=tuple(waits_first))
    order = [
        line.split(" ")[0] for line in text(schedule.overlap(graph, early), plan.axes).splitlines()
    ]
    at = order.index
    assert at("%wait_tensor") < at("%mm_4"), "what a start needs comes before it"


def test_once_is_enough() -> None:
    plan, agenda, graph = bucketed(cap=1)
    after = schedule.overlap(graph, agenda)
    again = schedule.overlap(after, agenda)
    assert text(again, plan.axes) == text(after, plan.axes)
