"""The passes, in their order, with a check after each."""

from __future__ import annotations

import pytest
import torch

from shardfn import schedule
from tests.support.stages.local_graphs import nothing_agreed, redistributed


def test_the_schedule_runs_every_pass_and_checks_each_graph_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(schedule, "check", lambda graph, axes: seen.append("check"))
    changing = ("bucket", "overlap")

    def noting(name: str) -> schedule.Pass:
        def run(graph: torch.fx.Graph, agenda: schedule.Agenda) -> torch.fx.Graph:
            seen.append(name)
            return torch.fx.Graph() if name in changing else graph

        return run

    names = [run.__name__ for run in schedule.PIPELINE]
    assert names == ["merge_equal", "bucket", "drop_dead", "overlap"]
    monkeypatch.setattr(schedule, "PIPELINE", tuple(map(noting, names)))
    schedule.schedule(torch.fx.Graph(), nothing_agreed())
    assert " ".join(seen) == ("check merge_equal bucket check drop_dead overlap check")


def test_a_pass_with_nothing_to_do_returns_the_graph_itself() -> None:
    graph = redistributed((0, "R"), [(("R", "R"), "forward")])
    for run in (schedule.merge_equal, schedule.drop_dead):
        assert run(graph, nothing_agreed()) is graph
