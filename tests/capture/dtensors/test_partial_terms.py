"""`to_local` of a Partial DTensor gives the tensor back that `from_local` took, and no other."""

from __future__ import annotations

import operator
from typing import Any

import torch

from shardfn.capture.dtensors.partial_terms import read_local_tensors
from shardfn.ops import placement, shard_map

Rows = list[tuple[str, str]]


def made(graph: torch.fx.Graph, x: Any, rows: Rows, shards: str = "dp:2=,tp:2=") -> Any:
    """A DTensor as from_local makes it of x."""
    for axis, kind in rows:
        if kind in ("max", "min"):
            x = graph.call_function(shard_map.extremum, (x, axis, kind))
            continue
        if kind == "avg":
            x = graph.call_function(operator.truediv, (x, 2))
        x = graph.call_function(shard_map.psum, (x, axis, True))
    x = graph.call_function(shard_map.from_local, (x, shards), {"where": "DTensor.from_local"})
    return graph.call_function(placement.placed, (x, "dp=Psum,tp=R"))


def terms(graph: torch.fx.Graph, x: Any, rows: Rows) -> Any:
    """The terms that to_local takes of a DTensor."""
    for axis, kind in rows:
        x = graph.call_function(shard_map.own_term, (x, axis, kind))
    return x


def read(rows: Rows, asked: Rows, shards: str = "dp:2=,tp:2=", between: Any = None) -> str:
    """The name of the value that is read in place of the terms."""
    graph = torch.fx.Graph()
    x = made(graph, graph.placeholder("x"), rows, shards)
    x = graph.call_function(between, (x, x)) if between else x
    graph.output(terms(graph, x, asked))
    read_local_tensors(torch.fx.GraphModule(torch.nn.Module(), graph))
    (output,) = graph.find_nodes(op="output")
    return str(output.args[0])


def test_the_tensor_is_read_in_place_of_its_term() -> None:
    for kind in ("sum", "avg", "max", "min"):
        assert read([("dp", kind)], [("dp", kind)]) == "x", kind


def test_terms_over_two_axes_are_taken_together() -> None:
    both = [("dp", "sum"), ("tp", "avg")]
    assert read(both, both) == "x" and read(both, both[::-1]) == "x"


def test_a_term_over_an_axis_that_was_not_summed_stays() -> None:
    assert read([("dp", "sum")], [("tp", "sum")]) == "own_term"
    assert read([("dp", "sum")], [("dp", "sum"), ("tp", "sum")]) == "own_term_1"


def test_what_ops_made_and_what_is_sharded_stays() -> None:
    rows = [("dp", "sum")]
    assert read(rows, rows, between=torch.add) == "own_term"
    assert read(rows, rows, "dp:2=,tp:2=0") == "own_term"


def test_a_value_that_moved_is_still_the_one_of_from_local() -> None:
    graph = torch.fx.Graph()
    x = made(graph, graph.placeholder("x"), [("dp", "sum")])
    x = graph.call_function(placement.placed, (x, "dp=Psum,tp=R"))
    graph.output(terms(graph, x, [("dp", "sum")]))
    read_local_tensors(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert str(graph.find_nodes(op="output")[0].args[0]) == "x"
