"""Graphs go through JSON: they compute the same, and equal graphs have equal texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.compile.text import Unwritable, graph_of, text_of
from shardfn.schedule.check import check

X = torch.arange(12.0).view(3, 4) / 5


def module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def lowered(fn: Any, *args: Any) -> torch.fx.Graph:
    return sf.jit(fn, backend="aten").lower(*args).program.graph


def through_json(graph: torch.fx.Graph) -> torch.fx.Graph:
    return graph_of(json.loads(json.dumps(text_of(graph, notes=True))))


PROGRAMS = {
    "views": lambda x: x.t()[1:, ::2].contiguous() * 2.5,
    "several results": lambda x: [*x.split(2, dim=1), x.max(dim=0).values],
    "loop": lambda x: sf.scan(lambda c, r: (c * r, c + 1), x[0], x, reverse=True),
    "branch": lambda x: sf.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, x),
    "gradient": lambda x: sf.grad(lambda y: torch.softmax(y, 0).square().sum())(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_comes_back(name: str) -> None:
    graph = lowered(PROGRAMS[name], X)
    back = through_json(graph)
    for a, b in zip(module(graph)(X), module(back)(X), strict=True):
        assert torch.equal(a, b)
    assert text_of(back) == text_of(graph)
    assert [n.meta.get("source") for n in back.nodes][1:-1] == [
        n.meta.get("source") for n in graph.nodes
    ][1:-1]


def test_names_and_lines_are_no_part_of_a_text() -> None:
    a = lowered(lambda x: x.sin() + 1, X)
    b = lowered(lambda value: value.sin() + 1, X)
    assert text_of(a) == text_of(b)
    assert text_of(a, notes=True) != text_of(b, notes=True)
    assert text_of(a) != text_of(lowered(lambda x: x.sin() + 2, X))
    assert text_of(a) != text_of(lowered(lambda x: x.sin() + 1, X.t()))


def test_collectives_come_back_with_their_records() -> None:
    with sf.fake_world(3, numerics=False):
        mesh = sf.make_mesh((3,), ("dp",), device_type="cpu")
        step = sf.shard(lambda x: x.sum(0), mesh, P("dp"), backend="aten")
        program = step.lower(sf.ShapeDtype((5, 2))).program
    back = through_json(program.graph)
    check(back, program.axes)
    records = [
        [n.meta["collective"] for n in graph.nodes if "collective" in n.meta]
        for graph in (back, program.graph)
    ]
    assert records[0] == records[1] and len(records[0]) == 1


def test_a_graph_with_another_object_is_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    node = graph.call_function(torch.sin, (x,))
    graph.output((node,))
    with pytest.raises(Unwritable, match="the op"):
        text_of(graph)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"in": [[2], [1], 0, "float32", "cpu"]}],
        [{"out": {"tuple": [{"node": 0}]}}],
        [{"op": "getitem", "args": [{"node": 1}], "val": None}],
        [{"loop": "Loop", "fields": {}, "graphs": []}],
        [{"loop": "Scan", "fields": {"length": -1}, "graphs": []}],
        [{}],
    ],
    ids=str,
)
def test_a_text_that_is_no_graph_is_refused(rows: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        graph_of(rows)
