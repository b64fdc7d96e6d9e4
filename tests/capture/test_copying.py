"""A copy of a graph: the same text, and nothing shared."""

from __future__ import annotations

from shardfn import schedule
from tests.support.stages.local_graphs import redistributed, text


def test_a_copy_has_the_same_text_and_shares_no_metadata() -> None:
    graph = redistributed((0, 0), [(("R", "R"), "forward")])
    copy = schedule.copied(graph)
    assert text(copy) == text(graph) and copy is not graph
    for a, b in zip(copy.nodes, graph.nodes, strict=True):
        assert a is not b and a.name == b.name
        assert a.meta == b.meta and a.meta is not b.meta
