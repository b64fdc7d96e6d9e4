"""Writes to memory that a DTensor shares are refused where another tensor would show them."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.dtensors.writes import refuse_writes
from shardfn.ops import placement


class Graph:
    """A graph of Dynamo's, made call by call."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target, *args):
        return self.graph.call_function(target, args)

    def method(self, name, *args):
        return self.graph.call_method(name, args)

    def refused(self, *results) -> str:
        self.graph.output(results)
        module = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        with pytest.raises(sf.CaptureError) as caught:
            refuse_writes(module, "f")
        return str(caught.value)

    def passes(self, *results) -> None:
        self.graph.output(results)
        refuse_writes(torch.fx.GraphModule(torch.nn.Module(), self.graph), "f")


def test_a_write_to_a_dtensor_of_an_argument_is_refused() -> None:
    g = Graph()
    placed = g.call(placement.placed, g.x, "a=S0")
    assert g.refused(g.method("add_", placed, 1)).startswith(
        "f: add_ writes to the memory of an argument or a closed-over tensor\n"
    )


def test_a_write_that_another_tensor_shows_later_is_refused() -> None:
    g = Graph()
    y = g.call(torch.exp, g.x)
    placed = g.call(placement.placed, y, "a=S0")
    written = g.method("mul_", placed, 2)
    assert "mul_ writes to the memory of a DTensor" in g.refused(written, y)


def test_a_write_to_what_nobody_reads_again_passes() -> None:
    g = Graph()
    y = g.call(torch.exp, g.x)
    placed = g.call(placement.placed, y, "a=S0")
    g.passes(g.method("mul_", placed, 2))


def test_without_dtensors_nothing_is_asked() -> None:
    g = Graph()
    y = g.call(torch.exp, g.x)
    g.passes(g.method("mul_", y, 2), y)
