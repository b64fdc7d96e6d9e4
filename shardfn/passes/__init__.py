"""Stage 3, schedule: passes over the local graph, each `graph -> graph`, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..types import MeshAxes
from ._check import check
from ._copy import copied
from ._drop_dead import drop_dead
from ._elide_size_one import elide_size_one
from ._merge_equal import merge_equal

Pass = Callable[[torch.fx.Graph, MeshAxes], torch.fx.Graph]
PIPELINE: tuple[Pass, ...] = (merge_equal, elide_size_one, drop_dead)

__all__ = ["PIPELINE", "check", "copied", "drop_dead", "elide_size_one", "merge_equal", "schedule"]


def schedule(graph: torch.fx.Graph, axes: MeshAxes) -> torch.fx.Graph:
    """Run every pass, and check the graph before the first and after each."""
    check(graph, axes)
    for run in PIPELINE:
        graph = run(graph, axes)
        check(graph, axes)
    return graph
