"""Values that all ranks use alike, if plain arguments are the same on them.

`to_local` of a replicated DTensor gives all ranks the same tensor. DTensor takes the gradient of
it for the same on all ranks, unless `grad_placements` says that ranks have terms of it. A plain
argument may differ between ranks, or not, as the labels of a batch. So where the tensor meets
plain arguments alone, its gradient is taken as DTensor takes it, and calls check that these
arguments are the same (runtime/alike.py). Where it meets a value that differs for certain, such as
a shard, or a collective follows, the gradient is the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import attrs
import torch

from ... import _compat
from ...mesh import axes_of
from ...ops import placement, shard_map
from ...ops.nodes import args_of
from ...ops.prims import CALLS, Axes
from ...ops.text_formats import parse_axes, print_paths
from ..dtensors.own_sizes import DIFFERS, RESULT
from ..inputs import Inputs
from .axis_names import current_scope
from .varying_nodes import (
    BACKWARD,
    children_of,
    graphs_of,
    is_checkpoint,
    name_of,
    nodes_in,
)

NONE: Axes = frozenset()
CARRIED = shard_map.vary, shard_map.as_invariant, shard_map.vary_alike


@attrs.frozen
class Facts:
    """What is known of a value: the axes over which it differs for certain, the arguments that it
    depends on, and the axes over which its gradient is said to be the same.
    """

    differs: Axes = NONE
    paths: frozenset[str] = frozenset()
    alike: Axes = NONE


def settle(python: torch.fx.GraphModule, inputs: Inputs) -> None:
    """Find the values that all ranks use alike in Dynamo's graph, after `varying.settle`. Changes
    the graph in place.
    """
    graphs = [*graphs_of(python)]
    if any(_alike_of(node) for graph in graphs for node in graph.nodes):
        values = Values(python, _paths(python, inputs))
        values.read(python, [])
        for graph in graphs:
            for node in graph.find_nodes(
                op="call_function", target=shard_map.vary
            ):
                values.settle(node)


class Values:
    """The values of Dynamo's graph, and of the bodies of its checkpoints."""

    def __init__(
        self, python: torch.fx.GraphModule, paths: dict[torch.fx.Node, str]
    ) -> None:
        self.paths = paths
        mesh = current_scope().mesh
        self.every: Axes = frozenset(axes_of(mesh).names) if mesh else NONE
        self.of: dict[torch.fx.Node, Facts] = {}
        # the inputs of bodies by what is given for them, and the calls of bodies
        self.given: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.calls: dict[torch.fx.Graph, list[torch.fx.Node]] = {}
        self.modules = {
            x.graph: x
            for x in python.modules()
            if isinstance(x, torch.fx.GraphModule)
        }

    def read(self, module: torch.fx.GraphModule, inputs: Sequence[Facts]) -> Facts:
        """The facts of the results of a graph."""
        feed = iter(inputs)
        for node in module.graph.nodes:
            is_input = node.op == "placeholder"
            facts = next(feed, Facts()) if is_input else self._facts(module, node)
            known = self.of.get(node, Facts())  # of another call of a body
            self.of[node] = _joined((known, facts))
        (output,) = module.graph.find_nodes(op="output")
        return self.of[output]

    def settle(self, node: torch.fx.Node) -> None:
        """Change one `vary`, if all ranks use its value alike."""
        x, text = args_of(node)
        axes = frozenset(parse_axes(text))
        if node not in self.of or not axes <= self.of[x].alike:
            return
        reached = [*self._reached(node)]
        paths = frozenset[str]().union(*(self.of[n].paths for n in reached))
        if paths and not any(self._is_certain(n, axes) for n in reached):
            node.target = shard_map.vary_alike
            node.args = x, text, print_paths(sorted(paths))

    def _facts(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Facts:
        before = _joined(self.of[x] for x in nodes_in((node.args, node.kwargs)))
        if is_checkpoint(node):
            (body,) = children_of(module, node)
            return self._called(body, node)
        if children_of(module, node) or name_of(node) in BACKWARD:
            return Facts(self.every)
        if node.target is placement.shared:
            return self._shared(node, before)
        if node.target is shard_map.vary:
            return before
        if node.target is shard_map.from_local:
            return Facts(before.differs - CALLS[node.target].axes_of(node))
        if node.target in CALLS:
            differs = CALLS[node.target].varies(node, before.differs)
            return Facts(differs, before.paths)
        differs = before.differs | node.meta.get(DIFFERS, NONE)
        return attrs.evolve(before, differs=differs)

    def _shared(self, node: torch.fx.Node, before: Facts) -> Facts:
        if alike := _alike_of(node):
            return attrs.evolve(before, alike=before.alike | alike)
        if args_of(node)[1] != "an argument":
            return before
        way = node
        while way.all_input_nodes:
            way = way.all_input_nodes[0]
        if way not in self.paths:
            return Facts(self.every)
        return Facts(paths=frozenset((self.paths[way],)))

    def _called(self, body: torch.fx.GraphModule, node: torch.fx.Node) -> Facts:
        """The facts of the results of a checkpoint."""
        given = [x for x in args_of(node)[1:] if isinstance(x, torch.fx.Node)]
        inputs = body.graph.find_nodes(op="placeholder")
        for x, inside in zip(given, inputs, strict=False):
            self.given.setdefault(x, []).append(inside)
        self.calls.setdefault(body.graph, []).append(node)
        return self.read(body, [self.of[x] for x in given])

    def _reached(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """The values that depend on one, bodies of checkpoints included."""
        seen = {node}
        queue = [node]
        while queue:
            here = queue.pop()
            if name_of(here) in BACKWARD:  # its gradients are no part of the value
                continue
            after = [*here.users, *self.given.get(here, ())]
            if here.op == "output":
                after = self.calls.get(here.graph, [])
            elif here is not node:
                yield here
            queue += [x for x in after if x not in seen]
            seen.update(after)

    def _is_certain(self, node: torch.fx.Node, axes: Axes) -> bool:
        """Whether a value differs for certain, or ranks communicate it."""
        if children_of(self.modules[node.graph], node) and not is_checkpoint(node):
            return True
        if node.kwargs.get("where") == RESULT:
            return False
        if node.target in CALLS and node.target not in CARRIED:
            return bool(CALLS[node.target].axes_of(node) & axes)
        return bool(self.of[node].differs & axes)


def _paths(
    python: torch.fx.GraphModule, inputs: Inputs
) -> dict[torch.fx.Node, str]:
    """The paths of the arguments, by the nodes of Dynamo's graph."""
    path_of = {id(x): path for path, x in inputs.named_tensors}
    given = _compat.codegen_of(python.graph).process_inputs(*inputs.positional)
    nodes = python.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, map(id, given), strict=False)
    return {node: path_of[x] for node, x in pairs if x in path_of}


def _alike_of(node: torch.fx.Node) -> Axes:
    """The axes over which the code takes the gradient of a tensor for the same."""
    text = node.args[2:3] if node.target is placement.shared else ()
    return frozenset(parse_axes(str(*text))) if any(text) else NONE


def _joined(every: Iterable[Facts]) -> Facts:
    """What is known of a value that depends on others."""
    rows = [*every]
    return Facts(
        NONE.union(*(row.differs for row in rows)),
        frozenset[str]().union(*(row.paths for row in rows)),
        NONE.union(*(row.alike for row in rows)),
    )
