"""Equal ops of a program, with equal surroundings, as those of equal layers are. They take one
strategy, so that a deep program is as fast to plan as a few of its layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch.fx import Node

from ...ops.placement import ALIGN
from .observed_walk import Key, ObservedWalk

Descriptions = dict[Node, Hashable]
HOPS = 4  # how far the surroundings of an op reach


def kinds_of(observed: ObservedWalk, before: Callable[[Node], Hashable]) -> dict[Node, int]:
    """Number the nodes of a program so that equal nodes in equal surroundings share a number.

    Args:
        observed: the program.
        before: the placements of a node on the axes that are decided.

    Source: colour refinement (Weisfeiler and Leman, 1968), a few rounds of it.
    """
    nodes = observed.nodes
    if not observed.is_large:
        return {node: number for number, node in enumerate(nodes)}
    inputs = {node: observed.read_by(node) for node in nodes}
    users = _users(inputs)
    first: Descriptions = {node: (_own(node), before(node)) for node in nodes}
    colours = _numbered(first)
    for _ in range(HOPS):
        seen: Descriptions = {}
        for node in nodes:
            read = tuple((colours[source], i) for source, i in inputs[node])
            by = sorted((colours[user], i) for user, i in users[node])
            seen[node] = (colours[node], read, tuple(by))
        colours = _numbered(seen)
    return colours


def _users(inputs: Mapping[Node, Sequence[Key]]) -> dict[Node, list[tuple[Node, int]]]:
    """Map each node to its readers and the argument positions at which they read it."""
    users: dict[Node, list[tuple[Node, int]]] = defaultdict(list)
    for node, read in inputs.items():
        for position, (source, _) in enumerate(read):
            users[source].append((node, position))
    return users


def _numbered(seen: Descriptions) -> dict[Node, int]:
    """Replace descriptions by numbers, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    found = {}
    for node, description in seen.items():
        number = numbers.setdefault(description, len(numbers))
        found[node] = number
    return found


def _own(node: Node) -> Hashable:
    """Describe a node by its op, non-tensor arguments and result shapes; names of parameters
    play no part.
    """
    if node.op == "placeholder" or node.target is ALIGN:
        call = node.op, node.op == "placeholder" or ALIGN
    else:
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: "tensor")
        call = node.target, repr(given)
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    results = tuple((tuple(x.shape), x.dtype) for x in values if isinstance(x, torch.Tensor))
    return call, results, node.meta.get("phase")
