"""The kernels that Inductor makes of a graph, before it fuses them, and the values they store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import getitem

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.placement import AFTER
from . import op_kinds
from .copied_inputs import CHANNELS_LAST, COPY, IF_FORMULA, OF_STORED
from .spaces import (
    Space,
    column_of,
    flat,
    index_of,
    is_row_sum,
    layout_of,
    outputs_of,
    reduced,
    rows_of,
)

READS, LENGTH, LONGEST = 4, 50, 100  # of a formula that several ops read
MOST_READS = 12  # of any


@attrs.define(eq=False)
class Kernel:
    """The ops that run at once.

    Args:
        number: its place in the order.
        node: that it belongs to.
        reads: the stored values that it reads.
        writes: those that it stores.
        space: of a loop; None for a call, which is not fused.
        layouts: the values that a loop reads, each with the layout in which it does.
        after: kernels that run before it for another reason than its reads.
    """

    number: int
    node: Node
    reads: tuple[Node, ...]
    writes: tuple[Node, ...] = ()
    space: Space | None = None
    after: tuple[Kernel, ...] = ()
    layouts: tuple[tuple[Node, object], ...] = ()

    @property
    def is_sum(self) -> bool:
        """Whether it is a loop that adds."""
        return self.space is not None and self.space[0] != self.space[1]


@attrs.frozen
class Formula:
    """A value that its readers compute.

    Args:
        reads: the stored values, each with the layout in which it is read.
        length: the number of operations.
        is_heavy: whether it is costly to compute twice.
    """

    reads: dict[tuple[Node, object], None]
    length: int
    is_heavy: bool

    @property
    def values(self) -> tuple[Node, ...]:
        """The stored values that it reads."""
        return tuple(dict.fromkeys(node for node, _ in self.reads))


class Stored:
    """The kernels of a graph, and in whose memory each stored value lies.

    Args:
        graph: one rank's program.
        taken: the placeholder into whose memory each of some results goes, by its position.
    """

    def __init__(self, graph: Graph, taken: Mapping[int, int]) -> None:
        self.kernels: list[Kernel] = []
        self.home: dict[Node, Node] = {}
        self.makers: dict[Node, list[Kernel]] = {}
        self.readers: dict[Node, list[Kernel]] = {}
        self.formulas: dict[Node, Formula] = {}
        self.same: dict[Node, Node] = {}  # copies that are not made
        self.views: set[Node] = set()  # views of a formula that are stored, and it is not
        self.place = {node: k for k, node in enumerate(graph.nodes)}
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
            pass
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
        elif op_kinds.is_window(node):
            self.window(node)
        elif op_kinds.name(node) in op_kinds.REDUCTIONS:
            reads = self.read_by(node)
            self.add(node, reads, outputs_of(node), reduced(node))
        elif op_kinds.name(node) in op_kinds.ROWWISE:
            self.rowwise(node)
        elif node.target in op_kinds.JOINED:
            self.joined(node)
        elif node.target in (AFTER, op_kinds.WAIT):
            self.renamed(node)
        else:
            self.call(node)
        self.decide(node)

    def is_no_copy(self, node: Node) -> bool:
        """Whether a copy for one reader is none, as what it reads is stored."""
        if node.meta.get(COPY) != IF_FORMULA:
            return False
        return self.base(node.all_input_nodes[0]) in self.home

    def copied(self, node: Node) -> None:
        """Store what a node copies, where Inductor copies a view of a stored value."""
        kind = node.meta.get(COPY)
        if kind in (OF_STORED, CHANNELS_LAST):
            (x,) = node.all_input_nodes
            if kind == OF_STORED or self.base(x) is not x:
                self.store(x)

    def base(self, node: Node) -> Node:
        """The value of which another is a view."""
        while node not in self.views and op_kinds.is_view_or_item(node):
            node = node.all_input_nodes[0]
        return self.same.get(node, node)

    def formula(self, node: Node) -> Formula:
        """The formula of a node, with those of its inputs written into it."""
        inputs = op_kinds.read_by_formula(node)
        inner = self.formula_of(inputs)
        own = op_kinds.length(node)
        is_heavy = inner.is_heavy or op_kinds.is_heavy(node)
        length = inner.length + own
        return Formula(inner.reads, length, is_heavy)

    def formula_of(self, inputs: Iterable[Node]) -> Formula:
        """The formulas of some inputs, written into one."""
        reads: dict[tuple[Node, object], None] = {}
        length, is_heavy = 0, False
        for x in inputs:
            inner = self.formulas.get(self.base(x))
            if inner is None:
                reads[self.base(x), layout_of(x)] = None
                length += 1
            else:
                reads |= inner.reads
                length += inner.length
                is_heavy = is_heavy or inner.is_heavy
        return Formula(reads, length, is_heavy)

    def read_by(self, node: Node) -> tuple[Node, ...]:
        """The stored values that a loop over a node's inputs reads."""
        found: dict[Node, None] = {}
        for x in op_kinds.read_by_formula(node):
            inner = self.formulas.get(self.base(x))
            values = (self.base(x),) if inner is None else inner.values
            found |= dict.fromkeys(values)
        return tuple(found)

    def add(
        self,
        node: Node,
        reads: Iterable[Node],
        writes: Iterable[Node],
        space: Space | None = None,
        after: Iterable[Kernel] = (),
    ) -> Kernel:
        """Add a kernel."""
        kernel = Kernel(
            len(self.kernels),
            node,
            tuple(reads),
            tuple(writes),
            space,
            tuple(after),
            self.layouts(node),
        )
        self.kernels.append(kernel)
        for x in kernel.reads:
            self.readers.setdefault(x, []).append(kernel)
        for x in kernel.writes:
            self.makers.setdefault(x, []).append(kernel)
            self.home.setdefault(x, x)
            self.formulas.pop(x, None)
        return kernel

    def layouts(self, node: Node) -> tuple[tuple[Node, object], ...]:
        """The values that a node reads, with the formulas of its inputs written into it."""
        formula = self.formulas.get(self.base(node))
        if formula is None:
            formula = self.formula(node)
        return tuple((x, y or layout_of(x)) for x, y in formula.reads)

    def store(self, node: Node) -> Node:
        """Store the value that a node is a view of. Returns that value."""
        value = self.base(node)
        formula = self.formulas.get(value)
        if formula is not None:
            self.add(value, formula.values, [value], flat(value))
        return value

    def store_view(self, node: Node, formula: Formula) -> None:
        """Store a view of a formula for readers that need its strides. Others compute it."""
        self.views.add(node)
        space = flat(node)
        self.add(node, formula.values, [node], space)

    def call(self, node: Node, inputs: Iterable[Node] | None = None) -> None:
        """A kernel that is called, with stored inputs."""
        reads = [self.store(x) for x in inputs or node.all_input_nodes]
        in_place = node.target in op_kinds.IN_PLACE
        if in_place and self.is_last(node, reads[0]):
            self.home[node] = self.home[reads[0]]
        self.add(node, reads, outputs_of(node))

    def is_last(self, node: Node, value: Node) -> bool:
        """Whether a node is the last to read a value that no argument holds."""
        home = self.home[value]
        if home.op == "placeholder":
            return False
        queue, users = [value], set()
        while queue:
            now = queue.pop()
            users |= set(now.users)
            queue += [x for x in now.users if op_kinds.is_alias(x)]
        return all(self.place[x] <= self.place[node] for x in users)

    def renamed(self, node: Node) -> None:
        """A value by another name: after a token, or after a wait."""
        value, *others = [self.store(x) for x in node.all_input_nodes]
        self.home[node] = self.home[value]
        is_apart = self.home[value] is value and "collective" in value.meta
        if node.target is op_kinds.WAIT and is_apart:
            others += [self.base(x) for x in value.all_input_nodes]
        self.add(node, [value, *others], [node])

    def rowwise(self, node: Node) -> None:
        """A norm or a softmax: sums over rows, and a formula of its inputs and those."""
        reads = self.read_by(node)
        items = outputs_of(node)
        first = next((x for x in items if index_of(x) == 0), None)
        rest = [x for x in items if x is not first]
        space = rows_of(node)
        sums = [x for x in rest if is_row_sum(x, space)]
        if sums:
            self.add(node, reads, sums, space)
        for x in rest:
            if x not in sums:
                self.add(node, [*reads, *sums], [x], column_of(x, space))
        if first is not None:
            inner = self.formula(node)
            if op_kinds.name(node) == op_kinds.GROUPED:
                x = node.all_input_nodes[0]
                inner = self.formula_of([x])
            read = inner.reads | {(x, None): None for x in sums}
            length = inner.length + len(reads)
            self.formulas[first] = Formula(read, length, inner.is_heavy)

    def window(self, node: Node) -> None:
        """A pool, each result a formula of its window; a sum over windows where they meet."""
        first = self.base(node.all_input_nodes[0])
        formula = self.formulas.get(first)
        if formula is not None and len(formula.reads) > 1:
            self.store(first)
        if op_kinds.name(node) in op_kinds.SCATTERED:
            reads = self.read_by(node)
            space = flat(first)
            self.add(node, reads, [node], space)
            return
        inner = self.formula(node)
        for x in outputs_of(node):
            self.formulas[x] = inner

    def joined(self, node: Node) -> None:
        """Parts that are written into one buffer."""
        is_packed = node.target is torch.ops.shardfn.pack.default
        self.home[node] = node
        for x in node.all_input_nodes:
            value = self.base(x)
            is_own = value is x or self.is_turned(x)
            is_free = is_own and self.home.get(value, value) is value
            is_given = value.op == "placeholder" or self.is_fixed(value, node)
            is_shared = is_packed and len(x.users) > 1
            if is_free and not is_given and not is_shared:
                self.home[value] = node
                self.store(value)
                self.makers.setdefault(node, []).extend(self.makers[value])
            else:
                formula = self.formulas.get(value)
                reads = [value] if formula is None else formula.values
                self.add(node, reads, [node], flat(x))
        self.makers.setdefault(node, [])

    def is_turned(self, node: Node) -> bool:
        """Whether a node is the only view of a product: that of the transposed factors."""
        product = op_kinds.turned(node)
        return op_kinds.name(product) in op_kinds.PRODUCTS

    def is_fixed(self, value: Node, reader: Node) -> bool:
        """Whether the kernel of a value allocates it, or an earlier reader needs its strides."""
        makers = self.makers.get(value, [])
        is_product = op_kinds.name(value) in op_kinds.PRODUCTS
        is_called = any(x.space is None for x in makers)
        is_own = is_called and not is_product
        is_joined = value.target in op_kinds.JOINED
        is_read = self.is_read_as_laid_out(value, reader)
        return is_own or is_joined or is_read

    def is_read_as_laid_out(self, value: Node, reader: Node) -> bool:
        """Whether an op that comes before another one reads a stored value's strides."""
        queue = [value] if value in self.home else []
        while queue:
            now = queue.pop()
            end = self.place[reader]
            earlier = [x for x in now.users if self.place[x] < end]
            is_read = any(x.target in op_kinds.FIXED for x in earlier)
            if is_read:
                return True
            views = [x for x in earlier if op_kinds.is_view_or_item(x)]
            queue += views
        return False

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

    def finish(
        self, results: list[Node], taken: Mapping[int, int]
    ) -> list[Node]:
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
