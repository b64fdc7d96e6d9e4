"""Values that all ranks use alike, if plain arguments are the same on them.

`to_local` of a replicated DTensor gives all ranks the same tensor. DTensor takes the gradient of
it for the same on all ranks, unless `grad_placements` says that ranks have terms of it. A plain
argument may differ between ranks, or not, as the labels of a batch. So where the tensor meets
plain arguments alone, its gradient is taken as DTensor takes it, and calls check that these
arguments are the same (runtime/arguments/alike.py). Where it meets a value that differs for
certain, such as a shard, or a collective follows, the gradient is the sum over ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...mesh import axes_of
from ...ops import placement, shard_map
from ...ops.nodes import args_of
from ...ops.prims import CALLS, Axes
from ...ops.text_formats import parse_axes, print_axes, print_paths
from .. import annotations as sources
from ..control_flow import bodies, endings
from ..dtensors.mixing import RESULTS
from ..dtensors.own_sizes import DIFFERS, RESULT
from ..inputs import Inputs
from . import varying
from .axis_names import current_scope
from .uses import (
    NONE,
    alike_of,
    axes_gone,
    is_differentiated,
    is_gathered,
    live,
    makes_invariant,
    standing_for,
)
from .varying_bodies import ENDINGS
from .varying_nodes import BACKWARD, children_of, graphs_of, is_wrap, name_of, nodes_in

# the kinds of values that enter, of `placement.shared`
ARGUMENT = "an argument"
PART = "a DTensor on a part of the mesh"
CLOSED_OVER = "<closed over>"  # in place of the path of an argument
# the place of the results of a step among the arguments of a loop; the first carries follow
LOOPS = {endings.scan: 0, endings.while_loop: 1}
CARRIED = (shard_map.vary, shard_map.as_invariant, shard_map.vary_alike, shard_map.vary_undecided)


@attrs.frozen
class Facts:
    """Known of a value: the axes over which it differs for certain, the arguments over
    whose axes it may differ, and the axes over which its gradient is said to be the same.
    """

    differs: Axes = NONE
    may: frozenset[tuple[str, str]] = frozenset()  # the path of an argument, and an axis
    alike: Axes = NONE


def settle(python: torch.fx.GraphModule, inputs: Inputs) -> None:
    """Have all arguments of each op of Dynamo's graph vary over the same axes (`varying.settle`),
    and find the values that all ranks use alike. Changes the graph in place.
    """
    varying.settle(python, inputs.name)
    graphs = [*graphs_of(python)]
    every = [node for graph in graphs for node in graph.nodes]
    if any(alike_of(x) or x.target is shard_map.as_invariant for x in every):
        values = Values(python, _paths(python, inputs))
        values.read(python, [])
        for graph in graphs:
            for node in graph.find_nodes(op="call_function", target=shard_map.vary):
                if not node.kwargs:  # of the user's: what each rank has of it is its own
                    values.settle(node)


class Values:
    """The values of Dynamo's graph, and of the bodies of its loops and branches."""

    def __init__(self, python: torch.fx.GraphModule, paths: dict[torch.fx.Node, str]) -> None:
        self.paths = paths
        mesh = current_scope().mesh
        self.every: Axes = frozenset(axes_of(mesh).names) if mesh else NONE
        self.of: dict[torch.fx.Node, Facts] = {}
        # the inputs of bodies by what is given for them, and the calls of bodies
        self.given: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.calls: dict[torch.fx.Graph, list[torch.fx.Node]] = {}
        self.bodies: dict[torch.fx.Node, torch.fx.GraphModule] = {}
        self.live = {x for graph in graphs_of(python) for x in live(graph)}
        self.modules = {x.graph: x for x in python.modules() if isinstance(x, torch.fx.GraphModule)}

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
        """Change one `vary`, over the axes over which all ranks use its value alike."""
        x, text = args_of(node)
        if node not in self.of or is_gathered(x):
            return
        found = {axis: self._way_over(node, axis) for axis in parse_axes(text)}
        for axis, way in sorted(found.items()):
            if way is not None:
                self._change(node, axis, *way)

    def _way_over(self, node: torch.fx.Node, axis: str) -> tuple[Any, str] | None:
        """The prim by which a value varies over an axis, and its text: `vary_alike` and the
        arguments that must be the same on all ranks, so that they use the value alike. None if
        they do not: it meets a value that differs, or the code does not say that the gradient is
        the same.
        """
        reached = [x for x in self._reached(node, axis) if x in self.live]
        certain = [x for x in reached if self._is_certain(x, axis)]
        is_made_invariant = any(makes_invariant(x, axis) for x in reached)
        if certain:
            counts_once = is_made_invariant or self._ends_alike(reached, certain, axis)
            line = sources.line_of(node.meta.get("stack_trace")) or ""
            return (shard_map.vary_undecided, line) if counts_once else None
        if not is_made_invariant and axis not in self.of[args_of(node)[0]].alike:
            return None
        may = _joined(self.of[x] for x in reached).may
        paths = {path for path, over in may if over == axis}
        return shard_map.vary_alike, print_paths(sorted(paths or {CLOSED_OVER}))

    def _ends_alike(
        self, reached: Sequence[torch.fx.Node], certain: Sequence[torch.fx.Node], axis: str
    ) -> bool:
        """Whether a value that is differentiated is the same on all ranks, beside values that
        differ.
        """
        if not any(axis in self.of[x].differs for x in certain):
            return False  # they communicate, as ranks do that have batches of their own
        return any(is_differentiated(x) for x in reached if x not in certain)

    def _change(self, node: torch.fx.Node, axis: str, prim: Any, text: str) -> None:
        """Have a value vary over one axis by another prim, and over the others as before."""
        x, axes = args_of(node)
        rest = [name for name in parse_axes(axes) if name != axis]
        with node.graph.inserting_after(node):
            made = node.graph.call_function(prim)
        node.replace_all_uses_with(made)
        made.args = (node, axis, text)
        made.meta = dict(node.meta)
        self.of[made] = self.of[node]
        node.args = (x, print_axes(rest))
        if not rest:
            made.args = (x, axis, text)
            node.graph.erase_node(node)

    def _facts(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Facts:
        before = _joined(self.of[x] for x in nodes_in((node.args, node.kwargs)))
        if is_wrap(node):
            (body,) = children_of(module, node)
            return self._called(body, node)
        if children_of(module, node) or name_of(node) in BACKWARD:
            return Facts(self.every)
        if node.target in ENDINGS:
            return self._ended(module, node, before)
        if node.target is operator.getitem:
            return self._item(node, before)
        if node.target is placement.shared:
            return self._shared(node, before)
        if node.target is shard_map.vary:
            return before
        if node.target in CALLS:
            differs = CALLS[node.target].varies(node, before.differs)
            gone = axes_gone(node)
            may = {(path, axis) for path, axis in before.may if axis not in gone}
            return Facts(differs, frozenset(may))
        differs = before.differs | node.meta.get(DIFFERS, NONE)
        return attrs.evolve(before, differs=differs)

    def _item(self, node: torch.fx.Node, before: Facts) -> Facts:
        """The facts of one of several values."""
        every, k = args_of(node)
        if not isinstance(every, torch.fx.Node) or not isinstance(k, int):
            return before
        if is_wrap(every):
            (output,) = self.bodies[every].graph.find_nodes(op="output")
            return self.of[args_of(output)[0][k]]
        rows = RESULTS.get(every.target, ())
        given = [args_of(every)[row] for row in rows]
        values = [self.of[xs[k]] for xs in given if k < len(xs)]
        return _joined(values) if rows else before

    def _ended(self, module: torch.fx.GraphModule, node: torch.fx.Node, before: Facts) -> Facts:
        """The facts of the results of a loop or a branch. A loop is read until its carries do not
        change.
        """
        carries = self._carries(node)
        if node.target not in LOOPS:
            is_known = node.target is endings.cond or not self._communicates(node)
            return before if is_known else Facts(self.every)
        while True:
            now = [self.of[x] for x, _ in carries]
            for x, after in carries:
                self.of[x] = _joined((self.of[x], self.of[after]))
            if now == [self.of[x] for x, _ in carries]:
                return before
            self._read_again(module, node)

    def _read_again(self, module: torch.fx.GraphModule, loop: torch.fx.Node) -> None:
        """Read the bodies of a loop again."""
        for wrap in self._wraps(loop):
            for node in (wrap, *wrap.users):
                self.of[node] = _joined((self.of[node], self._facts(module, node)))

    def _communicates(self, ending: torch.fx.Node) -> bool:
        """Whether ranks communicate in the bodies of a control-flow op."""
        every = [x for wrap in self._wraps(ending) for x in self.bodies[wrap].graph.nodes]
        return any(x.target in CALLS and x.target not in CARRIED for x in every)

    def _wraps(self, loop: torch.fx.Node) -> list[torch.fx.Node]:
        items = [x for x in loop.all_input_nodes if x.target is operator.getitem]
        sources = dict.fromkeys(args_of(x)[0] for x in items)
        return [x for x in sources if isinstance(x, torch.fx.Node) and is_wrap(x)]

    def _carries(self, loop: torch.fx.Node) -> list[tuple[torch.fx.Node, Any]]:
        """The carries of a loop as they enter its bodies, each with its next value."""
        if loop.target not in LOOPS:
            return []
        outs = args_of(loop)[LOOPS[loop.target]]
        entered = [
            x
            for wrap in self._wraps(loop)
            for x in wrap.all_input_nodes
            if x.target is operator.getitem and _is_entering(args_of(x)[0])
        ]
        count = len(args_of(loop)[LOOPS[loop.target] + 1])
        rows = [(x, args_of(x)[1]) for x in entered]
        return [(x, outs[k]) for x, k in rows if k < count]

    def _shared(self, node: torch.fx.Node, before: Facts) -> Facts:
        if alike := alike_of(node):
            return attrs.evolve(before, alike=before.alike | alike)
        if args_of(node)[1] not in (ARGUMENT, PART, placement.HELD):
            return before
        way = node
        while way.all_input_nodes:
            way = way.all_input_nodes[0]
        if way not in self.paths and args_of(node)[1] == ARGUMENT:
            return Facts(self.every)
        path = self.paths.get(way, CLOSED_OVER)
        return Facts(may=frozenset((path, axis) for axis in self.every))

    def _called(self, body: torch.fx.GraphModule, node: torch.fx.Node) -> Facts:
        """The facts of the results of a body."""
        given = [x for x in args_of(node)[1:] if isinstance(x, torch.fx.Node)]
        inputs = body.graph.find_nodes(op="placeholder")
        for x, inside in zip(given, inputs, strict=False):
            self.given.setdefault(x, []).append(inside)
        self.calls.setdefault(body.graph, []).append(node)
        self.bodies[node] = body
        return self.read(body, [self.of[x] for x in given])

    def _reached(self, node: torch.fx.Node, axis: str) -> Iterator[torch.fx.Node]:
        """The values that depend on one, bodies included, up to those that all ranks of an axis
        have again.
        """
        seen = {node}
        queue = [node]
        while queue:
            here = queue.pop()
            if name_of(here) in BACKWARD:  # a gradient is another value
                continue
            if here is not node:
                yield here
            if here.target in CALLS and axis in axes_gone(here):
                continue  # one value, whose cotangent is that of all ranks
            after = [*self._after(here), *self.given.get(here, ())]
            queue += [x for x in after if x not in seen]
            seen.update(after)

    def _after(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """The values that read one. Of several that enter or leave a body it is the one."""
        for user in node.users:
            if user.target in RESULTS:
                yield from standing_for(node, user)
                yield from (x for x, after in self._carries(user) if after is node)
            elif user.op == "output":
                yield from self._results(node, user)
            elif user not in self.bodies:
                yield user

    def _results(self, node: torch.fx.Node, output: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """The results of the calls of a body that are one of its values."""
        (returned,) = args_of(output)
        for call in self.calls.get(output.graph, ()):
            if not isinstance(returned, (list, tuple)):
                yield call
                continue
            for item in call.users:
                is_item = item.target is operator.getitem
                if not is_item or returned[args_of(item)[1]] is node:
                    yield item

    def _is_certain(self, node: torch.fx.Node, axis: str) -> bool:
        """Whether a value differs over an axis for certain, or ranks communicate it."""
        if children_of(self.modules[node.graph], node) and not is_wrap(node):
            return True
        if node.kwargs.get("where") == RESULT:
            return False
        if node.target in CALLS and node.target not in CARRIED:
            return axis in CALLS[node.target].axes_of(node)
        return axis in self.of[node].differs


def _paths(python: torch.fx.GraphModule, inputs: Inputs) -> dict[torch.fx.Node, str]:
    """The paths of the arguments, by the nodes of Dynamo's graph."""
    path_of = {id(x): path for path, x in inputs.named_tensors}
    given = _compat.codegen_of(python.graph).process_inputs(*inputs.positional)
    nodes = python.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, map(id, given), strict=False)
    return {node: path_of[x] for node, x in pairs if x in path_of}


def _is_entering(x: Any) -> bool:
    return isinstance(x, torch.fx.Node) and x.target is bodies.enter


def _joined(every: Iterable[Facts]) -> Facts:
    """Facts of a value that depends on others."""
    rows = [*every]
    return Facts(
        NONE.union(*(row.differs for row in rows)),
        frozenset[tuple[str, str]]().union(*(row.may for row in rows)),
        NONE.union(*(row.alike for row in rows)),
    )
