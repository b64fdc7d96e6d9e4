"""Rematerialization: the backward of a checkpointed call recomputes residuals from the call's
inputs.

A pass on the joint graph of forward and backward. It uses only each node's meta: `phase`, and
in `custom` the checkpointed calls of the node (`sources.REGION`) or, for a backward node, those
of its forward op (`inside`).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ...ops import debug, placement
from ...ops.nodes import args_of, remove_unread
from .. import annotations as sources
from ..drawing import draws
from ..dynamo_nodes import name_of
from . import policies, torch_policies

aten = torch.ops.aten
SHAPE_ONLY = {  # ops that read only the shape of a tensor
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.new_full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
SAME_MEMORY = {
    aten._unsafe_view.default,
    placement.ALIGN,
    placement.REDISTRIBUTE,
}  # in addition to torch's views


def recompute(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph in which the backward of each checkpointed call recomputes the residuals that
    the call's policy does not save.

    A forward node of such a call that its backward reads is copied, in phase "backward", to
    right before its first reader. Copies read saved values and values from outside of the call
    through `shardfn::after`, so that no compiler merges them with the forward. In nested calls,
    the outer one saves values by its own policy, and recomputes the rest for the inner ones'
    backward. Random values are always saved. Values never change.

    Args:
        graph: functional ATen. Nodes carry `val`, `phase` and `custom`.

    Returns:
        The graph itself, with the same inputs and outputs and no dead nodes. `checkpoint_name`s
        are removed, and recorded in `custom` as `names`.
    """
    remove_unread(graph)
    _note_names(graph)
    members: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        for key in _regions(node):
            members.setdefault(key, []).append(node)
    if members:
        work = _Work(members, _tokens(graph))
        inner_first = sorted(
            members, key=lambda key: (len(members[key]), -int(key.removeprefix(sources.REGION)))
        )
        policy = {key: _policy(_regions(nodes[0])[key], nodes) for key, nodes in members.items()}
        depth = {key: i for i, key in enumerate(inner_first)}
        for key in inner_first:
            around = tuple(
                other for other in _regions(members[key][0]) if depth[other] > depth[key]
            )
            _Region(graph, work, key, policy[key], around).recompute()
        remove_unread(graph)
        graph.lint()
    return graph


def _policy(text: str, members: list[torch.fx.Node]) -> policies.Policy:
    """The policy of a checkpointed call, by its text and its ops."""
    forward = [node for node in members if not _is_backward(node)]
    return torch_policies.saved_by(text, forward) or policies.read(text)


def residuals(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The residuals of a graph: inputs and forward values that backward nodes read.

    Args:
        graph: nodes carry `val` and `phase`. `outermost` in `custom` marks a backward that is
            not itself differentiated.

    Returns:
        In order, each once: the nodes that own the memory. For a view, that is its base.
    """
    backward = [node for node in graph.nodes if _is_backward(node)]
    late = {node for node in backward if _noted(node).get(sources.OUTERMOST)} or set(backward)
    kept = {
        owner_of(x)
        for node in late
        if node.target not in SHAPE_ONLY
        for x in node.all_input_nodes
        if x not in late
    }
    return [node for node in graph.nodes if node in kept]


def owner_of(node: torch.fx.Node) -> torch.fx.Node:
    """The base of a view. Any other node is its own owner."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def names_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The names that `checkpoint_name` gave to a value."""
    return _noted(node).get("names", ())


def _note_names(graph: torch.fx.Graph) -> None:
    """Record each name on its value and, if that is a view, on its base. Removes the naming op."""
    for node in graph.find_nodes(op="call_function", target=placement.NAME):
        value, name = node.args
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        while value is not None:
            value.meta["custom"] = {**_noted(value), "names": (*names_of(value), name)}
            under = (
                value.all_input_nodes[0] if value.op == "call_function" and is_view(value) else None
            )
            value = (
                under
                if under is not None and under.meta["val"].numel() == value.meta["val"].numel()
                else None
            )


def _noted(node: torch.fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _regions(node: torch.fx.Node) -> dict[str, str]:
    return sources.regions(_noted(node))


def _is_backward(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def is_view(node: torch.fx.Node) -> bool:
    return getattr(node.target, "is_view", False) or node.target in SAME_MEMORY


def _is_item(node: torch.fx.Node) -> bool:
    return name_of(node) == "getitem"


def _tokens(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node | None]:
    """For each backward node, a value of the backward that is computed before it: one that it
    reads, or else the latest one.

    Excludes constants, which may be made at any time, and values of a call's own forward, such
    as a gradient inside it. Also excludes gradients that may have to be reduced first, unless
    the node itself reads them.
    """
    found: dict[torch.fx.Node, torch.fx.Node | None] = {}
    fixed = set[torch.fx.Node]()
    good = set[torch.fx.Node]()
    last: dict[
        frozenset[str], torch.fx.Node
    ] = {}  # by the checkpointed calls of a node; the latest comes last
    for node in graph.nodes:
        if node.op == "call_function" and (
            node.target in SHAPE_ONLY or fixed.issuperset(node.all_input_nodes)
        ):
            fixed.add(node)
        if _is_backward(node):
            around = frozenset(_regions(node))
            near = (x for x in node.all_input_nodes if x in good and around.issuperset(_regions(x)))
            found[node] = next(near, None) or next(
                (x for calls, x in reversed(last.items()) if calls <= around), None
            )
            value = node.meta.get("val")
            if node not in fixed and isinstance(value, torch.Tensor) and value.is_floating_point():
                good.add(node)
                if node.target is not placement.ALIGN:
                    last.pop(around, None)
                    last[around] = node
    return found


@attrs.define(eq=False)
class _Work:
    """What all checkpointed calls of a graph share: their nodes, and the tokens of the backward."""

    members: dict[str, list[torch.fx.Node]]  # of each call
    tokens: dict[torch.fx.Node, torch.fx.Node | None]  # of each backward node

    def enter(self, made: torch.fx.Node, reader: torch.fx.Node) -> None:
        """Register a node that was inserted for a reader, since outer calls may have to recompute
        its inputs.
        """
        self.tokens[made] = self.tokens[reader]
        for key in _regions(made):
            self.members[key].append(made)


@attrs.define(eq=False)
class _Region:
    """One checkpointed call, and the nodes inserted for its backward so far."""

    graph: torch.fx.Graph
    work: _Work
    key: str
    keeps: policies.Policy
    around: tuple[str, ...]  # the calls that contain this one
    copies: dict[torch.fx.Node, torch.fx.Node] = attrs.field(factory=dict)
    barred: dict[torch.fx.Node, torch.fx.Node] = attrs.field(
        factory=dict
    )  # a value -> the value that the backward reads instead
    late: set[torch.fx.Node] = attrs.field(
        factory=set
    )  # recomputed values, which no compiler can compute in the forward

    def recompute(self) -> None:
        """Have every backward node of this call read recomputed values."""
        members = self.work.members[self.key]
        inputs = {x for node in members for x in node.all_input_nodes}
        for reader in sorted(
            {user for x in inputs.union(members) for user in x.users if self.reads(user)}
        ):
            self.serve(reader)

    def reads(self, node: torch.fx.Node) -> bool:
        """Whether a node belongs to this call's backward, and so reads recomputed values. A node
        without annotations does.
        """
        if not _is_backward(node) or node.target in SHAPE_ONLY or self.key in _noted(node):
            return False
        return self.key in _noted(node).get("inside", (self.key,))

    def serve(self, reader: torch.fx.Node) -> None:
        """Make one backward node read recomputed copies of unsaved values, inserted right before
        it. It reads other values through `after`, as the copies do.
        """
        needed = set[torch.fx.Node]()
        queue = list(reader.all_input_nodes)
        while queue:
            node = queue.pop()
            if node not in needed and node not in self.copies and self.is_lost(node):
                needed.add(node)
                queue += node.all_input_nodes
        with self.graph.inserting_before(reader):
            for node in sorted(needed):
                self.copy(node, reader)
        reader.args, reader.kwargs = torch.fx.node.map_arg(
            (reader.args, reader.kwargs), self.current
        )

    def is_lost(self, node: torch.fx.Node) -> bool:
        """Whether a value is of this call's forward and not saved."""
        if self.key not in _noted(node) or node.op != "call_function":
            return False
        names = frozenset(names_of(node))
        if _is_item(node):
            return self.is_lost(args_of(node)[0]) and not (names and self.keeps(node, names))
        return not draws(node) and not self.keeps(node, names)

    def current(self, node: torch.fx.Node) -> torch.fx.Node:
        """The recomputed copy that the backward reads in place of a value, if there is one."""
        return self.copies.get(node) or self.barred.get(node, node)

    def copy(self, node: torch.fx.Node, reader: torch.fx.Node) -> None:
        """Recompute a value for a reader."""
        token = self.work.tokens[reader]
        for x in node.all_input_nodes if token else ():
            if x not in self.copies and x not in self.barred and not _is_early(x):
                self.bar(x, reader)
        computes = not is_view(node) and not _is_item(node) and node.target not in SHAPE_ONLY
        if (
            token
            and computes
            and node.all_input_nodes
            and not any(self.current(x) in self.late for x in node.all_input_nodes)
        ):
            self.bar(node.all_input_nodes[0], reader)
        again = self.copies[node] = self.graph.node_copy(node, self.current)
        again.meta = self.about(node, reader)
        again.meta["custom"][sources.RECOMPUTED] = True
        debug.erase_calls_inside(again)
        self.work.enter(again, reader)
        if any(x in self.late for x in again.all_input_nodes):
            self.late.add(again)

    def bar(self, x: torch.fx.Node, reader: torch.fx.Node) -> None:
        """Make recomputed ops read x through `after(x, token)`: they run no earlier than the
        backward.
        """
        into = self.copies if x in self.copies else self.barred
        after = self.graph.call_function(
            placement.AFTER, (self.current(x), self.work.tokens[reader])
        )
        after.meta = self.about(x, reader)
        self.work.enter(after, reader)
        into[x] = after
        self.late.add(after)

    def about(self, node: torch.fx.Node, reader: torch.fx.Node) -> dict[str, Any]:
        """The metadata of a recomputed copy of a node: in the phase and the calls of its reader. It
        has the reader's position.
        """
        noted = _noted(node)
        plain = {
            key: said
            for key, said in noted.items()
            if key not in sources.call_annotations(noted) and key not in ("names", "belongs_to")
        }
        there = sources.call_annotations(_noted(reader))
        return {
            **node.meta,
            "phase": "backward",
            "custom": {**plain, **there, "phase": "backward", "inside": self.around},
        }


def _is_early(node: torch.fx.Node) -> bool:
    """Whether a value is an input, a constant, or a view of one. Such values need not be saved."""
    node = owner_of(node)
    return node.op != "call_function" or not node.all_input_nodes or node.target in SHAPE_ONLY
