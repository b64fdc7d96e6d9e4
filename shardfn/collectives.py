"""The table of collectives. Each row has the op, the cost and the handlers in each stage of one
kind of collective.

Files of higher layers add their handlers (emission, packing, simulation) to a row with `implement`.
To add a collective, add a row with `add_row`.
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
RAGGED_ALL_TO_ALL = "ragged_all_to_all"
SEND = "send"  # a message of a pipeline, from one coordinate to another

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
        is_message: whether one rank sends it to one other, whatever the axis has.
        priced_as: the kind whose price sharding propagation takes for it. The bytes that
            reduce-scatter and all-to-all save are spent again where the next op needs the value
            as it was.
        verb: what a line does that starts it, in messages.
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
    is_message: bool = False
    priced_as: str | None = None
    verb: str = "sends"
    payload: Callable[..., list[int]] | None = None
    emit: Callable[..., Any] | None = None
    packing: Any = None
    combine: Callable[..., Any] | None = None

    def share(self, n: int) -> float:
        """Return the bytes that a rank sends, as a multiple of the bytes of the unsharded value,
        on an axis of n ranks.
        """
        share = self.rounds * ((n - 1) / n)
        return share / n if self.sends_shard else share

    @property
    def overload(self) -> Any:
        """Return the torch op that starts the collective."""
        namespace, name = self.op.split(".")
        return getattr(getattr(torch.ops, namespace), name).default

    @property
    def starts(self) -> tuple[str, ...]:
        """Return the names of all ops that start it, in graphs and in generated code."""
        return (self.op, *self.code)


COLLECTIVES: dict[str, CollectiveKind] = {}  # by name
STEPS: dict[tuple[str, str], str] = {}  # the name, by the step that it carries out


def add_row(row: CollectiveKind) -> None:
    """Put a row into the table, in place of one of the same name."""
    COLLECTIVES[row.name] = row
    if row.carries is not None:
        STEPS[row.carries] = row.name


def implement(name: str, **fields: Any) -> None:
    """Add the functions of a higher layer (payload, emit, packing, combine) to the row
    of a kind.
    """
    add_row(attrs.evolve(COLLECTIVES[name], **fields))


def kind_of_op(op: str) -> CollectiveKind | None:
    """Return the kind of collective that an op starts, given as "namespace.name"; None for another
    op.
    """
    return next((row for row in COLLECTIVES.values() if op in row.starts), None)


def custom_collective_ops() -> list[Any]:
    """Return the ops of shardfn that start a collective: compilers do not know them."""
    rows = COLLECTIVES.values()
    own = [row for row in rows if not row.op.startswith(f"{C10D}.")]
    return [row.overload for row in own if not row.is_message]


add_row(
    CollectiveKind(
        name=ALL_REDUCE,
        op=f"{C10D}.all_reduce",
        verb="reduces",
        code=(f"{C10D}.all_reduce_",),
        carries=(PARTIAL, REPLICATED),
        rounds=2.0,
        reduces=True,
    )
)
add_row(
    CollectiveKind(
        name=ALL_GATHER,
        op=f"{C10D}.all_gather_into_tensor",
        verb="gathers",
        code=(f"{C10D}.all_gather_into_tensor_out",),
        carries=(SHARDED, REPLICATED),
        grows=True,
    )
)
add_row(
    CollectiveKind(
        name=REDUCE_SCATTER,
        op=f"{C10D}.reduce_scatter_tensor",
        verb="reduce-scatters",
        code=(f"{C10D}.reduce_scatter_tensor_out",),
        carries=(PARTIAL, SHARDED),
        reduces=True,
        priced_as=ALL_REDUCE,
    )
)
add_row(
    CollectiveKind(
        name=ALL_TO_ALL,
        op=f"{C10D}.all_to_all_single",
        verb="exchanges",
        carries=(SHARDED, SHARDED),
        sends_shard=True,
        grows=True,
        priced_as=ALL_GATHER,
    )
)
add_row(
    CollectiveKind(
        name=HALO,
        op="shardfn.halo",
        verb="sends halos of",
        carries=(SHARDED, SHARDED_WITH_HALO),
        grows=True,
        counts_elements=True,
    )
)
add_row(CollectiveKind(name=PPERMUTE, op="shardfn.permute", verb="permutes"))
# priced as if each rank sent the same rows to each
add_row(
    CollectiveKind(
        name=RAGGED_ALL_TO_ALL, op="shardfn.ragged_all_to_all", verb="sends rows of", grows=True
    )
)
# no op starts it: a pipeline sends between its graphs (ops/messages.py)
add_row(CollectiveKind(name=SEND, op="shardfn.send", verb="sends", is_message=True))
