"""drop_dead, before and after in text."""

from __future__ import annotations

import torch

from shardfn import schedule
from tests.support.stages.local_graphs import (
    add,
    before_and_after,
    redistributed,
    returns,
    same_text,
)

aten = torch.ops.aten


def dead() -> torch.fx.Graph:
    graph = redistributed(("sum", "R"), [(("R", "R"), "forward")])
    (x,) = [n for n in graph.find_nodes(op="placeholder") if n.name == "x0"]
    doubled = add(graph, aten.mul.Tensor, x, 2)
    add(graph, aten.neg.default, doubled)
    returns(graph, x)
    return graph


def test_drop_dead_takes_local_ops_that_nobody_reads_and_keeps_collectives() -> None:
    before, after = before_and_after(schedule.drop_dead, dead())
    same_text(
        before,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        %mul = mul(%x0, 2): f64[6]
        %neg = neg(%mul): f64[6]
        return %x0
        """,
    )
    same_text(
        after,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        return %x0
        """,
    )
