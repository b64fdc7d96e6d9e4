"""Which values of per-rank code are varying over a mesh axis, and which are invariant.

This reads Dynamo's graph once, before any derivative is taken. If an op mixes varying and
invariant values, the invariant ones pass through the prim `vary`, once for each value. Its
transpose is the sum over the ranks. So the gradient of an invariant value is summed over the
ranks, and the transpose of a sum sends nothing. (JAX's varying manual axes.)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import CaptureError
from ...ops import placement, shard_map
from ...ops.nodes import args_of
from ...ops.prims import CALLS, Axes
from ...ops.text_formats import parse_axes, print_axes
from .. import annotations as sources
from ..dtensors.mixing import refuse_varying
from ..dtensors.own_sizes import DIFFERS, refused
from . import per_sample, varying_control_flow, varying_prims
from .gradients import (
    CERTAIN,
    CONTRADICTED,
    DIFFERENTIABLE,
    EQUAL,
    NONE,
    SUMMED,
    UNSAID,
    Fact,
    Facts,
    agreed,
    axes_in,
    each,
    needed_by_prim,
    needs_in,
    of_shared,
    raised,
    ways,
)
from .overwritten import refuse_overwritten
from .varying_nodes import (
    BACKWARD,
    PLUMBING,
    REQUIRES_GRAD,
    VIEWS,
    children_of,
    graphs_of,
    is_size,
    name_of,
    nodes_in,
    root_of,
    statistics_of,
    written_by,
)

# what torch.func calls of a value of which it takes a derivative
DIFFERENTIATED = ("_wrap_for_grad", REQUIRES_GRAD)


def settle(python: torch.fx.GraphModule, name: str) -> None:
    """Have all arguments of each op of Dynamo's graph vary over the same axes. Changes the
    graph in place.

    Args:
        python: Dynamo's graph.
        name: of the function, for errors.

    Raises:
        PlacementError: a varying result is declared invariant.
        CaptureError: a collective inside a branch or a loop.
    """
    if any(node.target in CALLS for graph in graphs_of(python) for node in graph.nodes):
        _refuse_inside(python, name)
        Kinds(python).settle([])


def _refuse_inside(module: torch.fx.GraphModule, name: str) -> None:
    """Refuse collectives where ranks may not all come by, or not equally often."""
    for node in module.graph.nodes:
        for child in children_of(module, node):
            if varying_control_flow.is_wrap(node):
                _refuse_inside(child, name)
                continue
            inside = [n for graph in graphs_of(child) for n in graph.nodes if n.target in CALLS]
            if inside:
                source = sources.line_of(inside[0].meta.get("stack_trace"))
                fix = "the collective before or after it, or a Python loop"
                got = f"{inside[0].target.__name__} inside the higher-order op {node.target}"
                raise CaptureError.of(name, got, fix=fix, source=source)


class Kinds:
    """The varying axes of each value of one graph. A node of several values has a list."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.of: dict[torch.fx.Node, Any] = {}
        self.written = {root_of(x) for node in self.graph.nodes for x in written_by(node)}
        # for values written in place: the varying axes from their creation on
        self.floor: dict[torch.fx.Node, Facts] = {}
        # what some op needs as each rank's own
        self.asked: set[torch.fx.Node] = set()
        self.varied: dict[Any, torch.fx.Node] = {}
        # the agreement of each control-flow op, before any body is changed
        self.known: dict[torch.fx.Node, Any] = {}
        self.leaving: list[Axes] = []  # in a body: the varying axes of its results

    def settle(self, inputs: Sequence[Axes]) -> None:
        """Infer all varying axes, then change the graph."""
        self.result(inputs)
        refuse_varying(self.graph, self.axes)
        refuse_overwritten(self.graph, self.axes)
        for node in self.ask():
            self.rewrite(node)
        for node, axes in self.floor.items():
            self.raise_at_birth(node, axes)

    def ask(self) -> list[torch.fx.Node]:
        """Record the values that some op needs as varying. Returns the ops."""
        nodes = [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]
        for node in nodes:
            needs = self.needs(node)
            self.asked.update(
                x
                for x in nodes_in((node.args, node.kwargs))
                if ways(_union(self.of.get(x, NONE)), needs)
            )
        return nodes

    def result(self, inputs: Sequence[Axes]) -> Any:
        """Infer all varying axes. Returns those of the result."""
        while self.infer(inputs):
            pass
        (returned,) = args_of(self.graph.find_nodes(op="output")[0])
        return (
            [self.flat(x) for x in returned]
            if isinstance(returned, (list, tuple))
            else self.flat(returned)
        )

    def axes(self, x: Any) -> Axes:
        """All axes over which any part of an argument varies."""
        return axes_in(self.flat(x))

    def flat(self, x: Any) -> Facts:
        """The facts of all parts of an argument, the axes over which it varies among them."""
        return NONE.union(*(_union(self.of.get(n, NONE)) for n in nodes_in(x)))

    def infer(self, inputs: Sequence[Axes]) -> bool:
        """One pass over the graph. Returns whether it found more varying axes of values that
        are written in place.
        """
        feed = iter(inputs)
        before = dict(self.floor)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = raised(next(feed, NONE), self.floor.get(node, NONE))
            elif node.op in ("call_function", "call_method"):
                found = self.kind(node)
                self.of[node] = (
                    raised(found, self.floor[node])
                    if node in self.floor and isinstance(found, frozenset)
                    else found
                )
                needs = self.needs(node)
                for x in nodes_in((node.args, node.kwargs)) if needs else ():
                    root = root_of(x)
                    missing = ways(_union(self.of.get(x, NONE)), needs)
                    if root in self.written and missing:
                        is_written = root in map(root_of, written_by(node))
                        is_as_given = is_written or CONTRADICTED in missing
                        more = needs if is_as_given else axes_in(needs)
                        self.floor[root] = self.floor.get(root, NONE) | more
        return before != self.floor

    def kind(self, node: torch.fx.Node) -> Any:
        """The varying axes of a node's result."""
        target = node.target
        args = args_of(node)
        if is_size(node):
            return NONE
        if (found := varying_control_flow.kind(self, node)) is not None:
            return found
        if target in CALLS:
            return varying_prims.result(self, node)
        if target is placement.align:
            return [self.flat(pair) for pair in zip(args[0], args[1], strict=True)]
        if getattr(target, "__name__", "") in BACKWARD:
            every = [self.axes(x) for x in args[1]]
            return [axes | each(CERTAIN, axes) | {DIFFERENTIABLE} for axes in every]
        if target is placement.shared:
            return of_shared(node, self.flat(args))
        if name_of(node) in DIFFERENTIATED:
            return self.flat(args) | {DIFFERENTIABLE}
        if (
            target is operator.getitem
            and isinstance(self.of.get(args[0]), list)
            and isinstance(args[1], int)
        ):
            return self.of[args[0]][args[1]]
        if self.is_apart(node):
            return self.flat((args, node.kwargs))
        every = [_union(self.of.get(x, NONE)) for x in nodes_in((args, node.kwargs))]
        return agreed(*every, _differing(node))

    def needs(self, node: torch.fx.Node) -> Facts:
        """The axes over which all inputs of a node must vary, and over which for certain."""
        if node.target in CALLS:
            return needed_by_prim(node)
        if varying_control_flow.is_part(node):
            return NONE
        if self.is_apart(node):
            return NONE
        return needs_in(self.flat((node.args, node.kwargs)) | _differing(node))

    def is_apart(self, node: torch.fx.Node) -> bool:
        """Whether the inputs of a node need not vary over the same axes."""
        if node.target is placement.align or name_of(node) in (*BACKWARD, *PLUMBING):
            return True
        return node.target is operator.getitem and isinstance(self.of.get(args_of(node)[0]), list)

    def rewrite(self, node: torch.fx.Node) -> None:
        """Raise the inputs of a node to the varying axes that it needs."""
        if varying_control_flow.rewrite(self, node):
            return
        if getattr(node.target, "__name__", "") in BACKWARD:
            self.bring_cotangents(node)
        elif node.target is shard_map.as_invariant:
            self.narrow(node)
        elif axes := self.needs(node):
            self.refuse_statistics(node, axes_in(axes))
            self.refuse_write(node)
            before = self.flat((node.args, node.kwargs))
            is_result = node.kwargs.get("where") == shard_map.RESULT
            node.args, node.kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda x: self.vary(x, axes, is_result=is_result)
            )
            if missing := node.meta.get(DIFFERS, NONE) - before:
                self.differ(node, missing)

    def refuse_statistics(self, node: torch.fx.Node, axes: Axes) -> None:
        """Refuse running statistics of a rank that would be lost in a value of all ranks.

        Raises:
            CaptureError: naming the op.
        """
        if any(axes - self.flat(x) for x in statistics_of(node)):
            raise CaptureError.of(
                "shard_map",
                f"{name_of(node)} writes the statistics of one rank to a buffer that all have",
                fix="sf.shard, which has the statistics of all ranks; or module.eval()",
                source=sources.line_of(node.meta.get("stack_trace")),
            )

    def refuse_write(self, node: torch.fx.Node) -> None:
        """Refuse a write in place that would make a value of all ranks one of each.

        Raises:
            CaptureError: naming the op.
        """
        axes = node.meta.get(DIFFERS, NONE)
        roots = [root_of(x) for x in written_by(node)]
        others = [x for x in node.all_input_nodes if root_of(x) not in roots]
        born = [self.kind(x) for x in roots if x.op != "placeholder"]
        if roots and axes - self.flat(others) - NONE.union(*map(_union, born)):
            raise refused("jit", node, "a write to a value that all ranks have")

    def differ(self, node: torch.fx.Node, axes: Axes) -> None:
        """Have a value that constants of each rank have made vary in more than name."""
        is_one = isinstance(node.meta.get("example_value"), torch.Tensor)
        for x in [node] if is_one else list(node.users):
            readers = list(x.users)
            text = print_axes(sorted(axes))
            made = self.after(x, shard_map.vary_in_value, (x, text))
            self.of[made] = self.of.get(x, NONE)
            for reader in readers:
                reader.replace_input_with(x, made)

    def narrow(self, node: torch.fx.Node) -> None:
        """Of the axes over which a value is taken for invariant, leave those over which it varies:
        its derivative differs for the others.
        """
        x, text = args_of(node)
        facts = self.flat(x)
        varying = [a for a in parse_axes(text) if a in facts]
        summed = [a for a in varying if Fact(SUMMED, a) in facts]
        if summed:
            with self.graph.inserting_before(node):  # x may have been written to
                x = self.graph.call_function(shard_map.undecided, _undecided(x, summed, SUMMED))
            x.meta = dict(node.meta)
        if varying:
            node.args = x, print_axes(varying)
        else:
            node.replace_all_uses_with(x)

    def bring_cotangents(self, node: torch.fx.Node) -> None:
        """Give a value and its cotangent the same varying axes. The differentiated inputs stay
        unchanged.
        """
        outs, ins, *rest = args_of(node)
        per_sample.warn_of_sums(node, self.axes(list(outs)), self.axes)
        cotangents = rest[0] if rest and rest[0] is not None else [None] * len(outs)
        kinds = [self.flat([y, g]) for y, g in zip(outs, cotangents, strict=True)]
        outs = type(outs)(self.vary(y, k) for y, k in zip(outs, kinds, strict=True))
        if rest and rest[0]:
            rest[0] = [
                g if g is None else self.vary(g, k) for g, k in zip(cotangents, kinds, strict=True)
            ]
        node.args = (outs, ins, *rest)

    def vary(self, x: torch.fx.Node, needs: Facts, *, is_result: bool = False) -> torch.fx.Node:
        """The value, made to vary as others that it meets. Made once, right after the value.

        Args:
            x: the value.
            needs: the axes over which they vary, and over which for certain.
            is_result: whether it meets none, and only leaves the function.
        """
        facts = _union(self.of.get(x, NONE))
        if is_result:  # whoever gives its cotangent gives that of each rank
            unsaid = facts & each(UNSAID, axes_in(needs))
            facts = facts - unsaid | each(EQUAL, frozenset(fact.axis for fact in unsaid))
        found = ways(facts, needs)
        is_other = x.op == "get_attr" or is_size(x)
        if not found or isinstance(self.of.get(x), list) or is_other:
            return x
        key = x, tuple(found.items())
        if key not in self.varied:
            source = x.args[0] if x.args else None
            is_alone = isinstance(source, torch.fx.Node) and ways(self.flat(source), needs) == found
            if is_alone and not is_result and self.is_view_of_asked(x):
                source = self.vary(args_of(x)[0], needs)
                args = (source, *x.args[1:])
                made = self.after(x, x.target, args, dict(x.kwargs), x.op)
            else:
                made = self.raise_one(x, found)
            self.varied[key] = made
            self.of[made] = raised(facts, needs)
        return self.varied[key]

    def raise_one(self, x: torch.fx.Node, found: dict[str, Axes]) -> torch.fx.Node:
        """A value by the prims that make it vary, for each reason (`gradients.ways`)."""
        for why, axes in found.items():
            text = print_axes(sorted(axes))
            if why != CONTRADICTED:
                prim = shard_map.vary_equal if why == EQUAL else shard_map.vary
                x = self.after(x, prim, (x, text))
            if why in (UNSAID, CONTRADICTED):
                x = self.after(x, shard_map.undecided, _undecided(x, sorted(axes), why))
        return x

    def is_view_of_asked(self, x: torch.fx.Node) -> bool:
        """Whether a value is a view of a value that is itself needed as varying, or contains
        all of one. Then one sum suffices.
        """
        if (
            name_of(x) not in VIEWS
            or root_of(x) in self.written
            or not x.args
            or not isinstance(x.args[0], torch.fx.Node)
        ):
            return False
        source = x.args[0]
        sizes = [
            n.meta["example_value"].numel()
            if isinstance(n.meta.get("example_value"), torch.Tensor)
            else -1
            for n in (x, source)
        ]
        return (
            -1 not in sizes
            and not isinstance(self.of.get(source), list)
            and (source in self.asked or sizes[0] == sizes[1])
        )

    def after(
        self,
        x: torch.fx.Node,
        target: Any,
        args: Any,
        kwargs: Any = None,
        op: str = "call_function",
    ) -> torch.fx.Node:
        """Insert a call right after the creation of a value, inside the same transforms."""
        born = next(
            (user for user in x.users if getattr(user.target, "__name__", "") == REQUIRES_GRAD), x
        )
        if x.op == "placeholder":
            born = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(born):
            made = self.graph.create_node(op, target, args, kwargs or {})
        made.meta = dict(x.meta)
        return made

    def raise_at_birth(self, node: torch.fx.Node, axes: Axes) -> None:
        """Make a value that is written in place varying from its creation on, if it ever
        varies.
        """
        born = (
            NONE
            if node.op == "placeholder"
            else varying_prims.result(self, node)
            if node.target in CALLS
            else self.flat(node.args)
        )
        found = ways(born, axes)
        if not found:
            return
        is_one = not isinstance(self.of.get(node), list)
        values = [node] if is_one else list(node.users)
        for x in values:
            readers = list(x.users)
            varied = self.raise_one(x, found)
            for reader in readers:
                if getattr(reader.target, "__name__", "") != REQUIRES_GRAD:
                    reader.replace_input_with(x, varied)


def _undecided(x: torch.fx.Node, axes: Sequence[str], why: str) -> tuple[Any, ...]:
    """The arguments of the prim `undecided`, of a value whose gradient is refused."""
    line = sources.line_of(x.meta.get("stack_trace")) or ""
    return x, print_axes(axes), why, line


def _differing(node: torch.fx.Node) -> Facts:
    """The facts of a node whose constants differ between ranks."""
    axes = node.meta.get(DIFFERS, NONE)
    return axes | each(CERTAIN, axes)


def _union(kind: Any) -> Facts:
    return NONE.union(*kind) if isinstance(kind, list) else kind
