"""Ops whose numbers are places of rows: each gives on the rows of a rank what it gives on all
rows, since the places on a rank are those among its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Node

from ...emission.builder import Builder, Piece
from ...rule_api.strategy import OpCall, named
from ...rules.lookups.counted import COPIES, along
from ...rules.lookups.reads import SCATTERS, with_own_index
from .elements import INTS, is_at_least, is_constant_along, source_of
from .kinds import POSITIONS, UNREAD, Groups, Kind, Member, Own, Role, Rows

aten = torch.ops.aten
ROWS = Own(0)
PLACES = Rows(0, numbers=1)
INVERSE = Rows(0, numbers=POSITIONS)


@attrs.frozen(eq=False)
class Reading:
    """An op, and how its tensor arguments depend on a sort.

    Args:
        call: the op.
        nodes: its tensor arguments.
        kinds: of these.
        ids: the node of the sorted elements.
        is_ascending: whether the least of them comes first.
    """

    call: OpCall
    nodes: Sequence[Node]
    kinds: Sequence[Kind]
    ids: Node
    is_ascending: bool

    @property
    def n(self) -> int:
        """The number of sorted elements."""
        return self.ids.meta["val"].shape[0]

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return named(self.call.target, self.call.args, self.call.kwargs)

    def kind(self, node: Any) -> Kind:
        """How an argument depends on the sort."""
        pairs = zip(self.nodes, self.kinds, strict=True)
        return next((kind for x, kind in pairs if x is node), None)

    def ins(self, roles: dict[Node, Role]) -> tuple[Role, ...]:
        """Where the arguments are: replicated, but for some."""
        return tuple(roles.get(x, "R") for x in self.nodes)


Proof = Callable[[Reading], Member | None]


def itself(target: Any) -> Callable[..., Any]:
    """The op as it is, on the rows of a rank."""

    def local(
        b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
    ) -> Any:
        own = with_own_index(b, args) if target in SCATTERS else args
        return b.call(target, *own, **kwargs)

    return local


def inverted(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """The inverse of the permutation of a rank's rows."""
    x, indices, counted, *others = args
    value = counted.meta["val"]
    own = b.call(
        aten.arange.default,
        pieces[0].local_shape[0],
        dtype=value.dtype,
        device=value.device,
    )
    return b.call(aten.index_put.default, x, indices, own, *others, **kwargs)


def sort(reading: Reading) -> Member | None:
    """The places of places are those of the inverse."""
    values = reading.values
    if reading.kinds != [PLACES] or values["descending"]:
        return None
    return Member((ROWS,), (ROWS, ROWS), (Rows(0, numbers=UNREAD), INVERSE))


def divide(reading: Reading) -> Member | None:
    """Places divided by the number of elements that each row had."""
    values = reading.values
    kind = reading.kinds[0]
    each = values["other"]
    is_floor = values.get("rounding_mode", "floor") in ("floor", "trunc")
    is_place = isinstance(kind, Rows) and kind.numbers and kind.numbers > 0
    if not (is_floor and is_place and isinstance(each, int) and each > 0):
        return None
    assert isinstance(kind, Rows)
    assert kind.numbers
    row = Own(kind.dim)
    divided = attrs.evolve(kind, numbers=kind.numbers * each)
    return Member((row,), (row,), (divided,))


def cast(reading: Reading) -> Member | None:
    """Numbers in another dtype that holds them, and groups."""
    kind = reading.kinds[0]
    dtype = reading.call.outs[0].dtype
    if isinstance(kind, Groups):
        return Member(("sum",), ("sum",), (kind,)) if _counts(reading) else None
    if isinstance(kind, Rows) and kind.numbers is not None and dtype in INTS:
        row = Own(kind.dim)
        return Member((row,), (row,), (kind,))
    return None


def histogram(reading: Reading) -> Member | None:
    """How many elements have each value, none of which is below the first."""
    values = reading.values
    low = values["min"]
    is_within = values["max"] > low and is_at_least(reading.ids, low)
    if not (reading.is_ascending and is_within and _counts(reading)):
        return None
    if not _are_elements(reading):
        return None
    return Member((ROWS,), ("sum",), (Groups(are_ends=False),))


def _counts(reading: Reading) -> bool:
    """Whether the dtype of a result holds all counts."""
    dtype = reading.call.outs[0].dtype
    return dtype in INTS or dtype in (torch.float32, torch.float64)


def _are_elements(reading: Reading) -> bool:
    """Whether an op reads the sorted elements, or the elements before the sort."""
    (kind,) = reading.kinds
    (node,) = reading.nodes
    if node.meta["val"].shape != (reading.n,):
        return False
    if kind is not None:
        return isinstance(kind, Rows) and kind.is_key
    return source_of(node, COPIES) is source_of(reading.ids, COPIES)


def accumulate(reading: Reading) -> Member | None:
    """Where the rows of each value end, from how many there are."""
    if reading.kinds != [Groups(are_ends=False)] or not _counts(reading):
        return None
    return Member(("sum",), ("sum",), (Groups(are_ends=True),))


# the dim of the rows in both operands of a product by groups, and where its result has them
GROUPED = {
    (2, 3): (0, None, 0),
    (3, 2): (None, 1, 1),
    (2, 2): (1, 0, None),
}


def grouped_product(reading: Reading) -> Member | None:
    """A product for the rows of each value. The contracted ones give a Partial sum."""
    values = reading.values
    a, b, *_ = reading.nodes
    form = (a.meta["val"].dim(), b.meta["val"].dim())
    is_plain = values["offs"] is not None and values["bias"] is None
    if not is_plain or form not in GROUPED:
        return None
    of_a, of_b, of_out = GROUPED[form]
    wanted = [_rows(of_a), _rows(of_b), Groups(are_ends=True)]
    if reading.kinds != wanted:
        return None
    roles = _role(of_a), _role(of_b), "sum"
    made = "sum" if of_out is None else Own(of_out)
    return Member(roles, (made,), (_rows(of_out),))


def _rows(dim: int | None) -> Kind:
    return None if dim is None else Rows(dim)


def _role(dim: int | None) -> Role:
    return "R" if dim is None else Own(dim)


def fallback_product(reading: Reading) -> Member | None:
    """The same as an op of transformers."""
    if reading.kinds != [Rows(0), None, Groups(are_ends=True)]:
        return None
    return Member((ROWS, "R", "sum"), (ROWS,), (Rows(0),))


def fallback_backward(reading: Reading) -> Member | None:
    """Its gradients: of rows, and of the matrices, a Partial sum."""
    if reading.kinds != [Rows(0), None, Groups(are_ends=True), Rows(0)]:
        return None
    return Member(
        (ROWS, "R", "sum", ROWS),
        (ROWS, "sum"),
        (Rows(0), None),
    )


@attrs.frozen
class Lookup:
    """An op that reads or writes rows by their numbers.

    Args:
        x: the tensor whose rows have the numbers.
        dim: of these rows.
        at: the numbers.
        rows: written, of such an op.
        adds: whether it adds them.
    """

    x: Node
    dim: int
    at: Node
    rows: Any = None
    adds: bool = False


def by_indices(reading: Reading) -> Lookup | None:
    """Of `x[:, at]` and writes to it, with one index."""
    x, indices, *others = reading.call.args
    found = [(d, at) for d, at in enumerate(indices) if at is not None]
    if len(found) != 1:
        return None
    ((dim, at),) = found
    if at.meta["val"].dim() != 1:
        return None
    rows = others[0] if others else None
    adds = bool(reading.call.arg(3, "accumulate", False))
    return Lookup(x, dim, at, rows, adds)


def by_dim(reading: Reading) -> Lookup | None:
    """Of ops that take a dim, and an index for it."""
    x, dim, at, *others = reading.call.args
    if not x.meta["val"].dim():
        return None
    target = reading.call.target
    is_added = target is aten.scatter_add.default
    dim %= x.meta["val"].dim()
    return Lookup(x, dim, at, others[0] if others else None, is_added)


def looked_up(find: Callable[[Reading], Lookup | None]) -> Proof:
    """An op that reads rows, or writes them."""

    def proof(reading: Reading) -> Member | None:
        look = find(reading)
        if look is None:
            return None
        numbers = reading.kind(look.at)
        if not isinstance(numbers, Rows) or numbers.numbers is None:
            return None
        is_along = numbers.dim == (0 if look.at.meta["val"].dim() == 1 else look.dim)
        if numbers.numbers == UNREAD or not is_along:
            return None
        if look.rows is None:
            return _read(reading, look, numbers)
        return _written(reading, look, numbers)

    return proof


def _read(reading: Reading, look: Lookup, numbers: Rows) -> Member | None:
    """Rows in the order of the sort, or sorted rows in the order before it."""
    row = Own(look.dim)
    is_inverse = numbers.numbers == POSITIONS
    source = row if is_inverse else Own(look.dim, numbers.numbers)
    wanted = Rows(look.dim) if is_inverse else None
    if reading.kind(look.x) != wanted or not _fits(reading, look.x, source):
        return None
    made = None if is_inverse else Rows(look.dim)
    ins = reading.ins({look.x: source, look.at: Own(numbers.dim)})
    return Member(ins, (row,), (made,), itself(reading.call.target))


def _written(reading: Reading, look: Lookup, numbers: Rows) -> Member | None:
    """Sorted rows back in their order, or rows in the order of the sort."""
    if _inverts(reading, look, numbers):
        ins = reading.ins({look.x: ROWS, look.at: ROWS})
        return Member(ins, (ROWS,), (INVERSE,), inverted)
    is_inverse = numbers.numbers == POSITIONS
    each = numbers.numbers or 1
    row = Own(look.dim)
    target = Own(look.dim, each)
    if not (look.adds or each == 1) or not isinstance(look.rows, Node):
        return None
    of_x, of_rows = (Rows(look.dim), None) if is_inverse else (None, Rows(look.dim))
    is_target = _is_kind(reading, look.x, of_x, target)
    are_rows = _is_kind(reading, look.rows, of_rows, row)
    same = look.rows.meta["val"].dim() == look.x.meta["val"].dim()
    if not (is_target and are_rows and same):
        return None
    ins = reading.ins({look.x: target, look.at: Own(numbers.dim), look.rows: row})
    return Member(ins, (target,), (of_x,), itself(reading.call.target))


def _is_kind(reading: Reading, node: Node, wanted: Kind, row: Own) -> bool:
    """Whether a tensor has rows in an order, or equal ones, which have any."""
    if not _fits(reading, node, row):
        return False
    kind = reading.kind(node)
    return kind == wanted or (kind is None and is_constant_along(node, row.dim))


def _inverts(reading: Reading, look: Lookup, numbers: Rows) -> bool:
    """Whether it writes the numbers from 0 to n at the places of a permutation."""
    is_place = numbers == PLACES and reading.kind(look.x) is None
    is_put = reading.call.target is aten.index_put.default and not look.adds
    if not (is_place and is_put and isinstance(look.rows, Node)):
        return False
    is_row = look.x.meta["val"].dim() == 1 and _fits(reading, look.x, ROWS)
    return is_row and along(look.rows, reading.n) == 0


def _fits(reading: Reading, node: Node, row: Own) -> bool:
    """Whether a tensor has a row for so many elements."""
    shape = node.meta["val"].shape
    return row.dim < len(shape) and shape[row.dim] * row.each == reading.n


# Also by name: an op that exists once its package is imported.
TABLE: dict[object, Proof] = {
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.div.Tensor_mode: divide,
    aten.floor_divide.default: divide,
    aten._to_copy.default: cast,
    aten.histc.default: histogram,
    aten.cumsum.default: accumulate,
    aten._grouped_mm.default: grouped_product,
    aten.index.Tensor: looked_up(by_indices),
    aten.index_put.default: looked_up(by_indices),
    aten.index_select.default: looked_up(by_dim),
    aten.gather.default: looked_up(by_dim),
    aten.scatter.src: looked_up(by_dim),
    aten.scatter_add.default: looked_up(by_dim),
    "transformers::grouped_mm_fallback": fallback_product,
    "transformers::grouped_mm_fallback_backward": fallback_backward,
}
