"""Marks in a traced function, between which random calls draw from an earlier state, as those of a
value that is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _compat
from . import ambient


def draw_from(state: torch.Tensor) -> torch.Tensor:
    """Draw from this state from here on. Dynamo keeps this call."""
    return state.clone()


def draw_as_before(state: torch.Tensor) -> torch.Tensor:
    """Draw again from what random calls drew from before the last mark. Dynamo keeps this call."""
    return state.clone()


def _replay_draw_from(state: torch.Tensor) -> torch.Tensor:
    ambient.draw_from_earlier(state)
    return state


def _replay_draw_as_before(state: torch.Tensor) -> torch.Tensor:
    ambient.draw_as_before()
    return state


# The function that replaces each mark when Dynamo's graph is replayed
REPLAYED: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    draw_from: _replay_draw_from,
    draw_as_before: _replay_draw_as_before,
}


def install() -> None:
    """Have Dynamo keep the marks. Capture calls this before it traces."""
    for mark in REPLAYED:
        _compat.keep_in_graph(mark)
