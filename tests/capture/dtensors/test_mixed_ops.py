"""Ops of DTensors and of numbers of each rank: what is refused."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.dtensors.mixed_ops import refuse_varying
from shardfn.ops import placement


def test_a_returned_dtensor_may_vary_over_no_axis() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    d = graph.call_function(placement.placed, (x, "dp=S0,tp=R"))
    out = graph.call_function(placement.per_rank_result, (d,))
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(4, 2)
    with pytest.raises(sf.CaptureError, match="the result differs between ranks of pp"):
        refuse_varying(graph, lambda x: frozenset({"pp"} if x is out else ()))
