"""Ops whose numbers are places of rows: each gives on the rows of a rank what it gives on all
rows, since the places on a rank are those among its own rows.
"""

from __future__ import annotations

import attrs
import torch

from ...rules.lookups.counted import COPIES
from .elements import INTS, is_at_least, source_of
from .kinds import (
    INVERSE,
    PLACES,
    POSITIONS,
    ROWS,
    UNREAD,
    Groups,
    Kind,
    Member,
    Own,
    Proof,
    Reading,
    Role,
    Rows,
)
from .lookups import by_dim, by_indices, looked_up

aten = torch.ops.aten
SUM = "sum"
COUNTS = Groups(are_ends=False)
ENDS = Groups(are_ends=True)
COUNTING = {torch.float32, torch.float64, *INTS}  # dtypes that hold all counts


def sort(reading: Reading) -> Member | None:
    """The places of places are those of the inverse."""
    if reading.kinds != [PLACES]:
        return None
    if reading.values["descending"]:
        return None
    unread = Rows(dim=0, numbers=UNREAD)
    return Member(ins=(ROWS,), outs=(ROWS, ROWS), kinds=(unread, INVERSE))


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
    return Member(ins=(row,), outs=(row,), kinds=(attrs.evolve(kind, numbers=before * each),))


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
    return Member(ins=(row,), outs=(row,), kinds=(kind,))


def _of_groups(reading: Reading, kind: Groups) -> Member | None:
    """An op from groups to groups, in a dtype that holds all counts."""
    (out,) = reading.call.outs
    if out.dtype not in COUNTING:
        return None
    return Member(ins=(SUM,), outs=(SUM,), kinds=(kind,))


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
    return Member(ins=(ROWS,), outs=(SUM,), kinds=(COUNTS,))


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
GROUPED = {(2, 3): (0, None, 0), (3, 2): (None, 1, 1), (2, 2): (1, 0, None)}


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
    return Member(ins=(_role(of_a), _role(of_b), SUM), outs=(made,), kinds=(_rows(of_out),))


def _rows(dim: int | None) -> Kind:
    return None if dim is None else Rows(dim)


def _role(dim: int | None) -> Role:
    return "R" if dim is None else Own(dim)


def fallback_product(reading: Reading) -> Member | None:
    """The same as an op of transformers."""
    if reading.kinds != [Rows(0), None, ENDS]:
        return None
    return Member(ins=(ROWS, "R", SUM), outs=(ROWS,), kinds=(Rows(0),))


def fallback_backward(reading: Reading) -> Member | None:
    """Its gradients: of rows, and of the matrices, a Partial sum."""
    if reading.kinds != [Rows(0), None, ENDS, Rows(0)]:
        return None
    return Member(ins=(ROWS, "R", SUM, ROWS), outs=(ROWS, SUM), kinds=(Rows(0), None))


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
