"""Pullbacks that are made before a loop or branch and applied in its body.

A body has a graph of its own, in which the tensors that it closes over have no history. So the
derivative of a value from outside would be zero there. The body computes such a value again, from
its primals on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from ...errors import CaptureError
from ...ops.graph_copies import copied
from ...ops.nodes import args_of
from ...random import ambient
from .. import annotations as sources
from .. import transform_levels
from ..dynamo_nodes import children_of, is_wrap, name_of, nodes_in

Nodes = dict[torch.fx.Node, torch.fx.Node]  # the copy of each node
# torch.func's, and ours for torch.autograd.grad
DERIVATIVES = ("_autograd_grad", "gradients")
GRAD = "_grad_increment_nesting"
VMAP = "_vmap_increment_nesting"


@attrs.define(eq=False)
class Graph:
    """One graph of Dynamo's: the whole function, or the body of a loop or branch.

    Args:
        module: holds the graph.
        around: the levels of torch.func around it, by the names of the nodes that enter them.
        call: the node that runs a body.
        outer: the graph of that node.
    """

    module: torch.fx.GraphModule
    around: tuple[str, ...] = ()
    call: Any = None
    outer: Any = None
    # the copies in this body, and the states that values of this graph drew from, by the first
    # node of what is computed
    copies: dict[torch.fx.Node, Nodes] = attrs.field(factory=dict)
    states: Nodes = attrs.field(factory=dict)

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """The inputs of a body, in the order of the arguments of its call."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    @property
    def first(self) -> torch.fx.Node:
        """The first node that is not an input."""
        return next(x for x in self.module.graph.nodes if x.op != "placeholder")

    def nodes(self) -> Iterator[tuple[torch.fx.Node, tuple[str, ...]]]:
        """The nodes of the graph, each with the levels of torch.func around it."""
        around = self.around
        for node in list(self.module.graph.nodes):
            yield node, around
            if name_of(node) in transform_levels.ENTERS:
                around = (*around, name_of(node))
            elif name_of(node) in transform_levels.LEAVES:
                around = around[:-1]

    def origin(self, x: torch.fx.Node) -> tuple[Graph, torch.fx.Node]:
        """The graph that computes a value, and its node there."""
        if x.op != "placeholder" or self.outer is None:
            return self, x
        return self.outer.origin(args_of(self.call)[1 + self.inputs.index(x)])

    def closed_over(self, x: torch.fx.Node, home: Graph) -> torch.fx.Node:
        """The input of a body for a value of a graph around it, added if the body does not close
        over it yet.
        """
        if self is home:
            return x
        given = self.outer.closed_over(x, home)
        every = args_of(self.call)[1:]
        if given in every:
            return self.inputs[every.index(given)]
        self.call.args = (*self.call.args, given)
        with self.module.graph.inserting_before(self.first):
            inside = self.module.graph.placeholder(f"closed_over_{len(every)}")
        inside.meta = dict(given.meta)
        return inside

    def forget_unread(self) -> None:
        """Drop the inputs of a body that nothing reads."""
        args = list(self.call.args)
        for k, x in reversed([*enumerate(self.inputs)]):
            if not x.users:
                self.module.graph.erase_node(x)
                del args[1 + k]
        self.call.args = tuple(args)

    def call_in(self, home: Graph) -> torch.fx.Node:
        """The node of a graph around a body in which the body runs."""
        return self.call if self.outer is home else self.outer.call_in(home)


def compute_outer_primals(python: torch.fx.GraphModule, name: str) -> None:
    """Make each body compute by itself the outer values that it differentiates. Changes the graph
    in place.

    Raises:
        CaptureError: they are not computed in the function.
    """
    _compute_in_bodies(Graph(python), name)


def _compute_in_bodies(graph: Graph, name: str) -> None:
    for node, around in graph.nodes():
        if is_wrap(node):
            (module,) = children_of(graph.module, node)
            body = Graph(module, around, node, graph)
            _compute_in_bodies(body, name)
            body.forget_unread()
        elif name_of(node) in DERIVATIVES:
            _compute_primals_in_body(graph, node, name)


def _compute_primals_in_body(body: Graph, node: torch.fx.Node, name: str) -> None:
    """Make a body compute the outer values of one derivative, unless it does."""
    (primals,) = args_of(node)[1:2] or (node.kwargs.get("inputs"),)
    for x in nodes_in(primals):
        home, primal = body.origin(x)
        if home is body:
            continue
        steps = _steps_after(home, primal)
        if not steps or body.call_in(home) in steps:
            raise CaptureError.of(
                name,
                "the body of a loop or a branch differentiates values from outside of the body",
                fix="call sf.vjp or sf.grad inside the body, on a function of these values",
                source=sources.user_line(node),
            )
        copies = _copy_steps(body, home, steps)
        for value in nodes_in((node.args, node.kwargs)):
            copy = copies.get(body.origin(value)[1])
            if copy is not None:
                node.replace_input_with(value, copy)


def _steps_after(home: Graph, primal: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of the derivative in which a value is a primal, to the end of its forward."""
    entered: list[list[torch.fx.Node]] = []
    for node in home.module.graph.nodes:
        if name_of(node) in transform_levels.ENTERS:
            entered.append([])
        for steps in entered:
            steps.append(node)
        if name_of(node) in transform_levels.LEAVES:
            steps = entered.pop()
            if name_of(steps[0]) == GRAD and primal in steps:
                return steps
    return []


def _copy_steps(body: Graph, home: Graph, steps: Sequence[torch.fx.Node]) -> Nodes:
    """Copy into a body the nodes that compute a value in a graph around it. Returns the copies."""
    if steps[0] in body.copies:
        return body.copies[steps[0]]
    copies = body.copies[steps[0]] = {}
    (around,) = (levels for node, levels in home.nodes() if node is steps[0])
    shift = len(body.around) - len(around)
    is_mapped = body.around.count(VMAP) > around.count(VMAP)
    state = body.closed_over(_state_of(home, steps), home)
    graph = body.module.graph

    def given(x: torch.fx.Node) -> torch.fx.Node:
        module = getattr(home.module, str(x.target), None) if x.op == "get_attr" else None
        if x not in copies and isinstance(module, torch.fx.GraphModule):
            copies[x] = _add_graph(body, str(x.target), _shifted(module, shift))
        return copies[x] if x in copies else body.closed_over(x, home)

    with graph.inserting_before(body.first):
        drawing = graph.call_function(ambient.draw_from_state, (state, is_mapped))
        for node in steps:
            if node.op == "get_attr":
                continue
            if node.target is operator.getitem and args_of(node)[0] not in copies:
                # of several values that are computed before
                copies[node] = body.closed_over(node, home)
                continue
            copies[node] = graph.node_copy(node, given)
            _shift(copies[node], shift)
        graph.call_function(ambient.restore_source, (drawing,))
    return copies


def _state_of(home: Graph, steps: Sequence[torch.fx.Node]) -> torch.fx.Node:
    """The state that the random calls of some steps drew from."""
    first, last = steps[0], steps[-1]
    graph = home.module.graph
    if first not in home.states:
        with graph.inserting_before(first):
            calls = graph.call_function(ambient.calls_so_far)
        with graph.inserting_after(last):
            home.states[first] = graph.call_function(ambient.state_after, (calls,))
    return home.states[first]


def _add_graph(body: Graph, name: str, module: torch.fx.GraphModule) -> torch.fx.Node:
    """A graph as a value of a body, under a new name."""
    while hasattr(body.module, name):
        name += "_again"
    setattr(body.module, name, module)
    with body.module.graph.inserting_before(body.first):
        return body.module.graph.get_attr(name)


def _shifted(module: torch.fx.GraphModule, shift: int) -> torch.fx.GraphModule:
    """A copy of a graph whose level numbers count more enclosing levels."""
    fresh = torch.fx.GraphModule(module, copied(module.graph))
    for node in fresh.graph.nodes:
        _shift(node, shift)
    for name, child in [*fresh.named_children()]:
        if isinstance(child, torch.fx.GraphModule):
            setattr(fresh, name, _shifted(child, shift))
    return fresh


def _shift(node: torch.fx.Node, shift: int) -> None:
    """Raise the level number that a node names."""
    at = transform_levels.LEVEL_AT.get(name_of(node))
    if at is not None:
        node.update_arg(at, args_of(node)[at] + shift)
