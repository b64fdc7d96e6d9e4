"""Ops that read or write rows by the places that a sort gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.fx import Node

from ...emission.builder import Builder, Piece
from ...rules.lookups.counted import along
from ...rules.lookups.reads import SCATTERS, with_own_index
from .elements import is_constant_along
from .kinds import (
    INVERSE,
    PLACES,
    POSITIONS,
    ROWS,
    UNREAD,
    Kind,
    Member,
    Own,
    Proof,
    Reading,
    Role,
    Rows,
)

aten = torch.ops.aten


def itself(target: Any) -> Callable[..., Any]:
    """The op as it is, on the rows of a rank."""

    def local(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
        if target in SCATTERS:
            args = with_own_index(b, args)
        return b.call(target, *args, **kwargs)

    return local


def inverted(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
    """The inverse of the permutation of a rank's rows."""
    x, indices, counted, *others = args
    value = counted.meta["val"]
    (n,) = pieces[0].local_shape
    own = b.call(aten.arange.default, n, dtype=value.dtype, device=value.device)
    return b.call(aten.index_put.default, x, indices, own, *others, **kwargs)


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
    return Lookup(x=x, dim=dim, at=at, rows=others[0] if others else None, adds=bool(adds))


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
    roles: dict[Node, Role] = {look.x: numbered, look.at: Own(at.dim)}
    return Member(
        ins=reading.ins(roles),
        outs=(Own(look.dim),),
        kinds=(of_rows,),
        local=itself(reading.call.target),
    )


def _written(reading: Reading, look: Lookup, rows: Node, at: Rows) -> Member | None:
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
    roles: dict[Node, Role] = {look.x: numbered, look.at: Own(at.dim), rows: row}
    return Member(
        ins=reading.ins(roles), outs=(numbered,), kinds=(of_x,), local=itself(reading.call.target)
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
    roles: dict[Node, Role] = {look.x: ROWS, look.at: ROWS}
    return Member(ins=reading.ins(roles), outs=(ROWS,), kinds=(INVERSE,), local=inverted)
