"""Rows of experts that travel to the ranks of their experts, and back.

A program sorts tokens by expert, multiplies the rows of each expert with its weights, and puts the
rows back (local_sorts.py). If the weights are sharded over the experts, the ops between run where
the weights are: each rank sends its sorted rows to the ranks of their experts (dispatch), which
sort what comes by expert (route), and send the results back (combine).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...collectives import ALL_GATHER, ALL_REDUCE, RAGGED_ALL_TO_ALL
from ...ops.nodes import args_of
from ...ops.placement import AFTER
from ...row_bounds import row_bound
from ...types import PARTIAL_KINDS, ROWS, AxisPlacement, MeshPlacements
from .. import layout, plan, rules
from ..emission import emit_routes
from ..minimum_cut import INFINITE, minimum_cut
from ..redistribute import Move
from ..rule_api.check_strategies import strategies_of
from ..rule_api.strategy import arguments, call_of, named, tensors
from .local_sorts import (
    COUNTS,
    ENDS,
    KEYS,
    MOVES,
    SORTS,
    SUM,
    WITH_PLACES,
    GroupShard,
    LocalSort,
    RowOp,
    Rows,
    RowShard,
    is_ascending,
    is_constant_along,
    is_filled,
    local_sorts,
    place_row_op,
    result_of,
    results,
    source_of,
)
from .unsorted_rows import MATRICES, unsorted_rows
from .values import Value, value_of_slot
from .walk import Walk

aten = torch.ops.aten


def _swapped(node: Node, d: int) -> int:
    """Return the dim of the input that is a dim of a transposed tensor."""
    dims = node.meta["val"].dim()
    a, b = (int(x) % dims for x in args_of(node)[1:3])
    return {a: b, b: a}.get(d, d)


VIEWS: dict[Any, Callable[[Node, int], int]] = {  # that keep dim 0, or say where it goes
    aten.transpose.int: _swapped,
    aten.permute.default: lambda node, d: args_of(node)[1][d],
    aten.select.int: lambda node, d: d + (d >= args_of(node)[1]),
    aten._to_copy.default: lambda node, d: d,
    aten.clone.default: lambda node, d: d,
    aten.detach.default: lambda node, d: d,
    AFTER: lambda node, d: d,
}


SAME_ORDER = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.detach.default,
    AFTER,
}


# Which ops run where the experts are


@attrs.frozen(eq=False)
class Result:
    """One result of an op: a tensor with sorted rows."""

    op: Node
    number: int
    dim: int  # of the rows
    nbytes: int


def results_of(sort: LocalSort, node: Node) -> Iterator[Result]:
    """Yield the results of an op that have sorted rows."""
    made = [(i, x) for i, x in enumerate(results(node)) if isinstance(x, torch.Tensor)]
    op = sort.ops[node]
    for (i, x), role, kind in zip(made, op.outs, op.kinds, strict=True):
        if isinstance(role, RowShard) and role.each == 1:
            is_key = isinstance(kind, Rows) and kind.holds == KEYS and x.dim() == 1
            yield Result(node, i, role.dim, 0 if is_key else _nbytes(x))


def readers(node: Node, number: int) -> Iterator[Node]:
    """Yield the nodes that read one result of an op, and not only its shape."""
    is_several = isinstance(node.meta["val"], (tuple, list))
    for user in node.users:
        if is_several and user.target is operator.getitem:
            if args_of(user)[1] == number:
                yield from readers(user, 0)
        elif user.target is AFTER and args_of(user)[0] is node:
            yield from readers(user, 0)
        elif not is_filled(user):
            yield user


def is_of_groups(op: RowOp) -> bool:
    """Return whether an op has both sorted rows and slices of their groups."""
    roles = {type(role) for role in (*op.ins, *op.outs)}
    return {RowShard, GroupShard} <= roles and COUNTS not in op.kinds


def at_experts(sort: LocalSort) -> tuple[frozenset[Node], int]:
    """Find the ops that run where the experts are, so that the fewest bytes travel: those on
    slices of groups, and such row by row ops as are cheaper there.

    Returns:
        The ops, and the bytes of all rows that travel.
    """
    number = {node: i for i, node in enumerate(sort.ops)}
    source, sink = len(number), len(number) + 1
    count = sink + 1
    edges: dict[tuple[int, int], int] = {}
    for node, op in sort.ops.items():
        if is_of_groups(op):
            edges[source, number[node]] = INFINITE
        elif not op.is_row_by_row:
            edges[number[node], sink] = INFINITE
        for result in results_of(sort, node):
            leaving, arriving, count = count, count + 1, count + 2
            edges[number[node], leaving] = edges[arriving, number[node]] = result.nbytes
            for reader in readers(node, result.number):
                end = number.get(reader, sink)
                edges[leaving, end] = edges[end, arriving] = INFINITE
    turned = {(head, tail): room for (tail, head), room in edges.items()}
    above = minimum_cut(turned, sink, source)  # the smallest, where several cost the same
    sent = sum(room for (a, b), room in edges.items() if a in above and b not in above)
    return frozenset(node for node, i in number.items() if i in above), sent


def sends_matrices(sort: LocalSort, ops: Collection[Node]) -> bool:
    """Return whether a matrix of each row would travel, as where tokens read it too."""
    for node in ops:
        op = sort.ops[node]
        pairs = [*zip(arguments(node), op.ins, strict=True)]
        of_matrices = any(
            isinstance(role, GroupShard) and x.meta["val"].dim() >= MATRICES for x, role in pairs
        )
        if not (op.reads_keys and of_matrices):
            continue
        if any(
            x not in ops for result in results_of(sort, node) for x in readers(node, result.number)
        ):
            return True
        for x, role in pairs:
            is_row = isinstance(role, RowShard) and x not in sort.kinds
            if is_row and result_of(x)[0] not in ops and not is_constant_along(x, role.dim):
                return True
    return False


def counts_each(node: Node, elements: Node, groups: int) -> bool:
    """Return whether an op that counts elements counts those of each number from 0 apart, as many
    as there are groups; True for other ops.
    """
    if node.target is not aten.histc.default:
        return True
    options = named(node.target, node.args, node.kwargs)
    if options["bins"] != groups or options["min"] != 0:
        return False
    most = options["max"]
    return most == groups - 1 or (most == groups and is_below(elements, groups))


def is_below(elements: Node, bound: int) -> bool:
    """Return whether a graph proves that all elements are places in a dim of so many."""
    node = source_of(elements, MOVES)
    if node.target is not operator.getitem or args_of(node)[1] != 1:
        return False
    source = args_of(node)[0]
    if source.target not in WITH_PLACES:
        return False
    options = named(source.target, source.args, source.kwargs)
    return options["self"].meta["val"].shape[options["dim"]] <= bound


def chosen_of_each(elements: Node) -> int:
    """Return how many different groups each token has, if the elements are those of a top-k;
    1 if that is not proven.
    """
    node = elements
    while node.target in SAME_ORDER:
        node = args_of(node)[0]
    if node.target is not operator.getitem or args_of(node)[1] != 1:
        return 1
    source = args_of(node)[0]
    if source.target is not aten.topk.default:
        return 1
    options = named(source.target, source.args, source.kwargs)
    is_last = options["dim"] % source.meta["val"][1].dim() == source.meta["val"][1].dim() - 1
    return options["k"] if is_last else 1


# When it pays


@attrs.frozen(eq=False)
class Weights:
    """A tensor with one slice for each expert, that an op reads.

    Args:
        node: of the tensor.
        dim: of the slices.
        source: the node that it is, or is a view of, which has a value.
        value: of that node.
        source_dim: of the slices in that value.
    """

    node: Node
    dim: int
    source: Node
    value: Value
    source_dim: int

    @property
    def count(self) -> int:
        """The number of slices."""
        return self.node.meta["val"].shape[self.dim]

    def is_sharded(self, axis: int) -> bool:
        """Return whether the slices are sharded over a mesh axis, wherever the value is."""
        slots = [slot for slot, _ in self.value.slots.values()]
        return bool(slots) and all(
            layout.split(slot.placements[axis]) == (self.source_dim, 1)
            and layout.is_plain(slot.placements[axis])
            for slot in slots
        )


def weights_of(walk: Walk, sort: LocalSort, ops: Collection[Node]) -> list[Weights]:
    """List the tensors with slices of experts that ops read."""
    found: list[Weights] = []
    for x, dim in read_by(sort, ops):
        source, source_dim = viewed(x, dim, walk.values)
        if isinstance(value := walk.values.get(source), Value):
            found.append(Weights(x, dim, source, value, source_dim))
    return found


def expert_dims(graph: Graph, name: str, parameters: Collection[Node]) -> dict[Node, int]:
    """Return the dim of each parameter along which it has one slice for each expert.

    Args:
        graph: of a program.
        name: of the program, for errors.
        parameters: some of its inputs.
    """
    dims: dict[Node, int] = {}
    for sort in (*local_sorts(graph, name).values(), *unsorted_rows(graph, name).values()):
        ops, _ = at_experts(sort)
        for x, dim in read_by(sort, ops):
            source, dim = viewed(x, dim, parameters)
            if source in parameters:
                dims[source] = dim
    return dims


def read_by(sort: LocalSort, ops: Collection[Node]) -> dict[tuple[Node, int], None]:
    """Return the tensors with slices of experts that ops read, each with the dim of the slices."""
    found: dict[tuple[Node, int], None] = {}
    for node in sort.ops:
        if node in ops:
            for x, role in zip(arguments(node), sort.ops[node].ins, strict=True):
                if isinstance(role, GroupShard) and role.own == "R":
                    found[x, role.dim] = None
    return found


def viewed(x: Node, dim: int, until: Container[Node]) -> tuple[Node, int]:
    """Follow views back to one of some nodes, with the dim that is the one of a tensor."""
    while x not in until and x.target in VIEWS:
        dim = VIEWS[x.target](x, dim)
        x = args_of(x)[0]
    return x, dim


def dispatch_of(walk: Walk, node: Node, sort: LocalSort, now: MeshPlacements) -> Dispatch | None:
    """Choose the mesh axes over which the rows of a sort travel to their experts; None where the
    experts are not sharded, or are gathered for fewer bytes.

    Args:
        walk: the walk.
        node: the sort.
        sort: what is known of it.
        now: the placements of its elements.
    """
    ops, sent = at_experts(sort)
    weights = weights_of(walk, sort, ops)
    counts = {w.count for w in weights}
    if len(counts) != 1:
        return None
    (count,) = counts
    elements = sort.elements.meta["val"]
    if elements.dtype.is_floating_point:
        return None  # numbers between those of experts
    if elements.numel() == 1:
        return None  # a row is no shorter than a dim along which all is equal
    if not all(counts_each(x, sort.elements, count) for x in sort.ops):
        return None
    best: Dispatch | None = None
    least = gathered = float(_gathered_bytes(sort, ops, weights))
    every = _expert_axes(walk, weights)
    for axes in _choices_of_axes(walk, every):
        placements = _elements(walk, sort, now, axes)
        if placements is None:
            continue
        cost = len(axes) * sent / _ranks(walk, placements)
        if axes != every:
            cost += gathered / math.prod(walk.axes.sizes[k] for k in axes)
        if cost < least or (best is None and any(_is_asked(walk, k) for k in axes)):
            best = Dispatch(walk, node, sort, ops, placements, axes, weights)
            least = cost
    return best


def _expert_axes(walk: Walk, weights: Sequence[Weights]) -> tuple[int, ...]:
    """Return the mesh axes over which experts are sharded, the one that cuts first in front."""
    axes = walk.axes
    return tuple(
        k
        for k, n in enumerate(axes.sizes)
        if n > 1 and axes.names[k] not in axes.closed and any(w.is_sharded(k) for w in weights)
    )


def _is_asked(walk: Walk, axis: int) -> bool:
    """Return whether the user bounds the rows that travel over an axis."""
    return walk.axes.option(ROWS, axis) is not None


def _choices_of_axes(walk: Walk, every: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the axes over which rows may travel: those of the experts, all or one by one, with
    those that the user names.
    """
    asked = {k for k in every if _is_asked(walk, k)}
    for axes in dict.fromkeys([every, *((k,) for k in every)]):
        if axes and asked <= {*axes}:
            yield axes


def _elements(
    walk: Walk, sort: LocalSort, now: MeshPlacements, axes: Sequence[int]
) -> MeshPlacements | None:
    """Return the placements of the sorted elements for a dispatch over axes: sharded over them,
    which sends nothing. None if they cannot be.
    """
    if all(now[k] != "R" for k in axes):
        return now
    sharded = [*now]
    for k in axes:
        if now[k] == "R":
            sharded[k] = layout.joined(0, max(*sort.each, chosen_of_each(sort.elements)))
    return layout.canonical(sort.elements.meta["val"].shape, sharded, walk.axes.sizes)


def _ranks(walk: Walk, elements: MeshPlacements) -> int:
    """Return the number of ranks over which the elements are sharded."""
    sizes = zip(walk.axes.sizes, elements, strict=True)
    return math.prod(n for n, m in sizes if m != "R")


def _gathered_bytes(sort: LocalSort, ops: frozenset[Node], weights: Sequence[Weights]) -> int:
    """Return the bytes of the slices of all experts that are gathered, and of their gradients."""
    read = {(x.node, phase) for x in weights for phase in _phases(x.node, ops)}
    nbytes = sum(_nbytes(node.meta["val"]) for node, _ in read)
    for node in ops:
        outs = tensors(node.meta["val"])
        roles = zip(outs, sort.ops[node].outs, strict=True)
        nbytes += sum(_nbytes(x) for x, role in roles if isinstance(role, GroupShard))
    return nbytes


def _phases(weights: Node, ops: frozenset[Node]) -> set[str]:
    """Return the phases in which ops read some weights."""
    return {op.meta.get("phase", "forward") for op in weights.users if op in ops}


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# Placing


@attrs.frozen(eq=False)
class Route:
    """The slots that say where rows go over one mesh axis.

    Args:
        sent: (n, n), the rows that each rank of the axis sends to each.
        ends: (groups,), where the rows of each group end, on the rank of the group.
        order: for each row, sorted by group, its place among the rows that came.
        back: the inverse of it.
        groups: for each row its group.
        own: where the rows of a rank are not sorted: the order that sorts them, and its inverse.
    """

    sent: plan.Slot
    ends: plan.Slot
    order: plan.Slot
    back: plan.Slot
    groups: plan.Slot
    own: tuple[plan.Slot, ...]

    @property
    def sorting(self) -> tuple[plan.Slot, ...]:
        """The order that sorts the rows of a rank; none where they are sorted."""
        return self.own[:1]

    @property
    def unsorting(self) -> tuple[plan.Slot, ...]:
        """The inverse of that order."""
        return self.own[1:]


class Dispatch:
    """The rows of one sort, which travel over mesh axes to the ranks of their groups: over one axis
    after the other, sorted by group between them.

    Rows at their experts are a global tensor of `rows` for each rank, sharded over the axes of
    the tokens, which those of the experts are among.
    """

    def __init__(
        self,
        walk: Walk,
        node: Node,
        sort: LocalSort,
        ops: frozenset[Node],
        elements: MeshPlacements,
        axes: Sequence[int],
        weights: Sequence[Weights],
    ) -> None:
        self.walk, self.node, self.sort, self.ops = walk, node, sort, ops
        self.elements, self.axes, self.weights = elements, axes, weights
        self.tokens = [k for k, m in enumerate(elements) if m != "R"]
        self.count = math.prod(walk.axes.sizes[k] for k in self.tokens)
        self.most = self._most_rows()
        self.is_asked = any(_is_asked(walk, k) for k in axes)
        self.hops = self._made_hops()
        self.arrived: dict[tuple[Node, int], Value] = {}
        self._routes: list[Route] = []

    @property
    def groups(self) -> emit_routes.Groups:
        """The groups of each rank, when all axes have been travelled."""
        return self.hops[-1]

    def _most_rows(self) -> int:
        """Return the most sorted rows that a rank has before they travel."""
        shape = self.sort.elements.meta["val"].shape
        first = (0,) * len(self.elements)
        (most,) = layout.local_shape(shape, self.elements, self.walk.axes.sizes, first)
        return most

    def _made_hops(self) -> list[emit_routes.Groups]:
        """Return the groups of the ranks of each axis, in the order in which rows travel, with the
        rows that each rank can take: by default the most that can come.
        """
        walk, first = self.walk, self.weights[0]
        options = [walk.axes.option(ROWS, k) for k in self.axes]
        reads_keys = any(self.sort.ops[x].reads_keys for x in self.ops)
        strict = reads_keys and not is_below(self.sort.elements, first.count)
        name = f"{walk.name}, {walk.paths.get(first.source, 'experts')}"
        k = chosen_of_each(self.sort.elements)
        hops: list[emit_routes.Groups] = []
        senders, room = 1, self.most
        for axis, option in zip(self.axes, options, strict=True):
            n, outer = walk.axes.sizes[axis], hops[-1] if hops else None
            count = outer.most_of_a_rank if outer else first.count
            senders *= n
            own = layout.full_chunk(count, 1, n)
            every = min(n * room, senders * self.most // k * min(k, own))
            asked = next((x for x in (option, *options) if x is not None), None)
            room = every if asked is None else min(row_bound(asked, self.most), every)
            may_fail = strict or room < every
            hops.append(
                emit_routes.Groups(count, first.count, axis, n, room, strict, may_fail, name, outer)
            )
            strict = False
        return hops

    def place(self, walk: Walk, node: Node, op: RowOp) -> None:
        """Place an op on sorted rows: where their experts are, or where their tokens are."""
        if node not in self.ops:
            place_row_op(walk, node, op, self.elements)
            return
        kinds = [self.sort.kinds.get(x) for x in arguments(node)]
        values = [
            self.value(x, role, kind, node)
            for x, role, kind in zip(arguments(node), op.ins, kinds, strict=True)
        ]
        own = call_of(node)
        assert own is not None
        outs = tuple(
            self.at_groups(x, role.dim) if isinstance(role, RowShard) else x
            for x, role in zip(own.outs, op.outs, strict=True)
        )
        call = attrs.evolve(own, ins=tuple(v.fake for v in values), outs=outs)
        strategies = strategies_of(rules.find(own.target), own, walk.name, node)
        others = [x for x in strategies if op.keeps_rows(x, GroupShard)]
        fixed = {k: op.on(0) for k in self.tokens} | {k: op.by_group() for k in self.axes}
        placed = walk.weigh(call, values, node, others, fixed)
        walk.take(node, call, values, placed, self._local(node, op))
        for result in results_of(self.sort, node):
            self._bring_back(node, result)

    def _local(self, node: Node, op: RowOp) -> Any:
        """Return how a rank runs an op on the slices of its own groups."""
        if not op.reads_keys:
            return None
        dim = next(r.dim for r in reversed((*op.ins, *op.outs)) if isinstance(r, RowShard))
        return functools.partial(self.groups.own_groups, target=node.target, dim=dim)

    def _bring_back(self, node: Node, result: Result) -> None:
        """Note where the rows of a result are, and send them back if an op on tokens reads
        them.
        """
        values = self.walk.values[node]
        is_several = isinstance(values, list)
        value = values[result.number] if is_several else values
        self.arrived[node, result.number] = value
        if all(x in self.ops for x in readers(node, result.number)):
            return
        own = self.combined(value, result, node)
        if is_several:
            values[result.number] = own
        else:
            self.walk.values[node] = own

    # Values

    def at_groups(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a fake tensor of rows at their experts."""
        shape = list(x.shape)
        shape[dim] = self.groups.rows * self.count
        strides = layout.dense_strides(shape, layout.stride_order(x.shape, x.stride()))
        return x.new_empty_strided(shape, strides)

    def value(self, x: Node, role: Any, kind: Any, node: Node) -> Value:
        """Return an argument of an op that runs at the experts."""
        walk = self.walk
        if kind == ENDS:
            return self._cast(self.routes[-1].ends, x.meta["val"].dtype)
        if not isinstance(role, RowShard):
            return walk.values[x]
        source, number = result_of(x)
        if (source, number) not in self.arrived:
            self.arrived[source, number] = self._sent(x, role.dim, kind, node)
        return self.arrived[source, number]

    def _sent(self, x: Node, dim: int, kind: Any, node: Node) -> Value:
        """Return rows of tokens at their experts."""
        value = self.walk.values[x]
        fake = self.at_groups(value.fake, dim)
        if value.fill is not None:
            return Value(fake, early=False, fill=value.fill)
        if kind is None and is_constant_along(x, dim):
            return self._constant(x, fake, dim)
        if isinstance(kind, Rows) and kind.holds == KEYS and fake.dim() == 1:
            return self._cast(self.routes[-1].groups, fake.dtype)
        return self.dispatched(value, fake, dim, node)

    def _constant(self, x: Node, fake: torch.Tensor, dim: int) -> Value:
        """Make rows that are all equal as the program does, and as many as there are at the
        experts.
        """
        walk = self.walk
        own = x.meta["val"]
        values: list[Value] = []
        placed: list[MeshPlacements] = []
        for read in arguments(x):
            place = dim - own.dim() + read.meta["val"].dim()
            has_rows = place >= 0 and read.meta["val"].shape[place] == own.shape[dim]
            value = self.value(read, RowShard(place), None, x) if has_rows else walk.values[read]
            values.append(value)
            placed.append(self.on_axes(place, place) if has_rows else walk.replicated)
        ins = tuple(
            walk.redistribute(value, placements, x, implicit=True)
            for value, placements in zip(values, placed, strict=True)
        )
        out = walk.slot(fake, self.on_axes(dim, dim))
        walk.steps.append(plan.Apply(x, ins, (out,)))
        return value_of_slot(out)

    def _cast(self, slot: plan.Slot, dtype: torch.dtype) -> Value:
        """Return places or ends in another dtype."""
        if slot.value.dtype is dtype:
            return value_of_slot(slot)
        out = self.walk.slot(slot.value.to(dtype), slot.placements)
        local = functools.partial(emit_routes.cast, dtype=dtype)
        self._apply("cast", local, (slot,), (out,), self.node)
        return value_of_slot(out)

    # Steps

    def on_axes(
        self, tokens: AxisPlacement, experts: AxisPlacement, axis: int | None = None
    ) -> MeshPlacements:
        """Return placements by kind of axis: of tokens, of experts; others are replicated.

        Args:
            tokens: on the axes of the tokens that are not of the experts.
            experts: on those of the experts, or on one of them.
            axis: that one; the others are as those of the tokens. None: all.
        """
        placements: list[AxisPlacement] = ["R"] * len(self.elements)
        for k in self.tokens:
            placements[k] = tokens
        for k in self.axes if axis is None else (axis,):
            placements[k] = experts
        return tuple(placements)

    @property
    def routes(self) -> list[Route]:
        """The slots that say where rows go over each axis; made where they are first read."""
        if not self._routes:
            keys, *own = self._sorted_keys()
            for hop in self.hops:
                route = self._made_route(hop, keys, tuple(own))
                keys, own = route.groups, []
                self._routes.append(route)
        return self._routes

    def _made_route(
        self, hop: emit_routes.Groups, keys: plan.Slot, own: tuple[plan.Slot, ...]
    ) -> Route:
        """Add the steps that count rows, exchange the counts, and compute where rows go.

        Args:
            hop: the groups of the ranks of an axis.
            keys: the sorted numbers of a rank's own rows.
            own: where they are not sorted as the rows are: the order that sorts them, and its
                inverse.
        """
        walk, n, axis = self.walk, hop.ranks, hop.axis

        def slot(placements: MeshPlacements, *shape: int) -> plan.Slot:
            return walk.slot(keys.value.new_empty(shape, dtype=torch.int64), placements)

        counts = slot(self.on_axes(SUM, 0, axis), n * (hop.count + 1))
        self._apply("count_rows", hop.counts, (keys,), (counts,), self.node)
        every = slot(self.on_axes(SUM, "R", axis), n * (hop.count + 1))
        move = Move(ALL_GATHER, axis, counts.placements, every.placements)
        self._collective("gather_counts", move, counts, every)
        needed = self._needed(hop, every)
        rows = hop.rows * self.count
        at_rows = self.on_axes(0, 0)
        order, back, numbers = (slot(at_rows, rows) for _ in range(3))
        sent = slot(self.on_axes(SUM, "R", axis), n, n)
        ends = slot(self.on_axes(SUM, 0), hop.total)
        route = Route(sent, ends, order, back, numbers, own)
        if hop is self.groups:
            outs = (route.sent, route.ends, route.order, route.back, route.groups)
            self._apply("route", hop.route, (every, needed), outs, self.node)
        else:
            outs = (route.sent, route.order, route.back, route.groups)
            self._apply("route", hop.route_on, (every, needed), outs, self.node)
        return route

    def _sorted_keys(self) -> tuple[plan.Slot, ...]:
        """Return the sorted elements of a rank; where the program does not sort them, or has the
        greatest first, they are sorted, and the order and its inverse follow.
        """
        walk, node = self.walk, self.node
        is_sorted = node.target in SORTS
        value = walk.values[node][0] if is_sorted else walk.values[self.sort.elements]
        elements = walk.redistribute(value, self.elements, node, implicit=True)
        if is_sorted and is_ascending(node):
            return (elements,)
        dtypes = (elements.value.dtype, torch.int64, torch.int64)
        shape = elements.value.shape
        slots = [walk.slot(value.fake.new_empty(shape, dtype=x), self.elements) for x in dtypes]
        wraps = not any(x.target is aten.index_select.default for x in self.ops)
        count = self.groups.count if wraps else 0
        local = functools.partial(emit_routes.sort_rows, wrapped=count)
        self._apply("sort_rows", local, (elements,), tuple(slots), node)
        return tuple(slots)

    def _needed(self, hop: emit_routes.Groups, every: plan.Slot) -> plan.Slot:
        """Add the steps that find the most rows that a rank gets. Where they may be too many, all
        ranks of the mesh know those of all, so that all refuse alike.
        """
        placements = self.on_axes("max" if hop.may_fail else SUM, "R", hop.axis)
        needed = self.walk.slot(every.value.new_empty((2,)), placements)
        self._apply("needed_rows", hop.needed, (every,), (needed,), self.node)
        for k in self.tokens:
            if hop.may_fail and k != hop.axis:
                after = tuple("R" if i == k else m for i, m in enumerate(needed.placements))
                own, needed = needed, self.walk.slot(needed.value, after)
                self._collective(
                    "most_rows", Move(ALL_REDUCE, k, own.placements, after), own, needed
                )
        return needed

    def _collective(self, name: str, move: Move, source: plan.Slot, target: plan.Slot) -> None:
        """Add a step that redistributes a slot by one collective."""
        node = _step_node(name, (source,), (target,), self.node)
        step = plan.Redistribute(node, source, target, (move,), not self.is_asked)
        self.walk.steps.append(step)

    def dispatched(self, value: Value, fake: torch.Tensor, dim: int, node: Node) -> Value:
        """Send rows of tokens to their experts, and sort them by expert."""
        walk, routes = self.walk, self.routes
        now = value.readable(node.meta.get("phase", "forward"))
        placements = [
            RowShard(dim).on(self.elements[k])
            if k in self.tokens
            else ("R" if m in PARTIAL_KINDS or layout.shards(m, dim) else m)
            for k, m in enumerate(now[0].placements if now else walk.replicated)
        ]
        slot = walk.redistribute(value, tuple(placements), node, implicit=True)
        local = functools.partial(emit_routes.rows_first, dim=dim, most=self.most)
        rows = self._rows_first(
            "rows_first", local, (slot, *routes[0].sorting), dim, self.most, node
        )
        for hop, route in zip(self.hops, routes, strict=True):
            came = self._exchange("dispatch", rows, hop.axis, route, hop.rows, node, back=False)
            if hop is self.groups:
                at, to = dim, [dim if k in self.tokens else m for k, m in enumerate(placements)]
                rows = walk.slot(fake, tuple(to))
            else:  # they travel on
                at, rows = 0, walk.slot(came.value, came.placements)
            local = functools.partial(emit_routes.by_group, dim=at)
            self._apply("by_expert", local, (came, route.order), (rows,), node)
        return value_of_slot(rows, varies=value.varies, equal=value.equal)

    def combined(self, value: Value, result: Result, node: Node) -> Value:
        """Send rows back from their experts to their tokens."""
        walk, dim = self.walk, result.dim
        (slot, *_) = value.readable(node.meta.get("phase", "forward"))
        several = node.meta["val"]
        own = several[result.number] if isinstance(several, (tuple, list)) else several
        room = [self.most, *(hop.rows for hop in self.hops)]
        came, at = slot, dim
        for i in reversed(range(len(self.hops))):
            hop, route = self.hops[i], self.routes[i]
            local = functools.partial(emit_routes.by_sender, dim=at)
            ins = (came, route.back)
            sent = self._rows_first("by_sender", local, ins, at, hop.rows, node)
            came = self._exchange("combine", sent, hop.axis, route, room[i], node, back=True)
            at = 0
        placements = tuple(
            RowShard(dim).on(self.elements[k]) if k in self.tokens else m
            for k, m in enumerate(slot.placements)
        )
        out = walk.slot(own, placements)
        local = functools.partial(
            emit_routes.of_tokens, dim=dim, shape=tuple(own.shape), placements=placements
        )
        self._apply("rows", local, (came, *self.routes[0].unsorting), (out,), node)
        return value_of_slot(out, len(node.users), value.varies, value.equal)

    def _rows_first(
        self,
        name: str,
        local: Callable[..., Any],
        ins: tuple[plan.Slot, ...],
        dim: int,
        rows: int,
        node: Node,
    ) -> plan.Slot:
        """Add a step that makes rows ready to be sent: along their first dim, contiguous, as many
        on each rank.
        """
        fake = ins[0].value
        shape = [rows * self.count, *fake.movedim(dim, 0).shape[1:]]
        placements = [
            0 if k in self.tokens else m for k, m in enumerate(_first(ins[0].placements, dim))
        ]
        out = self.walk.slot(fake.new_empty(shape), tuple(placements))
        self._apply(name, local, ins, (out,), node)
        return out

    def _exchange(
        self,
        name: str,
        sent: plan.Slot,
        axis: int,
        route: Route,
        rows: int,
        node: Node,
        *,
        back: bool,
    ) -> plan.Slot:
        """Add a step that sends rows over an axis of the experts, where a rank has some room."""
        shape = [rows * self.count, *sent.value.shape[1:]]
        target = self.walk.slot(sent.value.new_empty(shape), sent.placements)
        move = Move(RAGGED_ALL_TO_ALL, axis, sent.placements, sent.placements, rows=(0, self.most))
        local = functools.partial(
            emit_routes.exchange, move=move, rows=rows, back=back, implicit=not self.is_asked
        )
        ins = (sent, route.sent)
        step = _step_node(name, ins, (target,), node)
        self.walk.steps.append(
            plan.Exchange(step, ins, (target,), local, move=move, implicit=not self.is_asked)
        )
        return target

    def _apply(
        self,
        name: str,
        local: Callable[..., Any],
        ins: tuple[plan.Slot, ...],
        outs: tuple[plan.Slot, ...],
        node: Node,
    ) -> None:
        """Add a step that is no op of the program."""
        self.walk.steps.append(plan.Apply(_step_node(name, ins, outs, node), ins, outs, local))


def _first(placements: MeshPlacements, dim: int) -> MeshPlacements:
    """Return the placements of a tensor after a dim became its first."""

    def placed(m: AxisPlacement) -> AxisPlacement:
        cut = layout.split(m)
        if cut is None:
            return m
        d = 0 if cut[0] == dim else cut[0] + 1 if cut[0] < dim else cut[0]
        return layout.joined(d, cut[1], layout.halo(m), layout.blocks(m))

    return tuple(map(placed, placements))


def _step_node(name: str, ins: Sequence[plan.Slot], outs: Sequence[plan.Slot], node: Node) -> Node:
    """Make the node of a step that no op of the program is, on behalf of one that is."""
    graph = Graph()
    args = tuple(plan.holders(graph, ins))
    return plan.part_of(node, graph, emit_routes.OwnStep(name), args, [x.value for x in outs])
