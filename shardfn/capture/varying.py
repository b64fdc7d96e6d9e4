"""Which values of per-rank code are the same on all ranks of a mesh axis, and which are each rank's own.

Dynamo's graph is read once, before any derivative is taken. Where an op mixes the two kinds, what is the same on all ranks
passes the prim `vary` first, once for each value: its transpose is the sum over the ranks. So the gradient of what all
ranks share comes out summed, and the transpose of a sum sends nothing. (JAX's varying manual axes.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import CaptureError, PlacementError, problem
from . import manual, prims, sources

Axes = frozenset[str]
BACKWARD = ("_autograd_grad", "_vjp_grad")
CHECKPOINT = "tag_activation_checkpoint"
REQUIRES_GRAD = "_set_tensor_requires_grad"
NONE: Axes = frozenset()
VIEWS = {
    "view", "reshape", "t", "transpose", "permute", "select", "expand", "expand_as", "squeeze", "unsqueeze", "narrow", "chunk", "split",
    "unbind", "flatten", "unflatten", "diagonal", "movedim", "view_as", "detach", "getitem", "getattr", "swapaxes", "unfold", "alias",
}  # fmt: skip
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
            operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.setitem}  # fmt: skip


def settle(python: torch.fx.GraphModule, name: str) -> None:
    """Have every op of Dynamo's graph take values of one kind; the graph is changed in place.

    Args:
        python: Dynamo's graph.
        name: of the function, for errors.

    Raises:
        PlacementError: a result that is claimed to be the same on all ranks, and is not.
        CaptureError: a collective inside a branch or a loop.
    """
    if any(node.target in manual.PRIMS for graph in _graphs(python) for node in graph.nodes):
        _refuse_inside(python, name)
        Kinds(python).settle([])


def _graphs(module: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """The graph and those of its higher-order ops."""
    for child in module.modules():
        if isinstance(child, torch.fx.GraphModule):
            yield child.graph


def _refuse_inside(module: torch.fx.GraphModule, name: str) -> None:
    """Refuse collectives where ranks may not all come by, or not equally often."""
    for node in module.graph.nodes:
        for child in _children(module, node):
            if getattr(node.target, "_name", None) == CHECKPOINT:
                _refuse_inside(child, name)
                continue
            inside = [n for graph in _graphs(child) for n in graph.nodes if n.target in manual.PRIMS]
            if inside:
                source, fix = sources.line_of(inside[0].meta.get("stack_trace")), "the collective before or after it, or a Python loop"
                got = f"{inside[0].target.__name__} inside the higher-order op {node.target}"
                raise CaptureError(problem(name, got, fix=fix, source=source), source=source, fix=fix)


def _children(module: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """The graphs that a higher-order op is given."""
    if node.op != "call_function":
        return []
    found = [getattr(module, x.target, None) for x in node.all_input_nodes if x.op == "get_attr" and "." not in str(x.target)]
    return [x for x in found if isinstance(x, torch.fx.GraphModule)]


def _given(x: Any) -> list[torch.fx.Node]:
    """The nodes in an argument, lists included."""
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg(x, found.append)
    return found


class Kinds:
    """The kind of each value of one graph: over which axes it varies; of several values, a list."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.of: dict[torch.fx.Node, Any] = {}
        self.floor: dict[torch.fx.Node, Axes] = {}  # what is written into a value later on varies so
        self.varied: dict[tuple[torch.fx.Node, Axes], torch.fx.Node] = {}

    def settle(self, inputs: Sequence[Axes]) -> Any:
        """Find all kinds, then change the graph; returns the kind of the result."""
        while self.infer(inputs):
            pass
        for node in list(self.graph.nodes):
            if node.op in ("call_function", "call_method"):
                self.rewrite(node)
        for node, axes in self.floor.items():
            self.raise_at_birth(node, axes)
        (output,) = self.graph.find_nodes(op="output")
        return [self.flat(x) for x in output.args[0]] if isinstance(output.args[0], (list, tuple)) else self.flat(output.args[0])

    def flat(self, x: Any) -> Axes:
        """All axes over which something in an argument varies."""
        return NONE.union(*(_union(self.of.get(n, NONE)) for n in _given(x)))

    def infer(self, inputs: Sequence[Axes]) -> bool:
        """One reading from top to bottom; whether it learnt of writes that change what was read before."""
        feed, before = iter(inputs), dict(self.floor)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = next(feed, NONE)
            elif node.op in ("call_function", "call_method"):
                found = self.kind(node)
                self.of[node] = found | self.floor[node] if node in self.floor and isinstance(found, frozenset) else found
                for target in _written(node):
                    self.write(target, self.flat((node.args, node.kwargs)))
        return before != self.floor

    def write(self, target: torch.fx.Node, axes: Axes) -> None:
        """Note that something that varies is written into a value, and so into what it is a view of."""
        while axes - _union(self.of.get(target, NONE)):
            self.floor[target] = self.floor.get(target, NONE) | axes
            name = target.target if isinstance(target.target, str) else getattr(target.target, "__name__", "")
            if name not in VIEWS or not target.all_input_nodes:
                return
            target = target.all_input_nodes[0]

    def kind(self, node: torch.fx.Node) -> Any:
        """The kind of what a node makes."""
        target, args = node.target, node.args
        name = getattr(target, "__name__", "")
        if target in RESULT:
            return RESULT[target](self, node)
        if target is prims.align:
            return [self.flat(pair) for pair in zip(args[0], args[1], strict=True)]
        if name in BACKWARD:
            return [self.flat(x) for x in args[1]]
        if target is operator.getitem and isinstance(self.of.get(args[0]), list) and isinstance(args[1], int):
            return self.of[args[0]][args[1]]
        if getattr(target, "_name", None) == CHECKPOINT:
            return Kinds(_children(self.module, node)[0]).settle([self.flat(x) for x in args[1:]])
        return self.flat((args, node.kwargs))

    def rewrite(self, node: torch.fx.Node) -> None:
        """Bring what a node reads to the kind that it needs."""
        name = getattr(node.target, "__name__", "")
        if node.target in NEEDED:
            axes = NEEDED[node.target](node)
            self.bring(node, lambda x: axes)
        elif name in BACKWARD:
            self.bring_cotangents(node)
        elif name != REQUIRES_GRAD and node.target is not prims.align and node.target is not operator.getitem:
            axes = self.flat((node.args, node.kwargs)) | self.floor.get(node, NONE)
            if len(node.all_input_nodes) > 1:
                self.bring(node, lambda x: axes)

    def bring(self, node: torch.fx.Node, axes: Callable[[torch.fx.Node], Axes]) -> None:
        node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: self.vary(x, axes(x)))

    def bring_cotangents(self, node: torch.fx.Node) -> None:
        """A value and its cotangent are of one kind; what is differentiated by stays as it is."""
        outs, ins, *rest = node.args
        cotangents = rest[0] if rest and rest[0] is not None else [None] * len(outs)
        kinds = [self.flat([y, g]) for y, g in zip(outs, cotangents, strict=True)]
        outs = type(outs)(self.vary(y, k) for y, k in zip(outs, kinds, strict=True))
        if rest and rest[0]:
            rest[0] = [g if g is None else self.vary(g, k) for g, k in zip(cotangents, kinds, strict=True)]
        node.args = (outs, ins, *rest)

    def vary(self, x: torch.fx.Node, axes: Axes) -> torch.fx.Node:
        """The value as one that varies over these axes too; made once, where the value is."""
        missing = axes - _union(self.of.get(x, NONE))
        if not missing or isinstance(self.of.get(x), list) or x.op == "get_attr":
            return x
        if (x, missing) not in self.varied:
            self.varied[x, missing] = self.after(x, manual.vary, (x, ",".join(sorted(missing))))
            self.of[self.varied[x, missing]] = self.of.get(x, NONE) | missing
        return self.varied[x, missing]

    def after(self, x: torch.fx.Node, target: Any, args: tuple[Any, ...]) -> torch.fx.Node:
        """A call right after the birth of a value: there the transforms around it are those that it belongs to."""
        born = next((user for user in x.users if getattr(user.target, "__name__", "") == REQUIRES_GRAD), x)
        if x.op == "placeholder":
            born = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(born):
            made = self.graph.call_function(target, args)
        made.meta = {k: v for k, v in x.meta.items() if k != "val"}
        return made

    def raise_at_birth(self, node: torch.fx.Node, axes: Axes) -> None:
        """A value into which is written what varies: it varies from the beginning."""
        made_of = self.flat((node.args, node.kwargs)) if node.op != "placeholder" else NONE
        missing = axes - made_of
        if not missing:
            return
        readers = list(node.users)
        varied = self.after(node, manual.vary, (node, ",".join(sorted(missing))))
        for reader in readers:
            if reader is not varied:
                reader.replace_input_with(node, varied)


def _union(kind: Any) -> Axes:
    return NONE.union(*kind) if isinstance(kind, list) else kind


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a node writes to in place."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    first = [x for x in node.args[:1] if isinstance(x, torch.fx.Node)]
    in_place = node.target in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    return (first if in_place else []) + _given(node.kwargs.get("out"))


def _named(text: str) -> Axes:
    return frozenset(text.split(",")) if text else NONE


def _cut_axes(text: str) -> Axes:
    return frozenset(name for name, _, dim in manual.parsed(text) if dim is not None)


def _left(kinds: Kinds, node: torch.fx.Node) -> Axes:
    """The kind of a result of a shard_map, which must be the same on all ranks of the axes that do not cut it."""
    x, text, where = node.args
    every, cut = frozenset(name for name, _, _ in manual.parsed(text)), _cut_axes(text)
    wrong = sorted((every - cut) & kinds.flat(x))
    if wrong:
        said, source = " and ".join(wrong), sources.line_of(node.meta.get("stack_trace"))
        fix = f"psum or pmean it over {said}, or name {said} in its out_placements"
        head, path = where.split(": ")
        got = f"{path} is claimed to be the same on all ranks of {said}, and varies over {'it' if len(wrong) == 1 else 'them'}"
        raise PlacementError(problem(head, got, fix=fix, source=source), arg_path=path, source=source, fix=fix)
    return kinds.flat(x) - every


RESULT: dict[Any, Callable[[Kinds, torch.fx.Node], Axes]] = {
    manual.to_local: lambda kinds, node: kinds.flat(node.args[0]) | _cut_axes(node.args[1]),
    manual.from_local: _left,
    manual.vary: lambda kinds, node: kinds.flat(node.args[0]) | _named(node.args[1]),
    manual.psum: lambda kinds, node: kinds.flat(node.args[0]) - _named(node.args[1]),
    manual.extremum: lambda kinds, node: kinds.flat(node.args[0]) - _named(node.args[1]),
    manual.all_gather: lambda kinds, node: kinds.flat(node.args[0]) - {node.args[1]},
    manual.own_piece: lambda kinds, node: kinds.flat(node.args[0]) | {node.args[1]},
    manual.all_to_all: lambda kinds, node: kinds.flat(node.args[0]) | {node.args[1]},
    manual.ppermute: lambda kinds, node: kinds.flat(node.args[0]) | {node.args[1]},
    manual.axis_index: lambda kinds, node: frozenset((node.args[0],)),
}
NEEDED: dict[Any, Callable[[torch.fx.Node], Axes]] = {  # the axes over which a prim's argument is each rank's own
    manual.from_local: lambda node: _cut_axes(node.args[1]),
    manual.psum: lambda node: _named(node.args[1]),
    manual.extremum: lambda node: _named(node.args[1]),
    manual.all_gather: lambda node: frozenset((node.args[1],)),
    manual.all_to_all: lambda node: frozenset((node.args[1],)),
    manual.ppermute: lambda node: frozenset((node.args[1],)),
}
