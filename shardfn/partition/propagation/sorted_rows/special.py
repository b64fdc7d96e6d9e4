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
SUM = "sum"
PLACES = Rows(
    dim=0,
    numbers=1,
)
INVERSE = Rows(
    dim=0,
    numbers=POSITIONS,
)
COUNTS = Groups(are_ends=False)
ENDS = Groups(are_ends=True)
COUNTING = {
    torch.float32,
    torch.float64,
    *INTS,
}  # dtypes that hold all counts


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
        (n,) = self.ids.meta["val"].shape
        return n

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        call = self.call
        return named(
            call.target,
            call.args,
            call.kwargs,
        )

    def kind(self, node: Node) -> Kind:
        """How an argument depends on the sort."""
        for x, kind in zip(self.nodes, self.kinds, strict=True):
            if x is node:
                return kind
        return None

    def ins(self, roles: dict[Node, Role]) -> tuple[Role, ...]:
        """Where the arguments are: replicated, but for some."""
        return tuple(roles.get(x, "R") for x in self.nodes)

    def fits(self, node: Node, row: Own) -> bool:
        """Whether a tensor has a row for so many elements."""
        shape = node.meta["val"].shape
        if row.dim >= len(shape):
            return False
        return shape[row.dim] * row.each == self.n


Proof = Callable[[Reading], Member | None]


def itself(target: Any) -> Callable[..., Any]:
    """The op as it is, on the rows of a rank."""

    def local(
        b: Builder,
        args: list[Any],
        kwargs: dict[str, Any],
        pieces: list[Piece],
    ) -> Any:
        if target in SCATTERS:
            args = with_own_index(b, args)
        return b.call(target, *args, **kwargs)

    return local


def inverted(
    b: Builder,
    args: list[Any],
    kwargs: dict[str, Any],
    pieces: list[Piece],
) -> Any:
    """The inverse of the permutation of a rank's rows."""
    x, indices, counted, *others = args
    value = counted.meta["val"]
    (n,) = pieces[0].local_shape
    own = b.call(
        aten.arange.default,
        n,
        dtype=value.dtype,
        device=value.device,
    )
    return b.call(
        aten.index_put.default,
        x,
        indices,
        own,
        *others,
        **kwargs,
    )


def sort(reading: Reading) -> Member | None:
    """The places of places are those of the inverse."""
    if reading.kinds != [PLACES]:
        return None
    if reading.values["descending"]:
        return None
    unread = Rows(
        dim=0,
        numbers=UNREAD,
    )
    return Member(
        ins=(ROWS,),
        outs=(ROWS, ROWS),
        kinds=(unread, INVERSE),
    )


def divide(reading: Reading) -> Member | None:
    """Places divided by the number of elements that each row had."""
    values = reading.values
    kind = reading.kinds[0]
    each = values["other"]
    if values.get("rounding_mode", "floor") is None:
        return None
    if not isinstance(kind, Rows) or not isinstance(each, int):
        return None
    before = kind.numbers
    if before is None or before in (POSITIONS, UNREAD) or each < 1:
        return None
    row = Own(kind.dim)
    return Member(
        ins=(row,),
        outs=(row,),
        kinds=(attrs.evolve(kind, numbers=before * each),),
    )


def cast(reading: Reading) -> Member | None:
    """Numbers in another dtype that holds them, and groups."""
    (kind,) = reading.kinds
    if isinstance(kind, Groups):
        return _of_groups(reading, kind)
    if not isinstance(kind, Rows):
        return None
    (out,) = reading.call.outs
    if kind.numbers is None or out.dtype not in INTS:
        return None
    row = Own(kind.dim)
    return Member(
        ins=(row,),
        outs=(row,),
        kinds=(kind,),
    )


def _of_groups(reading: Reading, kind: Groups) -> Member | None:
    """An op from groups to groups, in a dtype that holds all counts."""
    (out,) = reading.call.outs
    if out.dtype not in COUNTING:
        return None
    return Member(
        ins=(SUM,),
        outs=(SUM,),
        kinds=(kind,),
    )


def histogram(reading: Reading) -> Member | None:
    """How many elements have each value, none of which is below the first."""
    values = reading.values
    low = values["min"]
    (out,) = reading.call.outs
    if not reading.is_ascending or not _are_elements(reading):
        return None
    if values["max"] <= low or out.dtype not in COUNTING:
        return None
    if not is_at_least(reading.ids, low):
        return None
    return Member(
        ins=(ROWS,),
        outs=(SUM,),
        kinds=(COUNTS,),
    )


def _are_elements(reading: Reading) -> bool:
    """Whether an op reads the sorted elements, or the elements before the sort."""
    (kind,) = reading.kinds
    (node,) = reading.nodes
    if node.meta["val"].shape != (reading.n,):
        return False
    if isinstance(kind, Rows):
        return kind.is_key
    ids = source_of(reading.ids, COPIES)
    return source_of(node, COPIES) is ids


def accumulate(reading: Reading) -> Member | None:
    """Where the rows of each value end, from how many there are."""
    if reading.kinds != [COUNTS]:
        return None
    return _of_groups(reading, ENDS)


# the dim of the rows in both operands of a product by groups, and where its result has them
GROUPED = {
    (2, 3): (0, None, 0),
    (3, 2): (None, 1, 1),
    (2, 2): (1, 0, None),
}


def grouped_product(reading: Reading) -> Member | None:
    """A product for the rows of each value. The contracted ones give a Partial sum."""
    values = reading.values
    if values["offs"] is None or values["bias"] is not None:
        return None
    a, b, _ = reading.nodes
    form = a.meta["val"].dim(), b.meta["val"].dim()
    if form not in GROUPED:
        return None
    of_a, of_b, of_out = GROUPED[form]
    if reading.kinds != [_rows(of_a), _rows(of_b), ENDS]:
        return None
    made = SUM if of_out is None else Own(of_out)
    return Member(
        ins=(_role(of_a), _role(of_b), SUM),
        outs=(made,),
        kinds=(_rows(of_out),),
    )


def _rows(dim: int | None) -> Kind:
    return None if dim is None else Rows(dim)


def _role(dim: int | None) -> Role:
    return "R" if dim is None else Own(dim)


def fallback_product(reading: Reading) -> Member | None:
    """The same as an op of transformers."""
    if reading.kinds != [Rows(0), None, ENDS]:
        return None
    return Member(
        ins=(ROWS, "R", SUM),
        outs=(ROWS,),
        kinds=(Rows(0),),
    )


def fallback_backward(reading: Reading) -> Member | None:
    """Its gradients: of rows, and of the matrices, a Partial sum."""
    if reading.kinds != [Rows(0), None, ENDS, Rows(0)]:
        return None
    return Member(
        ins=(ROWS, "R", SUM, ROWS),
        outs=(ROWS, SUM),
        kinds=(Rows(0), None),
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
    rows: Node | None
    adds: bool


def by_indices(reading: Reading) -> Lookup | None:
    """Of `x[:, at]` and writes to it, with one index."""
    call = reading.call
    x, indices, *others = call.args
    dims = [d for d, at in enumerate(indices) if at is not None]
    dim, *rest = dims
    at = indices[dim]
    if rest or at.meta["val"].dim() != 1:
        return None
    adds = call.arg(3, "accumulate", False)
    return Lookup(
        x=x,
        dim=dim,
        at=at,
        rows=others[0] if others else None,
        adds=bool(adds),
    )


def by_dim(reading: Reading) -> Lookup | None:
    """Of ops that take a dim, and an index for it."""
    call = reading.call
    x, dim, at, *others = call.args
    n = x.meta["val"].dim()
    if n == 0:
        return None
    return Lookup(
        x=x,
        dim=dim % n,
        at=at,
        rows=others[0] if others else None,
        adds=call.target is aten.scatter_add.default,
    )


def looked_up(find: Callable[[Reading], Lookup | None]) -> Proof:
    """An op that reads rows, or writes them."""

    def proof(reading: Reading) -> Member | None:
        look = find(reading)
        if look is None:
            return None
        at = reading.kind(look.at)
        if not isinstance(at, Rows) or not _are_numbers(look, at):
            return None
        if look.rows is None:
            return _read(reading, look, at)
        if _inverts(reading, look, at):
            return _inverse(reading, look)
        return _written(reading, look, look.rows, at)

    return proof


def _are_numbers(look: Lookup, at: Rows) -> bool:
    """Whether an index has numbers, along its own dim or along that of the rows."""
    is_row = look.at.meta["val"].dim() == 1
    if at.dim != (0 if is_row else look.dim):
        return False
    return at.numbers is not None and at.numbers != UNREAD


def _sides(look: Lookup, at: Rows) -> tuple[Own, Kind, Kind]:
    """Of the numbered rows: where they are, how they depend on the sort, and how the rows that
    an index reads or writes do.
    """
    sorted_rows = Rows(look.dim)
    if at.numbers == POSITIONS:
        return Own(look.dim), sorted_rows, None
    assert at.numbers, "numbers of rows"
    numbered = Own(look.dim, at.numbers)
    return numbered, None, sorted_rows


def _read(reading: Reading, look: Lookup, at: Rows) -> Member | None:
    """Rows in the order of the sort, or sorted rows in the order before it."""
    numbered, of_x, of_rows = _sides(look, at)
    if reading.kind(look.x) != of_x:
        return None
    if not reading.fits(look.x, numbered):
        return None
    roles: dict[Node, Role] = {
        look.x: numbered,
        look.at: Own(at.dim),
    }
    return Member(
        ins=reading.ins(roles),
        outs=(Own(look.dim),),
        kinds=(of_rows,),
        local=itself(reading.call.target),
    )


def _written(
    reading: Reading, look: Lookup, rows: Node, at: Rows
) -> Member | None:
    """Sorted rows back in their order, or rows in the order of the sort."""
    numbered, of_x, of_rows = _sides(look, at)
    row = Own(look.dim)
    if numbered.each > 1 and not look.adds:
        return None
    if rows.meta["val"].dim() != look.x.meta["val"].dim():
        return None
    if not _is_kind(reading, look.x, of_x, numbered):
        return None
    if not _is_kind(reading, rows, of_rows, row):
        return None
    roles: dict[Node, Role] = {
        look.x: numbered,
        look.at: Own(at.dim),
        rows: row,
    }
    return Member(
        ins=reading.ins(roles),
        outs=(numbered,),
        kinds=(of_x,),
        local=itself(reading.call.target),
    )


def _is_kind(reading: Reading, node: Node, wanted: Kind, row: Own) -> bool:
    """Whether a tensor has rows in an order, or equal ones, which have any."""
    if not reading.fits(node, row):
        return False
    kind = reading.kind(node)
    if kind == wanted:
        return True
    return kind is None and is_constant_along(node, row.dim)


def _inverts(reading: Reading, look: Lookup, at: Rows) -> bool:
    """Whether an op writes the numbers from 0 to n at the places of a permutation."""
    if look.adds or at != PLACES:
        return False
    if reading.call.target is not aten.index_put.default:
        return False
    if reading.kind(look.x) is not None:
        return False
    if look.x.meta["val"].shape != (reading.n,):
        return False
    assert look.rows is not None, "a write"
    return along(look.rows, reading.n) == 0


def _inverse(reading: Reading, look: Lookup) -> Member:
    """The inverse of a permutation."""
    roles: dict[Node, Role] = {
        look.x: ROWS,
        look.at: ROWS,
    }
    return Member(
        ins=reading.ins(roles),
        outs=(ROWS,),
        kinds=(INVERSE,),
        local=inverted,
    )


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
