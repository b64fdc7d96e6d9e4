"""When values are alive, and the moments at which memory is limited."""

from __future__ import annotations

import torch

from shardfn.partition.auto.memory_peaks import MemoryPeaks
from tests.support.stages.graphs import graph_of


def moments(fn, *args) -> tuple[MemoryPeaks, dict[str, torch.fx.Node]]:
    graph = graph_of(fn, *args)
    nodes = [node for node in graph.nodes if node.op != "output"]
    return MemoryPeaks(graph, nodes), {node.name: node for node in nodes}


def chain(x: torch.Tensor) -> list[torch.Tensor]:
    a = x.exp()
    b = a.view(-1).sin()
    return [b.cos()]


def test_a_view_keeps_the_memory_of_its_base() -> None:
    found, nodes = moments(chain, torch.ones(4, 5))
    names = list(nodes)
    first, last = found.span(nodes["exp"])
    assert (names[first], names[last]) == ("exp", "sin")
    assert not found.is_owner(nodes["view"])


def test_arguments_are_alive_throughout() -> None:
    found, nodes = moments(chain, torch.ones(4, 5))
    first, last = found.span(next(iter(nodes.values())))
    assert first == 0 and last >= len(nodes)


def test_the_peak_and_the_readers_of_arguments_are_chosen() -> None:
    def wide(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(20):
            x = x.exp()
        y = x.repeat(50, 1).sin().sum(0)
        for _ in range(20):
            y = y.exp()
        return [y @ w]

    found, nodes = moments(wide, torch.ones(4, 5), torch.ones(5, 3))
    names = list(nodes)
    chosen = {names[moment] for moment in found.chosen}
    arguments = [node for node in nodes.values() if node.op == "placeholder"]
    readers = {user.name for x in arguments for user in x.users}
    assert {"sin"} | readers <= chosen
    assert len(chosen) < 30
