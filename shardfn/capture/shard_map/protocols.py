"""Protocols of the passes over one graph of per-rank code: which values vary over which mesh
axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch

Axes = frozenset[Any]  # and facts of gradients.py


@attrs.define(eq=False)
class Settled:
    """The varying axes on which a control-flow op and its bodies agree."""

    # body -> the varying axes of the values that enter it
    entering: dict[torch.fx.Node, list[Axes]]
    leaving: list[Axes]  # the varying axes of the results of any body
    # (body, argument) -> the varying axes of the closed-over value
    free: dict[tuple[torch.fx.Node, int], Axes]
    result: list[Axes]
    # the varying axes to which the op's lists of arguments are raised
    brought: dict[int, list[Axes]]
    # body -> the varying axes of its results, where bodies differ
    left: dict[torch.fx.Node, list[Axes]] = attrs.field(factory=dict)


class Varying(Protocol):
    """Over which mesh axes each value of one graph varies."""

    module: torch.fx.GraphModule
    asked: set[torch.fx.Node]  # values that some op needs as varying
    known: dict[torch.fx.Node, Settled]  # of the endings
    leaving: list[Axes]  # in a region: of what it returns

    def __init__(self, module: torch.fx.GraphModule) -> None: ...

    def settle(self, inputs: Sequence[Axes]) -> None:
        """Find the axes of all values, then change the graph."""
        ...

    def ask(self) -> list[torch.fx.Node]:
        """Note which values some op needs as varying; returns the ops."""
        ...

    def result(self, inputs: Sequence[Axes]) -> Any:
        """Find the axes of all values; returns those of the result."""
        ...

    def flat(self, x: Any) -> Axes:
        """The facts of all parts of an argument."""
        ...

    def needs(self, node: torch.fx.Node) -> Axes:
        """The axes over which all that a node reads has to vary."""
        ...

    def vary(self, x: torch.fx.Node, needs: Axes) -> torch.fx.Node:
        """The value as one that varies over these axes too."""
        ...
