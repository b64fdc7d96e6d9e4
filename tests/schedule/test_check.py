"""What `check` refuses of a local graph."""

from __future__ import annotations

import attrs
import pytest
import torch

from shardfn import schedule
from tests.support.stages.local_graphs import AXES, add, redistributed

aten = torch.ops.aten


def gathering() -> tuple[torch.fx.Graph, torch.fx.Node, torch.fx.Node]:
    """A graph with one collective: the graph, the collective, its wait."""
    graph = redistributed((0, "R"), [(("R", "R"), "forward")])
    (started,) = [n for n in graph.nodes if "collective" in n.meta]
    return graph, started, next(iter(started.users))


def test_check_refuses_a_collective_that_nobody_waits_for() -> None:
    graph, started, wait = gathering()
    wait.replace_all_uses_with(started)
    graph.erase_node(wait)
    refuses(graph, f"{started} must be read by exactly one wait, and by no other node")


def test_check_refuses_a_second_reader_of_a_collective() -> None:
    graph, started, _ = gathering()
    add(graph, aten.neg.default, started)
    refuses(graph, f"{started} must be read by exactly one wait, and by no other node")


def test_check_refuses_an_unknown_axis() -> None:
    graph, started, _ = gathering()
    started.meta["collective"] = attrs.evolve(started.meta["collective"], axis="z")
    refuses(graph, f"{started} is over z, which is not an axis of (a=2, b=3)")


def test_check_refuses_a_node_without_a_value() -> None:
    graph, _, wait = gathering()
    del wait.meta["val"]
    refuses(graph, f"{wait} has no value")


def test_check_refuses_a_collective_without_a_record_and_a_record_without_a_collective() -> None:
    graph, started, _ = gathering()
    record = started.meta.pop("collective")
    refuses(
        graph,
        f"{started} is a collective without a record, or has a record without being a collective",
    )
    graph, _, wait = gathering()
    wait.meta["collective"] = record
    refuses(
        graph,
        f"{wait} is a collective without a record, or has a record without being a collective",
    )


def refuses(graph: torch.fx.Graph, said: str) -> None:
    with pytest.raises(AssertionError) as error:
        schedule.check(graph, AXES)
    assert str(error.value).split("\n")[0] == said


def test_check_refuses_a_node_that_is_read_before_it_is_made() -> None:
    graph, started, wait = gathering()
    started.prepend(wait)
    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        schedule.check(graph, AXES)
