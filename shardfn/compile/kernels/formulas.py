"""Kernels, and the formulas that are written into them, as they are added one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch.fx import Graph, Node

from . import loops, op_kinds
from .copied_inputs import CONVOLUTIONS
from .loops import Breaks, Loop
from .spaces import Space, flat, layout_of, reduced_dims


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
        loop: its dims.
        place: the number of ops that Inductor schedules before it.
    """

    number: int
    node: Node
    reads: tuple[Node, ...]
    writes: tuple[Node, ...] = ()
    space: Space | None = None
    after: tuple[Kernel, ...] = ()
    layouts: tuple[tuple[Node, object], ...] = ()
    loop: Loop = Loop((), ())
    place: int = 0

    @property
    def is_sum(self) -> bool:
        """Whether it is a loop that adds."""
        return self.space is not None and self.space[0] != self.space[1]

    @property
    def is_last(self) -> bool:
        """Whether its loop has channels last."""
        return self.space is not None and self.space[3]


@attrs.frozen
class Formula:
    """A value that its readers compute.

    Args:
        reads: the stored values, each with the layout in which it is read.
        length: the number of operations.
        is_heavy: whether it is costly to compute twice.
        breaks: of the loop over its elements; None if all elements are alike.
    """

    reads: dict[tuple[Node, object], None]
    length: int
    is_heavy: bool
    breaks: Breaks | None = None

    @property
    def values(self) -> tuple[Node, ...]:
        """The stored values that it reads."""
        return tuple(dict.fromkeys(node for node, _ in self.reads))


class Kernels:
    """The kernels of a graph so far, and in whose memory each stored value lies.

    Args:
        graph: one rank's program.
    """

    def __init__(self, graph: Graph) -> None:
        self.kernels: list[Kernel] = []
        self.scheduled = 0  # ops that Inductor schedules for these
        self.home: dict[Node, Node] = {}
        self.makers: dict[Node, list[Kernel]] = {}
        self.readers: dict[Node, list[Kernel]] = {}
        self.formulas: dict[Node, Formula] = {}
        self.same: dict[Node, Node] = {}  # copies that are not made
        self.views: set[Node] = set()  # views of a formula that are stored, and it is not
        self.place = {node: k for k, node in enumerate(graph.nodes)}
        # loops over images run in the order of channels last or of dims; these are not told apart
        self.is_of_images = any(node.target in CONVOLUTIONS for node in graph.nodes)

    def base(self, node: Node) -> Node:
        """The value of which another is a view."""
        while node not in self.views and op_kinds.is_view_or_item(node):
            node = node.all_input_nodes[0]
        return self.same.get(node, node)

    def formula(self, node: Node) -> Formula:
        """The formula of a node, with those of its inputs written into it."""
        inputs = op_kinds.read_by_formula(node)
        moved = dict.fromkeys(op_kinds.moved_by(node), op_kinds.places_of(node))
        out = None if op_kinds.is_random(node) else loops.looped(node)
        inner = self.formula_of(inputs, moved, out, node)
        own = op_kinds.length(node)
        is_heavy = inner.is_heavy or op_kinds.is_heavy(node)
        length = inner.length + own
        breaks = inner.breaks if inner.breaks is not None else loops.of_places(node)
        return Formula(inner.reads, length, is_heavy, breaks)

    def formula_of(
        self,
        inputs: Iterable[Node],
        moved: Mapping[Node, object] | None = None,
        out: torch.Tensor | None = None,
        node: Node | None = None,
    ) -> Formula:
        """The formulas of some inputs, written into one.

        Args:
            inputs: of a formula.
            moved: those of which it reads the elements at other places than those of its own.
            out: over whose elements it runs.
            node: that moves them.
        """
        reads: dict[tuple[Node, object], None] = {}
        length, is_heavy = 0, False
        breaks: Breaks | None = None
        for x in inputs:
            base = self.base(x)
            where = layout_of(x)
            inner = self.formulas.get(base)
            if inner is None:
                own = {(base, where): None}
                length += 1
            else:
                own = inner.reads
                length += inner.length
                is_heavy = is_heavy or inner.is_heavy
                if where != layout_of(base):
                    own = {(y, (layout, where)): None for y, layout in own}
            if moved and x in moved:
                own = {(y, (layout, moved[x])): None for y, layout in own}
            reads |= own
            is_placed = inner is None or inner.breaks is not None
            if out is not None and is_placed:
                is_moved = moved is not None and x in moved
                new = _breaks_of(x, inner, out, node if is_moved else None)
                breaks = new if breaks is None else breaks | new
        return Formula(reads, length, is_heavy, breaks)

    def read_by(self, node: Node) -> tuple[Node, ...]:
        """The stored values that a loop over a node's inputs reads."""
        return self.values_of(op_kinds.read_by_formula(node))

    def values_of(self, inputs: Iterable[Node]) -> tuple[Node, ...]:
        """The stored values from which a loop computes some inputs."""
        found: dict[Node, None] = {}
        for x in inputs:
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
        inputs: Iterable[Node] | None = None,
        loop: Loop | None = None,
    ) -> Kernel:
        """Add a kernel.

        Args:
            node: that it belongs to.
            reads: the stored values that it reads.
            writes: those that it stores.
            space: of a loop.
            after: kernels that run before it for another reason than its reads.
            inputs: of the node, those that it reads if not all.
            loop: its dims, if not those of all elements that it writes.
        """
        if inputs is None:
            layouts = self.layouts(node)
        else:
            layouts = tuple(self.formula_of(inputs).reads)
        if space is not None and not space[2]:
            layouts = _of_columns(node, layouts)
        if space is not None and loop is None:
            loop = self.loop(node, space, inputs)
        kernel = Kernel(
            len(self.kernels),
            node,
            tuple(reads),
            tuple(writes),
            space,
            tuple(after),
            layouts,
            loop or Loop((), ()),
            self.scheduled,
        )
        self.kernels.append(kernel)
        self.scheduled += _scheduled(kernel)
        for x in kernel.reads:
            self.readers.setdefault(x, []).append(kernel)
        for x in kernel.writes:
            self.makers.setdefault(x, []).append(kernel)
            self.home.setdefault(x, x)
            self.formulas.pop(x, None)
        return kernel

    def loop(self, node: Node, space: Space, inputs: Iterable[Node] | None) -> Loop:
        """The dims of a loop over a node's elements, or over those of the one input."""
        results, elements, _, is_last = space
        if inputs is None:
            x, formula = loops.looped(node), self.formulas.get(self.base(node))
            formula = formula or self.formula(node)
            home = self.home.get(self.base(node), node)
        else:
            first, *_ = inputs
            x, home = first.meta["val"], node
            formula = self.formula_of([first], None, x)
        breaks = formula.breaks or frozenset()
        if x is not None and home.target in op_kinds.JOINED:
            breaks |= loops.written(x, home.meta["val"])
        is_image = x is not None and x.ndim > 3 and self.is_of_images
        if x is None or is_last or is_image or x.numel() != elements:
            return loops.plain(results, elements)
        return loops.loop_over(x, breaks, reduced_dims(node) if results != elements else ())

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
        value = node.meta["val"]
        given = self.base(node).meta["val"]
        self.views.add(node)
        space = flat(node)
        loop = None
        if value.is_contiguous() and given.is_contiguous():
            breaks = formula.breaks or frozenset()
            loop = loops.loop_over(value, breaks)
        self.add(node, formula.values, [node], space, loop=loop)

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


def _of_columns(
    node: Node, layouts: tuple[tuple[Node, object], ...]
) -> tuple[tuple[Node, object], ...]:
    """The layouts in which a sum reads values whose elements it does not add in the order of
    memory: those of other sums over the same dims.
    """
    dims = tuple(sorted(reduced_dims(node)))
    return tuple((x, (layout, dims)) for x, layout in layouts)


def _scheduled(kernel: Kernel) -> int:
    """The number of ops that Inductor schedules for a kernel: each result of a call of torch is
    one of its own.
    """
    if kernel.space is not None:
        count = 1 if kernel.writes else 2  # a value, and its copy into an argument
        return op_kinds.SUMS.get(op_kinds.name(kernel.node), count)
    is_one = op_kinds.is_single(kernel.node)
    return 1 if is_one else 1 + len(kernel.writes)


def _breaks_of(node: Node, inner: Formula | None, out: torch.Tensor, mover: Node | None) -> Breaks:
    """The strides of a result at which a loop cannot merge dims, as it computes an input.

    Args:
        node: the input.
        inner: its formula, if it is not stored.
        out: over whose elements the loop runs.
        mover: the op that reads its elements at other places, if one does.
    """
    if mover is not None:
        return loops.moved_breaks(mover, out)
    within = inner.breaks if inner is not None else None
    return loops.breaks_of(node, out, within or frozenset())
