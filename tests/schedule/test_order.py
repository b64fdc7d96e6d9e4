"""A graph in another order: as wanted, but each node after its inputs."""

from __future__ import annotations

import torch

from shardfn.schedule.order import ordered, sort
from tests.support.stages.graphs import graph_of, shown


def wanted(*names: str) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    graph = graph_of(lambda x: [(x + 1).sin(), (x + 2).cos()], torch.ones(3))
    nodes = {node.name: node for node in graph.nodes}
    return graph, ordered(graph, [nodes[name] for name in names])


def order(graph: torch.fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op == "call_function"]


def test_nodes_come_as_wanted() -> None:
    _, after = wanted("add_1", "add", "cos", "sin")
    assert order(after) == ["add_1", "add", "cos", "sin"]


def test_an_input_moves_to_just_before_its_reader() -> None:
    _, after = wanted("add", "cos", "sin")
    assert order(after) == ["add", "add_1", "cos", "sin"]


def test_the_output_comes_last_and_brings_what_nobody_wanted() -> None:
    _, after = wanted("output", "cos")
    assert order(after) == ["add_1", "cos", "add", "sin"]
    first, *_, last = after.nodes
    assert (first.op, last.op) == ("placeholder", "output")


def test_names_and_metadata_are_kept_and_the_graph_is_another() -> None:
    graph, after = wanted("cos", "sin")
    assert shown(graph).splitlines()[-1] == shown(after).splitlines()[-1]
    metas = {n.name: n.meta for n in graph.nodes}
    assert {n.name: n.meta for n in after.nodes} == metas
    assert all(n.meta is not metas[n.name] for n in after.nodes)


def test_a_long_chain_needs_no_recursion() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for _ in range(3000):
        node = graph.call_function(torch.neg, (node,))
    graph.output([node])
    assert len(ordered(graph, []).nodes) == 3002


def test_sort_moves_in_place_only_what_is_read_before_it_is_made() -> None:
    graph = graph_of(lambda x: [(x + 1).sin(), (x + 2).cos()], torch.ones(3))
    before = order(graph)
    sort(graph)
    assert order(graph) == before == ["add", "sin", "add_1", "cos"]
    nodes = {node.name: node for node in graph.nodes}
    nodes["cos"].append(nodes["add_1"])
    nodes["cos"].append(nodes["add"])
    sort(graph)
    assert order(graph) == ["add", "sin", "add_1", "cos"]
    assert all(nodes[node.name] is node for node in graph.nodes)
    graph.lint()
