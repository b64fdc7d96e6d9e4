"""Rematerialization of cheap values: the backward recomputes pointwise values and norms, where
fewer bytes are then saved from the forward.

A minimum cut of the forward decides which values are saved, as in torch's partitioner. A compiler
that is given forward and backward as one graph would keep every value that both read.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import attrs
import torch

from ..capture.checkpoint.recompute import SHAPE_ONLY, is_view, owner_of
from ..capture.drawing import draws
from ..ops.nodes import remove_unread
from ..ops.placement import AFTER
from ..partition.minimum_cut import INFINITE, minimum_cut
from ..schedule import copied

aten = torch.ops.aten
CASTS = {aten._to_copy.default, aten.clone.default}  # cheap, and not tagged as pointwise
NORMS = {  # one pass over a value, which their own backward reads as well
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
}
WAIT = torch.ops._c10d_functional.wait_tensor.default
LEAST_BYTES = 1 << 20  # to spare: a smaller program stays as it is


def recompute_cheap_values(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return the graph with cheap values recomputed in its backward.

    Args:
        graph: one rank's program, functional ATen. Nodes carry `val` and `phase`.

    Returns:
        The graph itself where less than a mebibyte is spared, or its peak does not fall; else a new
        one with the same inputs, outputs and collectives. Copies read what is saved through
        `shardfn::after`, so that no compiler merges them with the forward. Values do not change.
    """
    split = _Split.of(graph)
    if split is None or split.bytes(split.crossing) < LEAST_BYTES:
        return graph
    recomputed = split.cheapest()
    saving = split.bytes(split.crossing) - split.bytes(split.saved(recomputed))
    if saving < LEAST_BYTES or max(split.course(recomputed)) >= max(split.alive):
        return graph
    names = {node.name for node in recomputed}
    return _RecomputingGraph(copied(graph), names, len(split.early)).graph


def _nbytes(node: torch.fx.Node) -> int:
    """Return the bytes of a tensor value."""
    value = node.meta["val"]
    return value.numel() * value.itemsize


def _alive(nodes: Sequence[torch.fx.Node]) -> list[int]:
    """Return the computed bytes that are alive before each node of an order, without those that
    the node is the last to read.
    """
    last = {x: k for k, node in enumerate(nodes) for x in map(owner_of, _reads(node))}
    change = [0] * (len(nodes) + 1)
    for k, node in enumerate(nodes):
        if node in last and _is_tensor(node) and not _is_input_or_constant(node):
            change[k + 1] += _nbytes(node)
            change[last[node]] -= _nbytes(node)
    return [*itertools.accumulate(change)]


def _is_input_or_constant(node: torch.fx.Node) -> bool:
    """Return whether a value is an input, or computed from nothing."""
    return node.op != "call_function" or not node.all_input_nodes


def _is_tensor(node: torch.fx.Node) -> bool:
    """Return whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_of_backward(node: torch.fx.Node) -> bool:
    """Return whether an op belongs to the backward."""
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def _is_cheap(node: torch.fx.Node) -> bool:
    """Return whether an op may run again: a view, a norm, or a pointwise op that is not random."""
    if node.op != "call_function" or "collective" in node.meta:
        return False
    if _is_free(node):
        return True
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in NORMS
    tags = getattr(node.target, "tags", ())
    is_pointwise = torch.Tag.pointwise in tags or node.target in CASTS
    return is_pointwise and not draws(node)


def _is_free(node: torch.fx.Node) -> bool:
    """Return whether a value has no memory of its own: a view, or the results of a
    norm together.
    """
    return node.op == "call_function" and (is_view(node) or node.target in NORMS)


def _reads(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the values that an op computes with: none if it reads a shape only."""
    return [] if node.target in SHAPE_ONLY else node.all_input_nodes


@attrs.frozen
class _Split:
    """A program, divided where most of what it computes is alive: the values to save or recompute.

    Args:
        nodes: of the program, in order.
        alive: the bytes that are alive before each of them.
        early: the nodes before that place, in order.
        crossing: those that later ones read.
        results: the values that the program returns, which are kept anyway.
    """

    nodes: tuple[torch.fx.Node, ...]
    alive: tuple[int, ...]
    early: tuple[torch.fx.Node, ...]
    crossing: tuple[torch.fx.Node, ...]
    results: frozenset[torch.fx.Node]

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> _Split | None:
        """Split a graph at its peak; None for one without a backward."""
        *nodes, output = graph.nodes
        if not any(map(_is_of_backward, nodes)):
            return None
        alive = _alive(nodes)
        peak = alive.index(max(alive))
        read = {x for node in nodes[peak:] for x in _reads(node)}
        early = tuple(nodes[:peak])
        crossing = tuple(x for x in early if x in read and _is_tensor(x))
        results = frozenset(map(owner_of, output.all_input_nodes))
        return cls(tuple(nodes), tuple(alive), early, crossing, results)

    def bytes(self, nodes: Iterable[torch.fx.Node]) -> int:
        """Return the bytes of values that would not be kept anyway, each memory once."""
        owners = dict.fromkeys(owner_of(node) for node in nodes)
        return sum(map(self.price, owners))

    def price(self, node: torch.fx.Node) -> int:
        """Return the bytes that saving a value costs."""
        return 0 if node in self.results or _is_input_or_constant(node) else _nbytes(node)

    def is_cheap(self, node: torch.fx.Node) -> bool:
        """Return whether an op may run again, and is no result."""
        return node not in self.results and _is_cheap(node)

    def cheapest(self) -> set[torch.fx.Node]:
        """Return the values to recompute so that the fewest bytes are saved: a minimum cut."""
        candidates = self._candidates()
        number = {node: k for k, node in enumerate(candidates)}
        source, sink = 2 * len(candidates), 2 * len(candidates) + 1
        edges: dict[tuple[int, int], int] = {}
        for node, k in number.items():
            enters, leaves = 2 * k, 2 * k + 1
            is_free = _is_free(node) and self.is_cheap(node)
            edges[enters, leaves] = INFINITE if is_free else self.price(node)
            if self.is_cheap(node):
                above = {number[x] for x in node.all_input_nodes}
                edges |= {(2 * x + 1, enters): INFINITE for x in above}
            else:
                edges[source, enters] = INFINITE
        edges |= {(2 * number[x] + 1, sink): INFINITE for x in self.crossing}
        below = minimum_cut(edges, source, sink)
        return {node for node, k in number.items() if 2 * k in below}

    def saved(self, recomputed: set[torch.fx.Node]) -> list[torch.fx.Node]:
        """Return the values that the backward still reads from the forward, if some are
        recomputed.
        """
        needed = [x for node in recomputed for x in node.all_input_nodes]
        return [x for x in (*self.crossing, *needed) if x not in recomputed]

    def course(self, recomputed: set[torch.fx.Node]) -> list[int]:
        """Return the bytes that are alive before each node if some values are recomputed where the
        backward first reads them. A copy that only copies read is not stored.
        """
        half = len(self.early)
        readers: dict[torch.fx.Node, list[int]] = {}  # of a value or its views
        made: dict[torch.fx.Node, int] = {}  # where a copy of a value is first read
        for k, node in enumerate(self.nodes):
            for x in _reads(node):
                readers.setdefault(owner_of(x), []).append(k)
                if k >= half and x in recomputed:
                    made.setdefault(x, k)
        read: dict[torch.fx.Node, int] = {}  # where copies last read a value
        for node in reversed(self.early):
            places = [made[x] for x in (node, *node.users) if x in made]
            if node in recomputed and places:
                made[node] = min(places)
                above = map(owner_of, node.all_input_nodes)
                read |= {x: max(read.get(x, 0), made[node]) for x in above}
        before = {owner_of(x) for x in self.crossing}
        after = {owner_of(x) for x in self.saved(recomputed)}
        change = [*map(operator.sub, self.alive, (0, *self.alive))]
        for x in before - after:
            change[max([k for k in readers[x] if k < half], default=0)] -= self.price(x)
            change[min(k for k in readers[x] if k >= half)] += self.price(x)
        for x in (after - before) & set(read):
            change[readers[x][-1]] += self.price(x)
            change[read[x]] -= self.price(x)
        return [*itertools.accumulate(change)]

    def _candidates(self) -> list[torch.fx.Node]:
        """Return the values that cross, and all that cheap ops compute them from, in order."""
        candidates: set[torch.fx.Node] = set()
        queue = list(self.crossing)
        while queue:
            node = queue.pop()
            if node not in candidates:
                candidates.add(node)
                queue += node.all_input_nodes if self.is_cheap(node) else []
        return [node for node in self.early if node in candidates]


class _RecomputingGraph:
    """A graph in which the nodes after some position read recomputed copies of some values.

    Args:
        graph: it is changed.
        names: of the values to recompute.
        start: that of the first node that may read copies.
    """

    def __init__(self, graph: torch.fx.Graph, names: set[str], start: int) -> None:
        self.graph = graph
        self.recomputed = {
            node
            for node in graph.nodes
            if node.name in names and not _is_input_or_constant(owner_of(node))
        }
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.delayed: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tokens: set[torch.fx.Node] = set()
        *nodes, _ = graph.nodes
        token: torch.fx.Node | None = None
        for node in nodes[start:]:
            if token is not None:
                self.read_copies(node, self.token_of(node, token))
            if _is_token(node):
                self.tokens.add(node)
                token = node
        remove_unread(graph)
        graph.lint()

    def token_of(self, node: torch.fx.Node, last: torch.fx.Node) -> torch.fx.Node:
        """Return a value of the backward that is available before a node: one that it reads, or
        the last.
        """
        return next((x for x in node.all_input_nodes if x in self.tokens), last)

    def read_copies(self, reader: torch.fx.Node, token: torch.fx.Node) -> None:
        """Let a node of the backward read copies, recomputed right before it."""
        replaced = (self.recomputed, self.copies, self.delayed)
        if not any(x in values for x in reader.all_input_nodes for values in replaced):
            return
        needed: set[torch.fx.Node] = set()
        queue = _reads(reader)
        while queue:
            node = queue.pop()
            if node in self.recomputed and node not in needed | set(self.copies):
                needed.add(node)
                queue = [*queue, *node.all_input_nodes]
        with self.graph.inserting_before(reader):
            for node in sorted(needed):
                self.copy(node, token)
        if _reads(reader):
            reader.args, reader.kwargs = torch.fx.node.map_arg(
                (reader.args, reader.kwargs), self.backward_value
            )

    def backward_value(self, x: torch.fx.Node) -> torch.fx.Node:
        """Return the node from which the backward reads a value: one for all readers, so that they
        fuse.
        """
        return self.copies.get(x) or self.delayed.get(x, x)

    def copy(self, node: torch.fx.Node, token: torch.fx.Node) -> None:
        """Recompute one value, after its delayed inputs."""
        for x in self.inputs_to_delay(node):
            after = self.graph.call_function(AFTER, (self.stored(x), token))
            after.meta = {**x.meta, "phase": "backward"}
            self.delayed[x] = after
        duplicate = self.graph.node_copy(node, self.backward_value)
        duplicate.meta = {**node.meta, "phase": "backward"}
        self.copies[node] = duplicate

    def stored(self, x: torch.fx.Node) -> torch.fx.Node:
        """Return a value of the forward, which a compiler computes there: one that it would compute
        where the backward reads it would keep its inputs, such as a whole bucket, until then.
        """
        if not _is_cheap(owner_of(x)):
            return x
        with self.graph.inserting_after(x):
            stored = self.graph.call_function(AFTER, (x, x))
        stored.meta = dict(x.meta)
        return stored

    def inputs_to_delay(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the inputs of a copy that must wait for the backward, so that no compiler merges
        the copy with the forward: computed ones, or inputs of the program if there are no others.
        """
        read = [x for x in node.all_input_nodes if not _is_constant(x)]
        computed = [x for x in read if not _is_input_or_constant(owner_of(x))]
        return [x for x in computed or read if self.backward_value(x) is x]


def _is_constant(node: torch.fx.Node) -> bool:
    """Return whether a value is computed from nothing."""
    return node.op == "call_function" and not node.all_input_nodes


def _is_token(node: torch.fx.Node) -> bool:
    """Return whether a node computes a floating value from others, without waiting for other
    ranks.
    """
    value = node.meta.get("val")
    is_own = node.target not in (operator.getitem, WAIT) and "collective" not in node.meta
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_own and is_floating and bool(node.all_input_nodes)
