"""The table of collectives: one row for each kind, with everything that the stages know of it.

A file of a higher layer adds its part of a row (emission, packing, simulation) with
`implement`. A new collective is a new row, with `add`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch


@attrs.frozen(eq=False)
class CollectiveKind:
    """One kind of collective.

    Args:
        name: its name in programs, plans and messages.
        move: the kind of redistribution step that it carries out.
        op: torch's op that starts it.
        code: the function that generated code calls instead.
        rounds: how often the payload crosses a ring: a rank sends rounds * (n - 1) / n of it.
        sends_shard: whether the payload is one shard of the value, not all of it.
        reduces: whether it reduces a Partial value.
        payload: the local shape of what is sent, padding included (partition/payload.py).
        emit: adds it to a local graph (partition/emission/moves.py).
        packing: how it carries a bucket; None if it is never bucketed
            (schedule/passes/bucket.py).
        combine: what each rank of a group receives (runtime/simulator.py).
    """

    name: str
    move: str
    op: str
    code: tuple[str, ...] = ()
    rounds: float = 1.0
    sends_shard: bool = False
    reduces: bool = False
    payload: Callable[..., list[int]] | None = None
    emit: Callable[..., Any] | None = None
    packing: Any = None
    combine: Callable[..., Any] | None = None

    def share(self, n: int) -> float:
        """The bytes that a rank sends, given the bytes of the unsharded value on an axis of n
        ranks.
        """
        share = self.rounds * ((n - 1) / n)
        return share / n if self.sends_shard else share

    @property
    def overload(self) -> Any:
        """The op itself."""
        namespace, name = self.op.split(".")
        return getattr(getattr(torch.ops, namespace), name).default

    @property
    def starts(self) -> tuple[str, ...]:
        """The names of all ops that start it."""
        return (self.op, *self.code)


COLLECTIVES: dict[str, CollectiveKind] = {}  # by name
MOVES: dict[str, CollectiveKind] = {}  # by the step of a redistribution


def add(row: CollectiveKind) -> None:
    """Put a row into the table, in place of one of the same name."""
    COLLECTIVES[row.name] = MOVES[row.move] = row


def implement(name: str, **parts: Any) -> None:
    """Add a higher layer's part to the row of a kind."""
    add(attrs.evolve(COLLECTIVES[name], **parts))


def started_by(op: str) -> CollectiveKind | None:
    """The kind of collective that an op starts, given as "namespace.name"."""
    return next((row for row in COLLECTIVES.values() if op in row.starts), None)


C10D = "_c10d_functional"

add(
    CollectiveKind(
        name="all_reduce",
        move="reduce",
        op=f"{C10D}.all_reduce",
        code=(f"{C10D}.all_reduce_",),
        rounds=2.0,
        reduces=True,
    )
)
add(
    CollectiveKind(
        name="all_gather",
        move="gather",
        op=f"{C10D}.all_gather_into_tensor",
        code=(f"{C10D}.all_gather_into_tensor_out",),
    )
)
add(
    CollectiveKind(
        name="reduce_scatter",
        move="reduce_scatter",
        op=f"{C10D}.reduce_scatter_tensor",
        code=(f"{C10D}.reduce_scatter_tensor_out",),
        reduces=True,
    )
)
add(
    CollectiveKind(
        name="all_to_all",
        move="all_to_all",
        op=f"{C10D}.all_to_all_single",
        sends_shard=True,
    )
)
add(CollectiveKind(name="halo", move="halo", op="shardfn.halo"))
add(CollectiveKind(name="ppermute", move="ppermute", op="shardfn.permute"))
