"""The ops of a graph at which a compilation failed, from the frames of the error."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch


def culprits(error: BaseException | None) -> list[torch.fx.Node]:
    """List the graph nodes that Inductor was working on when it raised an error, innermost known
    ones.

    Args:
        error: of Inductor.
    """
    while error is not None:
        for frame in reversed(_frames(error.__traceback__)):
            names = frame.tb_frame.f_locals
            for name in ("n", "node", "self"):
                nodes = _nodes(names.get(name))
                if nodes:
                    return nodes
        error = error.__cause__ or error.__context__
    return []


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _nodes(value: Any) -> list[torch.fx.Node]:
    """List the graph nodes that a local variable of Inductor refers to."""
    if isinstance(value, torch.fx.Node):
        return [value] if value.op == "call_function" else []
    inner = getattr(value, "node", None)
    for origins in (getattr(value, "origins", None), getattr(inner, "origins", None)):
        if isinstance(origins, Iterable):  # one that is not finished has a field of the class
            return [x for x in origins if isinstance(x, torch.fx.Node)]
    return []
