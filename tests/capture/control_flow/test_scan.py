"""Means over the steps of a scan, of results that no step reads."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.control_flow.scan import replay_scan
from shardfn.ops.loops import Scan
from tests.support.stages.bodies import body, loops, lowered

C = torch.tensor([0.2, 0.4], dtype=torch.float64)
W = torch.tensor([0.5, 0.1], dtype=torch.float64)
XS = torch.arange(6, dtype=torch.float64).view(3, 2) / 10


def step(c: Any, x: Any, w: Any) -> Any:
    new = c * x + w
    return [new, new.exp(), x * w]


def scanned(c: torch.Tensor, w: torch.Tensor, xs: torch.Tensor) -> list[torch.Tensor]:
    return list(replay_scan(body(step, 2, 3, [w]), [c], [xs], len(xs), False, [w]))


def written_out(c: torch.Tensor, w: torch.Tensor, xs: torch.Tensor) -> list[torch.Tensor]:
    rows = []
    for x in xs:
        c, term, y = step(c, x, w)
        rows.append((term, y))
    return [c, torch.stack([term for term, _ in rows]).mean(0), torch.stack([y for _, y in rows])]


def test_means_stand_between_carries_and_stacked_results() -> None:
    module = lowered(scanned, C, W, XS)
    torch.testing.assert_close(module(C, W, XS), written_out(C, W, XS))
    (loop,) = loops(module.graph, Scan)
    assert loop.carries == 2, "a sum is carried"


def test_means_have_the_derivatives_of_the_loop_written_out() -> None:
    def gradients(function: Any) -> Any:
        loss = lambda *args: torch.cat([x.flatten() for x in function(*args)]).square().sum()
        return lambda *args: list(torch.func.grad(loss, argnums=(0, 1, 2))(*args))

    module = lowered(gradients(scanned), C, W, XS)
    torch.testing.assert_close(module(C, W, XS), gradients(written_out)(C, W, XS))
