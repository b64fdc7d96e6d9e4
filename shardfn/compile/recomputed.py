"""Recomputation of cheap values: the backward of a compiled program recomputes pointwise
values and norms, where fewer bytes then live from the forward to the backward.

Which values are saved is a minimum cut of the forward, as in torch's partitioner. A
compiler that is given forward and backward as one graph would keep every value that both read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from operator import getitem

import attrs
import torch

from ..capture.checkpoint.recompute import SHAPE_ONLY, is_view, owner_of
from ..capture.drawing import draws
from ..ops.nodes import remove_unread
from ..ops.placement import AFTER
from ..schedule import copied
from .minimum_cut import ENDLESS, minimum_cut

aten = torch.ops.aten
CASTS = {aten._to_copy.default, aten.clone.default}  # cheap, and not tagged as pointwise
NORMS = {  # one pass over a value, which their own backward reads as well
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
}
WAIT = torch.ops._c10d_functional.wait_tensor.default
LEAST_BYTES = 1 << 20  # to spare: a smaller program stays as it is


def recomputed(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with cheap values recomputed in its backward.

    Args:
        graph: one rank's program, functional ATen. Nodes carry `val` and `phase`.

    Returns:
        The graph itself where less than a mebibyte is spared; else a new one with the same
        inputs, outputs and collectives. Copies read what is saved through `shardfn::after`, so
        that no compiler merges them with the forward. Values do not change.
    """
    split = _Split.of(graph)
    if split is None or split.bytes(split.crossing) < LEAST_BYTES:
        return graph
    again = split.cheapest()
    spared = split.bytes(split.crossing) - split.bytes(split.saved(again))
    if spared < LEAST_BYTES:
        return graph
    names = {node.name for node in again}
    return _Copies(copied(graph), names, len(split.early)).graph


def _size(node: torch.fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.itemsize


def _peak(nodes: Sequence[torch.fx.Node]) -> int:
    """The place in an order of nodes before which most bytes are alive that they compute."""
    last = {x: k for k, node in enumerate(nodes) for x in map(owner_of, _reads(node))}
    change = [0] * (len(nodes) + 1)
    for k, node in enumerate(nodes):
        if node in last and _is_tensor(node) and not _is_given(node):
            change[k + 1] += _size(node)
            change[last[node]] -= _size(node)
    alive = list(itertools.accumulate(change))
    return alive.index(max(alive))


def _is_given(node: torch.fx.Node) -> bool:
    """Whether a value is an input, or computed from nothing."""
    return node.op != "call_function" or not node.all_input_nodes


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_of_backward(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def _is_cheap(node: torch.fx.Node) -> bool:
    """Whether an op may run again: a view, a norm, or a pointwise op that is not random."""
    if node.op != "call_function" or "collective" in node.meta:
        return False
    if _is_free(node):
        return True
    if node.target is getitem:
        return node.all_input_nodes[0].target in NORMS
    tags = getattr(node.target, "tags", ())
    is_pointwise = torch.Tag.pointwise in tags or node.target in CASTS
    return is_pointwise and not draws(node)


def _is_free(node: torch.fx.Node) -> bool:
    """Whether a value has no memory of its own: a view, or the results of a norm together."""
    return node.op == "call_function" and (is_view(node) or node.target in NORMS)


def _reads(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The values that an op computes with."""
    return [] if node.target in SHAPE_ONLY else node.all_input_nodes


@attrs.frozen
class _Split:
    """A program, divided where most of what it computes is alive.

    Args:
        early: the nodes before that place, in order.
        crossing: those that later ones read.
        results: the values that the program returns, which are kept anyway.
    """

    early: tuple[torch.fx.Node, ...]
    crossing: tuple[torch.fx.Node, ...]
    results: frozenset[torch.fx.Node]

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> _Split | None:
        """The parts of a graph; None for one without a backward."""
        *nodes, output = graph.nodes
        if not any(map(_is_of_backward, nodes)):
            return None
        peak = _peak(nodes)
        read = {x for node in nodes[peak:] for x in _reads(node)}
        early = tuple(nodes[:peak])
        crossing = tuple(x for x in early if x in read and _is_tensor(x))
        results = frozenset(map(owner_of, output.all_input_nodes))
        return cls(early, crossing, results)

    def bytes(self, nodes: Iterable[torch.fx.Node]) -> int:
        """The memory of values that would not be kept anyway, each once."""
        owners = dict.fromkeys(owner_of(node) for node in nodes)
        return sum(map(self.price, owners))

    def price(self, node: torch.fx.Node) -> int:
        """The bytes of keeping a value."""
        return 0 if node in self.results or _is_given(node) else _size(node)

    def is_cheap(self, node: torch.fx.Node) -> bool:
        """Whether an op may run again."""
        return node not in self.results and _is_cheap(node)

    def cheapest(self) -> set[torch.fx.Node]:
        """The values to recompute, so that the fewest bytes are saved."""
        inside = self._above()
        number = {node: k for k, node in enumerate(inside)}
        source, sink = 2 * len(inside), 2 * len(inside) + 1
        edges: dict[tuple[int, int], int] = {}
        for node, k in number.items():
            enters, leaves = 2 * k, 2 * k + 1
            is_free = _is_free(node) and self.is_cheap(node)
            edges[enters, leaves] = ENDLESS if is_free else self.price(node)
            if self.is_cheap(node):
                above = {number[x] for x in node.all_input_nodes}
                edges |= {(2 * x + 1, enters): ENDLESS for x in above}
            else:
                edges[source, enters] = ENDLESS
        edges |= {(2 * number[x] + 1, sink): ENDLESS for x in self.crossing}
        below = minimum_cut(edges, source, sink)
        return {node for node, k in number.items() if 2 * k in below}

    def saved(self, again: set[torch.fx.Node]) -> list[torch.fx.Node]:
        """The values that live on, if some are recomputed."""
        needed = [x for node in again for x in node.all_input_nodes]
        return [x for x in (*self.crossing, *needed) if x not in again]

    def _above(self) -> list[torch.fx.Node]:
        """The values that cross, and all that cheap ops compute them from, in order."""
        found: set[torch.fx.Node] = set()
        queue = list(self.crossing)
        while queue:
            node = queue.pop()
            if node not in found:
                found.add(node)
                queue += node.all_input_nodes if self.is_cheap(node) else []
        return [node for node in self.early if node in found]


class _Copies:
    """A graph in which nodes from some place on read copies of some values.

    Args:
        graph: it is changed.
        names: of the values to recompute.
        place: that of the first node that may read copies.
    """

    def __init__(self, graph: torch.fx.Graph, names: set[str], place: int) -> None:
        self.graph = graph
        self.again = {
            node for node in graph.nodes if node.name in names and not _is_given(owner_of(node))
        }
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.barred: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tokens: set[torch.fx.Node] = set()
        *nodes, _ = graph.nodes
        token: torch.fx.Node | None = None
        for node in nodes[place:]:
            if token is not None:
                self.serve(node, self.token_of(node, token))
            if _is_token(node):
                self.tokens.add(node)
                token = node
        remove_unread(graph)
        graph.lint()

    def token_of(self, node: torch.fx.Node, last: torch.fx.Node) -> torch.fx.Node:
        """A late value that is there before a node: one that it reads, or the last."""
        return next((x for x in node.all_input_nodes if x in self.tokens), last)

    def serve(self, reader: torch.fx.Node, token: torch.fx.Node) -> None:
        """Have a node of the backward read copies, made right before it."""
        needed: set[torch.fx.Node] = set()
        queue = _reads(reader)
        while queue:
            node = queue.pop()
            if node in self.again and node not in needed | set(self.copies):
                needed.add(node)
                queue = [*queue, *node.all_input_nodes]
        with self.graph.inserting_before(reader):
            for node in sorted(needed):
                self.copy(node, token)
        if _reads(reader):
            reader.args, reader.kwargs = torch.fx.node.map_arg(
                (reader.args, reader.kwargs), self.late
            )

    def late(self, x: torch.fx.Node) -> torch.fx.Node:
        """The node from which the backward reads a value, one for all, so that they fuse."""
        return self.copies.get(x) or self.barred.get(x, x)

    def copy(self, node: torch.fx.Node, token: torch.fx.Node) -> None:
        """Recompute a value."""
        for x in self.barring(node):
            after = self.graph.call_function(AFTER, (x, token))
            after.meta = {**x.meta, "phase": "backward"}
            self.barred[x] = after
        again = self.graph.node_copy(node, self.late)
        again.meta = {**node.meta, "phase": "backward"}
        self.copies[node] = again

    def barring(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The inputs of a copy that wait for the backward, so that it is not the forward's
        value: computed ones, or given ones if there are no others.
        """
        read = [x for x in node.all_input_nodes if not _is_constant(x)]
        computed = [x for x in read if not _is_given(owner_of(x))]
        return [x for x in computed or read if self.late(x) is x]


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and not node.all_input_nodes


def _is_token(node: torch.fx.Node) -> bool:
    """Whether a node computes a floating value from others, without waiting for other ranks."""
    value = node.meta.get("val")
    is_own = node.target not in (getitem, WAIT) and "collective" not in node.meta
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_own and is_floating and bool(node.all_input_nodes)
