"""The kernels that Inductor makes of a graph, before it fuses them, and the values they store."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from operator import getitem

import attrs
from torch.fx import Graph, Node

from ...ops.placement import AFTER
from . import op_kinds
from .buffers import joined, scattered
from .formulas import Kernel, Kernels
from .op_kinds import CHANNELS_LAST, COPY, IF_FORMULA, INSIDE, OF_STORED
from .spaces import flat, outputs_of, reduced

READS, LENGTH, LONGEST = 4, 50, 100  # of a formula that several ops read
MOST_READS = 12  # of any


class Stored(Kernels):
    """The kernels of a graph, and in whose memory each stored value lies.

    Args:
        graph: one rank's program.
        taken: the placeholder into whose memory each of some results goes, by its position.
    """

    def __init__(self, graph: Graph, taken: Mapping[int, int]) -> None:
        super().__init__(graph)
        self.collective: tuple[Kernel, ...] = ()  # the last one, and its wait if that is earlier
        self.holders = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            if node.op == "call_function":
                self.visit(node)
            elif node.op != "output":
                self.home[node] = node
        (output,) = graph.find_nodes(op="output")
        self.results = self.finish(list(output.args[0]), taken)

    def visit(self, node: Node) -> None:
        """Add the kernels of a node."""
        if op_kinds.is_view_or_item(node):
            if op_kinds.name(node) == "as_strided":
                self.store(node)  # strides are those of memory
        elif node.meta.get(COPY) == INSIDE:
            self.home[node] = node
        elif self.is_no_copy(node):
            self.same[node] = self.base(node.all_input_nodes[0])
        elif op_kinds.sum_of(node) is not None:
            pass  # computed with the sum
        elif node.target is getitem:
            if node not in self.home and node not in self.formulas:
                self.home[node] = node
        elif (product := op_kinds.product_of(node)) is not None:
            others = node.all_input_nodes
            rest = [x for x in others if op_kinds.turned(x) is not product]
            self.call(node, [*rest, *product.all_input_nodes])
        elif op_kinds.is_formula(node):
            self.copied(node)
            self.formulas[node] = self.formula(node)
        else:
            self.kernel(node)
        self.decide(node)

    def kernel(self, node: Node) -> None:
        """Add the kernels of an op that its readers do not compute."""
        if op_kinds.is_window(node):
            self.window(node)
        elif op_kinds.name(node) in op_kinds.REDUCTIONS:
            reads = self.read_by(node)
            self.add(node, reads, outputs_of(node), reduced(node))
        elif node.target in op_kinds.JOINED:
            joined(self, node)
        elif op_kinds.is_scatter(node):
            scattered(self, node)
        elif node.target in (AFTER, op_kinds.WAIT):
            self.renamed(node)
        else:
            self.call(node)

    def is_no_copy(self, node: Node) -> bool:
        """Whether a copy for one reader is none: what it reads is stored, by itself or for that
        reader.
        """
        if node.meta.get(COPY) != IF_FORMULA:
            return False
        (x,) = node.all_input_nodes
        is_expanded = 0 in x.meta["val"].stride()
        if self.base(x) is x or is_expanded:
            self.store(x)
        return self.base(x) in self.home

    def copied(self, node: Node) -> None:
        """Store what a node copies, where Inductor copies a view of a stored value."""
        kind = node.meta.get(COPY)
        if kind in (OF_STORED, CHANNELS_LAST):
            (x,) = node.all_input_nodes
            if kind == OF_STORED or self.base(x) is not x:
                self.store(x)

    def call(self, node: Node, inputs: Iterable[Node] | None = None) -> None:
        """A kernel that is called, with stored inputs."""
        reads = [self.store(x) for x in inputs or node.all_input_nodes]
        in_place = node.target in op_kinds.IN_PLACE
        if in_place and self.is_last(node, reads[0]):
            self.home[node] = self.home[reads[0]]
        inside = [node.meta[INSIDE]] if INSIDE in node.meta else []
        is_collective = "collective" in node.meta
        before = self.collective if is_collective else ()
        made = [*outputs_of(node), *inside]
        kernel = self.add(node, reads, made, after=before)
        if is_collective:
            self.collective = (kernel,)

    def renamed(self, node: Node) -> None:
        """A value by another name: after a token, or after a wait."""
        value, *others = [self.store(x) for x in node.all_input_nodes]
        self.home[node] = self.home[value]
        is_apart = self.home[value] is value and "collective" in value.meta
        if node.target is op_kinds.WAIT and is_apart:
            others += [self.base(x) for x in value.all_input_nodes]
        kernel = self.add(node, [value, *others], [node])
        if any(x.node is value for x in self.collective):
            self.collective = (*self.collective, kernel)

    def window(self, node: Node) -> None:
        """A pool, each result a formula of its window; a sum over windows where they meet."""
        first = self.base(node.all_input_nodes[0])
        formula = self.formulas.get(first)
        if formula is not None and len(formula.reads) > 1:
            self.store(first)
        if op_kinds.name(node) in op_kinds.SCATTERED:
            reads = self.read_by(node)
            space = flat(first)
            loop = None if formula is None else self.loop(first, space, None)
            self.add(node, reads, [node], space, loop=loop)
            return
        count = op_kinds.window_of(node)
        if op_kinds.name(node) in op_kinds.COMPARED and count > op_kinds.WRITTEN_OUT:
            results = flat(node.all_input_nodes[0])
            of_window = math.prod(outputs_of(node)[0].meta["val"].shape)
            space = of_window, of_window * count, True, results[3]
            self.add(node, self.read_by(node), outputs_of(node), space)
            return
        inner = self.formula(node)
        every = itertools.product(inner.reads, range(count))
        reads = {(x, (layout, k)): None for (x, layout), k in every}
        windows = attrs.evolve(inner, reads=reads)
        for x in outputs_of(node):
            self.formulas[x] = windows

    def decide(self, node: Node) -> None:
        """Store the value of a node if its readers would compute it too often."""
        if node.target is getitem or node.op != "call_function":
            value = node
        else:
            value = self.base(node)
        formula = self.formulas.get(value)
        if formula is None:
            return
        reads = len(formula.reads)
        is_long = formula.length > LENGTH
        if len(node.users) > 1:
            is_returned = any(x.op == "output" for x in node.users)
            is_called = any(map(op_kinds.is_call, node.users))
            is_result = is_returned and reads > 0
            is_input = is_called and reads > 1
            is_fixed = any(x.target in op_kinds.FIXED for x in op_kinds.readers(node))
            is_dear = formula.is_heavy or is_long or reads > READS
            is_realized = is_result or is_input
            is_view = value is not node
            if is_fixed and is_view and not is_realized:
                self.store_view(node, formula)
                return
            if is_realized or is_fixed or is_dear:
                self.store(value)
                return
        is_too_long = (reads > MOST_READS or is_long) and reads > 1
        if is_too_long or formula.length > LONGEST:
            self.store(value)

    def finish(self, results: list[Node], taken: Mapping[int, int]) -> list[Node]:
        """Store the results, in the memory of donated arguments where they are taken."""
        for k, into in taken.items():
            holder = self.holders[into]
            value = self.base(results[k])
            formula = self.formulas.get(value)
            reads = (value,) if formula is None else formula.values
            before = self.readers.get(holder, [])
            self.add(results[k], reads, [], flat(results[k]), before)
            for other in results[k + 1 :]:
                inner = self.formulas.get(self.base(other))
                if inner is not None and holder in inner.values:
                    self.store(other)
        rest = [x for k, x in enumerate(results) if k not in taken]
        return [self.store(x) for x in rest]
