"""A new value may be read in place of a tensor only where nothing else shows its memory."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.dtensors.whole_writes import is_replaceable


class Graph:
    """A graph of Dynamo's of tensors of one shape, made call by call."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target: Any, *args: Any, like: Any = None) -> Any:
        node = self.graph.call_function(target, args)
        node.meta["example_value"] = torch.empty(2, 3) if like is None else like
        return node


def test_a_value_that_only_its_name_shows_is_replaced() -> None:
    g = Graph()
    y, new = g.call(torch.exp, g.x), g.call(torch.sin, g.x)
    assert is_replaceable(y, new, g.graph)


def test_a_view_or_a_write_shows_it() -> None:
    for show in (torch.reshape, torch.relu_):
        g = Graph()
        y, new = g.call(torch.exp, g.x), g.call(torch.sin, g.x)
        view = g.call(show, y)
        assert not is_replaceable(y, new, g.graph)
        assert not is_replaceable(view, new, g.graph)


def test_an_argument_and_another_kind_are_written_to() -> None:
    g = Graph()
    y, new = g.call(torch.exp, g.x), g.call(torch.sin, g.x)
    g.x.meta["example_value"] = torch.empty(2, 3)
    assert not is_replaceable(g.x, new, g.graph)
    others = torch.empty(3, 2).t(), torch.empty(2, 3).double(), torch.empty(6)
    for like in others:
        other = g.call(torch.cos, g.x, like=like)
        assert not is_replaceable(y, other, g.graph)
    assert not is_replaceable(y, new, torch.fx.Graph())
