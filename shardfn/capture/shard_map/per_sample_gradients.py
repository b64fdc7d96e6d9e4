"""Gradients of single samples that are summed over ranks: a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ops import shard_map
from ...ops.nodes import args_of
from ...ops.prims import Axes
from .. import annotations as sources
from ..dynamo_nodes import name_of, nodes_in

OPENS = "_vmap_increment_nesting"
CLOSES = "_vmap_decrement_nesting"
BATCHES = "_add_batch_dim"


def warn_of_sums(node: torch.fx.Node, varies: Axes, flat: Callable[[Any], Axes]) -> None:
    """Warn if a per-sample gradient, taken inside of a vmap in per-rank code, is summed over ranks.

    Args:
        node: takes the derivative, of Dynamo's graph.
        varies: the axes over which the differentiated results vary.
        flat: the axes over which an argument varies.
    """
    _, primals, *_ = args_of(node)
    for x in nodes_in(primals):
        axes = sorted(varies - flat(x))
        if axes and _is_of_samples(node, x):
            names = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
            file, _, line = (sources.user_line(node) or "").rpartition(":")
            text = (
                f"a gradient inside vmap is summed over {' and '.join(axes)} for each sample, "
                "because the differentiated value w is the same on all ranks. For the gradients of "
                f"each rank's own samples call sf.pvary(w, {names}) before vmap"
            )
            warnings.warn_explicit(text, UserWarning, file or "shard_map", int(line or 0))
            return


def _is_of_samples(node: torch.fx.Node, primal: torch.fx.Node) -> bool:
    """Whether a vmap in per-rank code is open where a derivative is taken, and does not map the
    value.
    """
    inside = _opened(node)
    return bool(inside) and not any(name_of(x) == BATCHES for x in _above(primal, inside))


def _opened(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    """The nodes from the start of the outermost open vmap in per-rank code up to a node."""
    nodes = list(node.graph.nodes)
    before = nodes[: nodes.index(node)]
    entry = max((i for i, x in enumerate(before) if x.target is shard_map.to_local), default=-1)
    starts: list[int] = []
    for i, x in enumerate(before):
        if name_of(x) == OPENS:
            starts.append(i)
        elif name_of(x) == CLOSES and starts:
            starts.pop()
    first = next((i for i in starts if i > entry), None)
    return [] if first is None else before[first:]


def _above(x: torch.fx.Node, among: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """A node and its dependencies, among some nodes."""
    allowed = set(among)
    found: set[torch.fx.Node] = set()
    queue = [x]
    while queue:
        y = queue.pop()
        if y in allowed and y not in found:
            found.add(y)
            queue += y.all_input_nodes
    return found
