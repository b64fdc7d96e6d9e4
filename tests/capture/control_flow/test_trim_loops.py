"""Trimmed loops: unread results go, and what alone they need; a loop without any stays as it is."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.control_flow.scan import replay_scan
from shardfn.capture.control_flow.trim_loops import trim
from shardfn.ops.loops import Scan, graph_outputs
from tests.support.stages.bodies import body, loops, lowered
from tests.support.stages.graphs import op_of

C, XS = torch.ones(2, dtype=torch.float64), torch.arange(6, dtype=torch.float64).view(3, 2)


def step(c: Any, x: Any) -> Any:
    return [c * x, c + x, (c - x).exp()]


def scanned(c: torch.Tensor, xs: torch.Tensor) -> list[torch.Tensor]:
    carry, first, _ = replay_scan(body(step, 2, 3, []), [c], [xs], len(xs), False)
    return [carry, first]


def test_unread_results_are_removed_once() -> None:
    module = lowered(scanned, C, XS)
    before = module(C, XS)
    trim(module.graph)
    module.recompile()
    (loop,) = loops(module.graph, Scan)
    assert "exp" not in [op_of(n) for n in loop.graphs[0].nodes if n.op == "call_function"]
    assert len(graph_outputs(loop.graphs[0])) == 2
    trim(module.graph)
    assert loops(module.graph, Scan) == [loop], "nothing is left to trim"
    torch.testing.assert_close(module(C, XS), before, rtol=0, atol=0)
