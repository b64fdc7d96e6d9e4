"""The table of collectives: one row for each kind, with everything that the stages know of it.

A file of a higher layer adds its part of a row (emission, packing, simulation) with
`implement`. A new collective is a new row, with `add`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

C10D = "_c10d_functional"

# The kinds, by the names that programs, plans and messages use.
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
HALO = "halo"
PPERMUTE = "ppermute"

# How a value lies on one mesh axis, as far as a redistribution goes.
REPLICATED, SHARDED, SHARDED_WITH_HALO, PARTIAL = (
    "replicated",
    "sharded",
    "sharded with halo",
    "Partial",
)


@attrs.frozen(eq=False)
class CollectiveKind:
    """One kind of collective.

    Args:
        name: its name in programs, plans and messages.
        op: the op that starts it.
        code: the functions that generated code calls instead.
        carries: the redistribution step that it carries out: how the value is placed before it
            and after it; None for one that no redistribution uses.
        rounds: how often the payload crosses a ring: a rank sends rounds * (n - 1) / n of it.
        sends_shard: whether the payload is one shard of the value, not all of it.
        reduces: whether it reduces a Partial value.
        grows: whether its result takes memory beside the value that it is made of: a
            checkpointed call makes it again in the backward.
        counts_elements: whether its constants count elements of the payload.
        priced_as: the kind whose price sharding propagation takes for it. The bytes that
            reduce-scatter and all-to-all save are spent again where the next op needs the value
            as it was.
        payload: the local shape of what is sent, padding included (partition/collective_bytes.py).
        emit: adds it to a local graph (partition/emission/emit_collectives.py).
        packing: how it carries a bucket; None if it is never bucketed
            (schedule/passes/bucket.py).
        combine: the value that each rank of a group receives (runtime/simulator.py).
    """

    name: str
    op: str
    code: tuple[str, ...] = ()
    carries: tuple[str, str] | None = None
    rounds: float = 1.0
    sends_shard: bool = False
    reduces: bool = False
    grows: bool = False
    counts_elements: bool = False
    priced_as: str | None = None
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
STEPS: dict[tuple[str, str], str] = {}  # the name, by the step that it carries out


def add(row: CollectiveKind) -> None:
    """Put a row into the table, in place of one of the same name."""
    COLLECTIVES[row.name] = row
    if row.carries is not None:
        STEPS[row.carries] = row.name


def implement(name: str, **parts: Any) -> None:
    """Add a higher layer's part to the row of a kind."""
    add(attrs.evolve(COLLECTIVES[name], **parts))


def started_by(op: str) -> CollectiveKind | None:
    """The kind of collective that an op starts, given as "namespace.name"."""
    return next((row for row in COLLECTIVES.values() if op in row.starts), None)


def our_ops() -> list[Any]:
    """The ops that start a collective and are not torch's: compilers do not know them."""
    rows = COLLECTIVES.values()
    return [row.overload for row in rows if not row.op.startswith(f"{C10D}.")]


add(
    CollectiveKind(
        name=ALL_REDUCE,
        op=f"{C10D}.all_reduce",
        code=(f"{C10D}.all_reduce_",),
        carries=(PARTIAL, REPLICATED),
        rounds=2.0,
        reduces=True,
    )
)
add(
    CollectiveKind(
        name=ALL_GATHER,
        op=f"{C10D}.all_gather_into_tensor",
        code=(f"{C10D}.all_gather_into_tensor_out",),
        carries=(SHARDED, REPLICATED),
        grows=True,
    )
)
add(
    CollectiveKind(
        name=REDUCE_SCATTER,
        op=f"{C10D}.reduce_scatter_tensor",
        code=(f"{C10D}.reduce_scatter_tensor_out",),
        carries=(PARTIAL, SHARDED),
        reduces=True,
        priced_as=ALL_REDUCE,
    )
)
add(
    CollectiveKind(
        name=ALL_TO_ALL,
        op=f"{C10D}.all_to_all_single",
        carries=(SHARDED, SHARDED),
        sends_shard=True,
        grows=True,
        priced_as=ALL_GATHER,
    )
)
add(
    CollectiveKind(
        name=HALO,
        op="shardfn.halo",
        carries=(SHARDED, SHARDED_WITH_HALO),
        grows=True,
        counts_elements=True,
    )
)
add(CollectiveKind(name=PPERMUTE, op="shardfn.permute"))
