"""Sorts of rows that each rank may run on its own shard, as those of a mixture of experts.

Such a program sorts tokens by expert, multiplies the rows of each expert, and puts the rows back.
The order in between is a permutation over all ranks, but no result tells it: an op that reads a
sorted row treats all rows alike, or is one of `OPS`, until the rows are put back or summed. Places
on a rank are then those among its own rows, so a rank runs the same ops on its own rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ... import _compat
from ...capture.drawing import draws
from ...ops.nodes import args_of
from ...ops.placement import AFTER
from ...types import PARTIAL_KINDS, AxisPlacement, MeshPlacements
from .. import layout, rules
from ..emission.graph_builder import Builder, LocalShard
from ..rule_api.check_strategies import strategies_of
from ..rule_api.strategy import Choice, OpCall, arguments, call_of, named
from ..rules.lookups.gather_scatter import SCATTERS, with_contiguous_index
from ..rules.lookups.index import COPIES, counts_along
from .walk import Walk

aten = torch.ops.aten
SUM = "sum"
SORTS = (aten.sort.default, aten.sort.stable)
# Ops whose second result has places along a dim, and ops whose result has.
WITH_PLACES = {aten.topk.default, *SORTS, aten.max.dim, aten.min.dim}
PLACES_OF_EXTREMA = {aten.argmax.default, aten.argmin.default}
MOVES = {  # ops that keep elements as they are
    *COPIES,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
    aten._unsafe_view.default,
    aten.detach.default,
}
INTS = {torch.int32, torch.int64}  # dtypes that hold every place
COUNTING = {torch.float32, torch.float64, *INTS}  # dtypes that hold every count

# How a tensor depends on a sort: it has rows in the order of the sort, or the number of elements
# of each value, or where the rows of each value end.
COUNTS, ENDS = "counts", "ends"
# What sorted rows hold: the sorted elements, places among the sorted rows (in the order before the
# sort), numbers that no op may read; or k, for the places before the sort divided by k.
KEYS, INVERSE, UNREAD = "keys", "inverse", "unread"


@attrs.frozen
class Rows:
    """The kind of a tensor with one row along `dim` for each sorted element."""

    dim: int
    holds: str | int | None = None

    @property
    def has_numbers(self) -> bool:
        """Whether the elements are row numbers, which only some ops may read."""
        return self.holds not in (None, KEYS)


Kind = Rows | str | None
PLACES = Rows(0, 1)


@attrs.frozen
class RowShard:
    """The role of a tensor of which a rank holds the rows of its shard of the sorted elements.

    Args:
        dim: of the rows.
        each: the number of elements for each row.
    """

    dim: int
    each: int = 1

    def on(self, elements: AxisPlacement) -> AxisPlacement:
        """Return the placement on one axis, given the placement of the sorted elements."""
        _, unit = layout.dim_and_unit(elements)
        runs = unit // self.each if unit % self.each == 0 else 1
        return layout.joined(self.dim, runs, outer=layout.blocks(elements))


@attrs.frozen
class GroupShard:
    """The role of a tensor with one slice for each group of equal elements, as the weights of
    experts are.

    Args:
        dim: of the slices.
        own: the placement where a rank has rows of all groups.
    """

    dim: int
    own: str = "R"


Role = RowShard | GroupShard | str  # or the placement itself
ROWS = RowShard(0)
WEIGHTS, TERMS = GroupShard(0), GroupShard(0, SUM)


@attrs.frozen(eq=False)
class RowOp:
    """An op that a rank may run on its own sorted rows: the roles of its tensors, the kinds of
    its results.

    Args:
        ins: of its tensor arguments.
        outs: of its results.
        kinds: of its results.
        local: how a rank runs it on its own rows. None for the way of other shards.
        is_row_by_row: whether each row of its results needs that row of its inputs alone.
        reads_keys: whether it finds the slice of each row's group by the sorted elements.
    """

    ins: tuple[Role, ...]
    outs: tuple[Role, ...]
    kinds: tuple[Kind, ...]
    local: Callable[..., Any] | None = None
    is_row_by_row: bool = False
    reads_keys: bool = False

    def on(self, elements: AxisPlacement) -> Choice:
        """Return the strategy on one axis, given the placement of the sorted elements."""

        def placed(role: Role) -> AxisPlacement:
            if isinstance(role, GroupShard):
                return role.own
            return role.on(elements) if isinstance(role, RowShard) else role

        return tuple(map(placed, self.ins)), tuple(map(placed, self.outs))

    def by_group(self) -> Choice:
        """Return the strategy on an axis whose ranks have the rows of some groups each."""
        placed = lambda role: role if isinstance(role, str) else role.dim
        return tuple(map(placed, self.ins)), tuple(map(placed, self.outs))

    def keeps_rows(self, choice: Choice, *roles: type) -> bool:
        """Return whether a strategy for another axis leaves rows unsharded, and tensors of some
        other roles.
        """
        pairs = zip((*self.ins, *self.outs), (*choice[0], *choice[1]), strict=True)
        unsharded = (RowShard, *roles)
        return not any(isinstance(r, unsharded) and layout.shards(m, r.dim) for r, m in pairs)


@attrs.frozen(eq=False)
class Reading:
    """An op that reads sorted rows, with the kinds of its tensor arguments.

    Args:
        call: the op.
        kinds: of its tensor arguments, by node.
        elements: the node of the sorted elements.
        is_ascending: whether the least of them comes first.
        is_sorted: whether rows have another order than those of other tensors.
    """

    call: OpCall
    kinds: Mapping[Node, Kind]
    elements: Node
    is_ascending: bool
    is_sorted: bool = True

    def row_op(self, kinds: Sequence[Kind], other: Role = "R", term: Role = SUM) -> RowOp:
        """Make the row op whose results have some kinds.

        Args:
            kinds: of the results.
            other: the role of an argument without a kind.
            term: the role of a result without a kind.
        """
        roles: dict[Kind, Role] = {COUNTS: TERMS, ENDS: TERMS, None: other}
        role = lambda kind: RowShard(kind.dim) if isinstance(kind, Rows) else roles[kind]
        nodes = arguments_of(self.call)
        outs = tuple(term if kind is None else role(kind) for kind in kinds)
        return RowOp(tuple(role(self.kinds[x]) for x in nodes), outs, tuple(kinds))

    def reads(self, *kinds: Kind) -> bool:
        """Return whether the tensor arguments have exactly these kinds."""
        return [self.kinds[x] for x in arguments_of(self.call)] == [*kinds]

    def has_rows(self, node: Node, row: RowShard) -> bool:
        """Return whether a tensor has one row for so many sorted elements."""
        shape = node.meta["val"].shape
        (n,) = self.elements.meta["val"].shape
        return row.dim < len(shape) and shape[row.dim] * row.each == n

    def may_be(self, node: Node, kind: Kind, row: RowShard) -> bool:
        """Return whether a tensor has rows of a kind, or equal rows, which fit any kind."""
        if not self.has_rows(node, row):
            return False
        own = self.kinds[node]
        return own == kind or (own is None and is_constant_along(node, row.dim))


def arguments_of(call: OpCall) -> list[Node]:
    """List the nodes of a call's tensor arguments."""
    read: list[Node] = []
    torch.fx.node.map_arg((call.args, call.kwargs), read.append)
    return read


# The ops that know places or groups


def sort_places(r: Reading) -> RowOp | None:
    """Accept an argsort of the permutation: it gives the inverse permutation."""
    is_inverted = r.reads(PLACES) and not r.call["descending"]
    return r.row_op([Rows(0, UNREAD), Rows(0, INVERSE)]) if is_inverted else None


def divide(r: Reading) -> RowOp | None:
    """Accept a division of the permutation by the number of elements per row."""
    x, each = r.call.args[:2]
    kind = r.kinds[x]
    is_rounded = r.call.arg(2, "rounding_mode", "floor") is not None
    if not (isinstance(kind, Rows) and isinstance(kind.holds, int) and is_rounded):
        return None
    if not isinstance(each, int) or each < 1:
        return None
    return r.row_op([attrs.evolve(kind, holds=kind.holds * each)])


def cast(r: Reading) -> RowOp | None:
    """Accept a cast of row numbers, counts or group ends to a dtype that holds them."""
    (kind,) = r.kinds.values()
    is_number = isinstance(kind, Rows) and kind.has_numbers
    held = COUNTING if kind in (COUNTS, ENDS) else INTS if is_number else set()
    return r.row_op([kind]) if r.call.outs[0].dtype in held else None


def histogram(r: Reading) -> RowOp | None:
    """Accept a histogram of the sorted elements: it counts the rows of each group."""
    ((node, kind),) = r.kinds.items()
    low = r.call["min"]
    is_key = kind.holds == KEYS if isinstance(kind, Rows) else _same(node, r.elements)
    are_elements = is_key and node.meta["val"].shape == r.elements.meta["val"].shape
    counts_all = r.call["max"] > low and r.call.outs[0].dtype in COUNTING
    if not (r.is_ascending and are_elements and counts_all and is_at_least(r.elements, low)):
        return None
    return RowOp((ROWS,), (TERMS,), (COUNTS,))


def _same(a: Node, b: Node) -> bool:
    """Return whether two tensors have the same elements in the same order."""
    return source_of(a, COPIES) is source_of(b, COPIES)


def accumulate(r: Reading) -> RowOp | None:
    """Accept a cumsum of counts: it gives the end of each group."""
    counts = r.reads(COUNTS) and r.call.outs[0].dtype in COUNTING
    return r.row_op([ENDS]) if counts else None


# By the numbers of dims of both operands: their kinds, and that of the result. Contracted rows
# give a Partial sum.
GROUPED: dict[tuple[int, int], tuple[Kind, Kind, Kind]] = {
    (2, 3): (Rows(0), None, Rows(0)),
    (3, 2): (None, Rows(1), Rows(1)),
    (2, 2): (Rows(1), Rows(0), None),
}


def grouped_product(r: Reading) -> RowOp | None:
    """Accept a grouped matrix product whose groups are those of the sort."""
    form = r.call.ins[0].dim(), r.call.ins[1].dim()
    if r.call["offs"] is None or r.call["bias"] is not None or form not in GROUPED:
        return None
    *operands, out = GROUPED[form]
    return r.row_op([out], WEIGHTS, TERMS) if r.reads(*operands, ENDS) else None


def fallback_product(r: Reading) -> RowOp | None:
    """Accept the grouped product of the transformers library."""
    return r.row_op([Rows(0)], WEIGHTS) if r.reads(Rows(0), None, ENDS) else None


def fallback_backward(r: Reading) -> RowOp | None:
    """Accept the backward of the transformers library's grouped product."""
    is_of_groups = r.reads(Rows(0), None, ENDS, Rows(0))
    return r.row_op([Rows(0), None], WEIGHTS, TERMS) if is_of_groups else None


def lookup(r: Reading) -> RowOp | None:
    """Accept an op that reads or writes rows by the permutation or its inverse."""
    x, *rest = r.call.args
    if r.call.target in (aten.index.Tensor, aten.index_put.default):
        indices, *values = rest
        dim, *more = [d for d, at in enumerate(indices) if at is not None]
        at = indices[dim]
        adds = bool(r.call.arg(3, "accumulate", False))
        if more or at.meta["val"].dim() != 1:
            return None
    else:
        dim, at, *values = rest
        adds = r.call.target is aten.scatter_add.default
        if not x.meta["val"].dim():
            return None
        dim %= x.meta["val"].dim()
    kind = r.kinds[at]
    rows_dim = 0 if at.meta["val"].dim() == 1 else dim
    if kind == Rows(0, KEYS):
        return of_groups(r, x, dim, values[:1]) if adds or not values else None
    if not isinstance(kind, Rows) or not kind.has_numbers:
        return None
    if kind.holds == UNREAD or kind.dim != rows_dim:
        return None
    if values and not adds and _inverts(r, x, kind, values[0]):
        ins = tuple(ROWS if node in (x, at) else "R" for node in arguments_of(r.call))
        return RowOp(ins, (ROWS,), (Rows(0, INVERSE),), inverted)
    row = RowShard(dim)
    numbered, kind_of_x, kind_of_rows = (row, Rows(dim), None)
    if isinstance(kind.holds, int):
        are_keys = kind.holds == 1 and _same(x, r.elements)
        numbered, kind_of_x = RowShard(dim, kind.holds), None
        kind_of_rows = Rows(dim, KEYS if are_keys else None)
    roles: dict[Node, Role] = {x: numbered, at: RowShard(kind.dim)}
    out, kind_of_out = row, kind_of_rows
    if values:
        (rows, *_) = values
        is_lost = numbered.each > 1 and not adds  # all but one of the rows of each number
        if is_lost or rows.meta["val"].dim() != x.meta["val"].dim():
            return None
        if not (r.may_be(x, kind_of_x, numbered) and r.may_be(rows, kind_of_rows, row)):
            return None
        roles[rows] = row
        out, kind_of_out = numbered, kind_of_x
    elif r.kinds[x] != kind_of_x or not r.has_rows(x, numbered):
        return None
    ins = tuple(roles.get(node, "R") for node in arguments_of(r.call))
    return RowOp(ins, (out,), (kind_of_out,), functools.partial(itself, target=r.call.target))


def of_groups(r: Reading, x: Node, dim: int, values: Sequence[Node]) -> RowOp | None:
    """Accept an op that reads the slice of each row's group, or adds each row to it."""
    x_kind, *kinds_of_values = (r.kinds[node] for node in (x, *values))
    if x_kind is not None or len(r.kinds) != 2 + len(values):
        return None
    if not values:
        return RowOp((GroupShard(dim), ROWS), (RowShard(dim),), (Rows(dim),), reads_keys=True)
    is_zero = rules.fill_value(x.target, x.args, x.meta["val"].dtype) == 0
    if not is_zero or kinds_of_values != [Rows(dim)]:
        return None
    terms = GroupShard(dim, SUM)
    return RowOp((terms, ROWS, RowShard(dim)), (terms,), (None,), reads_keys=True)


def _inverts(r: Reading, x: Node, kind: Rows, values: Node) -> bool:
    """Return whether an index_put of an arange inverts the permutation."""
    is_written = r.call.target is aten.index_put.default and kind == PLACES
    (n,) = r.elements.meta["val"].shape
    is_new = r.kinds[x] is None and x.meta["val"].shape == (n,)
    return is_written and is_new and counts_along(values, n) == 0


def itself(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], target: Any
) -> Any:
    """Emit an op unchanged, on a rank's own rows."""
    args = with_contiguous_index(b, args) if target in SCATTERS else args
    return b.call(target, *args, **kwargs)


def inverted(b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]) -> Any:
    """Emit the inverse of a rank's own permutation."""
    x, indices, counted, *others = args
    value = counted.meta["val"]
    (n,) = shards[0].local_shape
    own = b.call(aten.arange.default, n, dtype=value.dtype, device=value.device)
    return b.call(aten.index_put.default, x, indices, own, *others, **kwargs)


# By op, or by the name of one that exists once its package is imported.
OPS: dict[object, Callable[[Reading], RowOp | None]] = {
    **dict.fromkeys(SORTS, sort_places),
    aten.div.Tensor_mode: divide,
    aten.floor_divide.default: divide,
    aten._to_copy.default: cast,
    aten.histc.default: histogram,
    aten.cumsum.default: accumulate,
    aten._grouped_mm.default: grouped_product,
    aten.index.Tensor: lookup,
    aten.index_put.default: lookup,
    aten.index_select.default: lookup,
    aten.gather.default: lookup,
    aten.scatter.src: lookup,
    aten.scatter_add.default: lookup,
    "transformers::grouped_mm_fallback": fallback_product,
    "transformers::grouped_mm_fallback_backward": fallback_backward,
}


# What a program says of the elements of a tensor


def original(x: Node) -> Node:
    """Follow a residual of the backward to the value that it is."""
    while x.target is AFTER:
        x = args_of(x)[0]
    return x


def result_of(x: Node) -> tuple[Node, int]:
    """Return the op and the number of the result that a node is."""
    x = original(x)
    if x.target is operator.getitem:
        source, number = args_of(x)
        return source, number
    return x, 0


def results(node: Node) -> Sequence[object]:
    """List the values of a node's results."""
    value = node.meta["val"]
    return value if isinstance(value, (tuple, list)) else (value,)


def is_constant_along(node: Node, dim: int) -> bool:
    """Return whether a graph proves that a tensor has equal elements all along a dim."""
    value = node.meta["val"]
    if is_filled(node) or value.shape[dim] == 1 or value.numel() == 1:
        return True
    is_copy = node.target is aten.copy.default
    if not (is_copy or node.target is aten.expand.default or rules.is_pointwise(node.target)):
        return False
    _, *written = nodes = node.all_input_nodes
    for read in written if is_copy else nodes:
        place = dim - value.dim() + read.meta["val"].dim()
        if place >= 0 and not is_constant_along(read, place):
            return False
    return True


def is_filled(node: Node) -> bool:
    """Return whether a node makes a constant tensor, and reads only shapes."""
    value = node.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and rules.fill_value(node.target, node.args, value.dtype) is not None


def is_at_least(node: Node, least: float) -> bool:
    """Return whether a graph proves that all elements are at least a number."""
    node = source_of(node, MOVES)
    low: object = None
    if node.target in PLACES_OF_EXTREMA or node.meta["val"].dtype is torch.uint8:
        low = 0
    elif node.target is aten.clamp.default:
        low = node.args[1] if len(node.args) > 1 else None
    elif node.target is operator.getitem:
        source, position = args_of(node)
        low = 0 if source.target in WITH_PLACES and position == 1 else None
    return isinstance(low, (int, float)) and low >= least


def source_of(node: Node, through: Container[object]) -> Node:
    """Follow copies and wide casts back to the tensor that has the same elements."""
    while node.target in through and _keeps_elements(node):
        node = args_of(node)[0]
    return node


def _keeps_elements(node: Node) -> bool:
    """Return whether an op is no cast to a dtype of few numbers."""
    dtype = node.meta["val"].dtype
    is_wide = dtype in INTS or dtype.is_floating_point
    return node.target is not aten._to_copy.default or is_wide


# The search for sorts that ranks may run on their own rows


@attrs.frozen(eq=False)
class LocalSort:
    """A sort that each rank may run on its own rows, with all ops on the sorted rows.

    Args:
        elements: those that are sorted.
        ops: the ops on sorted rows, by node.
        earlier: those of them that the program has before the sort, which count the elements.
        kinds: of the tensors that they read.
    """

    elements: Node
    ops: dict[Node, RowOp]
    earlier: tuple[Node, ...]
    kinds: dict[Node, Kind]

    @property
    def each(self) -> list[int]:
        """List the numbers of sorted elements per row among the tensors of its ops."""
        roles = [role for op in self.ops.values() for role in (*op.ins, *op.outs)]
        return sorted({role.each for role in roles if isinstance(role, RowShard)})


def local_sorts(graph: Graph, name: str) -> dict[Node, LocalSort]:
    """Find the sorts of a graph that each rank may run on its own rows.

    Args:
        graph: the graph.
        name: of the program, for errors.
    """
    found: dict[Node, LocalSort] = {}
    sort_of: dict[Node, Node] = {}  # of ops on sorted rows
    for node in graph.nodes:
        if node.target not in SORTS or node in sort_of:
            continue
        sort = _Search(node, name).run(graph)
        if sort is None:
            continue
        others = [sort_of[x] for x in sort.ops if x in sort_of]
        for other in others:
            found.pop(other, None)
        if not others:
            found[node] = sort
        for member in sort.ops:
            sort_of[member] = node
    return found


def is_ascending(sort: Node) -> bool:
    """Return whether a sort puts the least element first."""
    return not named(sort.target, sort.args, sort.kwargs)["descending"]


class _Search:
    """A pass over a graph that follows the rows of one sort until they are put back or summed."""

    def __init__(self, sort: Node, name: str) -> None:
        options = named(sort.target, sort.args, sort.kwargs)
        self.sort, self.name = sort, name
        self.elements: Node = options["self"]
        self.is_ascending = is_ascending(sort)
        self.ops: dict[Node, RowOp] = {}
        self.kinds: dict[Node, tuple[Kind, ...]] = {}  # of the results of each node

    def run(self, graph: Graph) -> LocalSort | None:
        """Run the pass. Returns None where an op reveals the order of the rows."""
        if self.elements.meta["val"].dim() != 1:
            return None
        earlier: tuple[Node, ...] = ()
        for node in graph.nodes:
            if node is self.sort:
                earlier = tuple(self.ops)
                self.note(node, RowOp((ROWS,), (ROWS, ROWS), (Rows(0, KEYS), PLACES)))
            elif not self.follow(node):
                return None
        kinds = {node: kinds[0] for node, kinds in self.kinds.items() if kinds}
        return LocalSort(self.elements, self.ops, earlier, kinds)

    def note(self, node: Node, op: RowOp) -> None:
        """Record an op on sorted rows, and the kind of each of its results."""
        self.ops[node] = op
        value = node.meta["val"]
        kinds = iter(op.kinds)
        several = value if isinstance(value, (tuple, list)) else (value,)
        results = [next(kinds) if isinstance(x, torch.Tensor) else None for x in several]
        self.kinds[node] = tuple(results)

    def follow(self, node: Node) -> bool:
        """Record the kinds of a node's results. Returns False if it reveals the order of the
        rows.
        """
        if node.target is operator.getitem:
            source, position = args_of(node)
            if source in self.kinds:
                self.kinds[node] = (self.kinds[source][position],)
            return True
        kinds = {x: self.kinds.get(x, (None,))[0] for x in arguments(node)}
        if node.target is AFTER:
            self.kinds[node] = tuple(kinds.values())[:1]
            return True
        is_counted = node.target is aten.histc.default
        if not (is_counted or any(kinds.values())) or is_filled(node):
            return True
        op = self.row_op(node, kinds)
        if op is not None:
            self.note(node, op)
        return op is not None or not any(isinstance(kind, Rows) for kind in kinds.values())

    def row_op(self, node: Node, kinds: Mapping[Node, Kind]) -> RowOp | None:
        """Return the node as an op on sorted rows; None if it is not one."""
        call = call_on_rows(node)
        if call is None:
            return None
        reading = Reading(call, kinds, self.elements, self.is_ascending)
        known = OPS.get(node.target) or OPS.get(rules.name_of(node.target))
        op = known(reading) if known else None
        return op or row_by_row(node, reading, self.name)


def call_on_rows(node: Node) -> OpCall | None:
    """Return the call of an op that a rank may run on its own rows alone; None for prims, random
    numbers, and ops with a rule of the user.
    """
    target = node.target
    is_op = isinstance(target, _compat.OpOverload)
    if not is_op or _compat.namespace_of(target) == "shardfn":
        return None
    if draws(node) or rules.of_user(target) is not None:
        return None
    return call_of(node)


def row_by_row(node: Node, reading: Reading, name: str) -> RowOp | None:
    """Accept an op with a strategy that shards all rows that it reads, so that it treats them
    alike.

    Args:
        node: of the op.
        reading: what is known of its arguments.
        name: of the program, for errors.
    """
    moves = node.target in MOVES and _keeps_elements(node)
    rows = [kind for kind in reading.kinds.values() if isinstance(kind, Rows)]
    if not rows or any(r.holds == UNREAD or (r.has_numbers and not moves) for r in rows):
        return None
    holds = rows[0].holds if moves else None
    call = reading.call
    for ins, outs in strategies_of(rules.find(node.target), call, name, node):
        pairs = zip(arguments_of(call), ins, strict=True)
        if not rules.takes_strided(call, (ins, outs)):
            continue
        if not all(_fits(reading, x, placement) for x, placement in pairs):
            continue
        kinds = [*_results(reading, outs, holds)]
        if len(kinds) == len(outs):
            role = lambda placement: (
                RowShard(placement) if isinstance(placement, int) else str(placement)
            )
            roles = tuple(map(role, ins)), tuple(map(role, outs))
            alone = all(isinstance(r, RowShard) for r in roles[1])
            return RowOp(*roles, tuple(kinds), is_row_by_row=alone)
    return None


def _results(r: Reading, outs: Sequence[AxisPlacement], holds: str | int | None) -> Iterator[Kind]:
    """Yield the kind of each result of an op that treats rows alike, as far as there are kinds."""
    for placement, x in zip(outs, r.call.outs, strict=True):
        if isinstance(placement, int) and x.shape[placement] == r.elements.meta["val"].shape[0]:
            yield Rows(placement, holds)
        elif placement in PARTIAL_KINDS:
            yield None
        else:
            return


def _fits(r: Reading, node: Node, placement: AxisPlacement) -> bool:
    """Return whether a strategy may place an argument so: sorted rows sharded, others
    replicated, or in the same order or constant along rows.
    """
    kind = r.kinds[node]
    if isinstance(kind, Rows):
        return placement == kind.dim
    if placement == SUM:
        return rules.fill_value(node.target, node.args, node.meta["val"].dtype) == 0
    if not isinstance(placement, int) or not r.has_rows(node, RowShard(placement)):
        return placement == "R"
    return not r.is_sorted or is_constant_along(node, placement)


# Placing


def place_row_op(walk: Walk, node: Node, op: RowOp, elements: MeshPlacements) -> None:
    """Place an op on sorted rows: each rank runs it on its own rows."""
    call, values = walk.call(node)
    strategies = strategies_of(rules.find(call.target), call, walk.name, node)
    others = [choice for choice in strategies if op.keeps_rows(choice)]
    fixed = {axis: op.on(placement) for axis, placement in enumerate(elements) if placement != "R"}
    placed = walk.weigh(call, values, node, others, fixed)
    walk.take(node, call, values, placed, op.local)
