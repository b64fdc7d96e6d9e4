"""Small sums that only results wait for, such as the loss: they travel in a bucket, and not on
their own.
"""

from __future__ import annotations

from typing import Any

from ...collectives import ALL_REDUCE
from ...partition import plan
from ..flow import Flow, Transfer

LIGHT = 4096  # bytes: next to a bucket, nothing
FEW = 8


def riders(flow: Flow) -> frozenset[Any]:
    """The keys of the transfers that may ride in a bucket: nothing that is sent waits for them,
    and little is computed from them.
    """
    if not flow.plan.gradients:
        return frozenset()
    light = {
        i: sent[0]
        for i, sent in flow.transfers.items()
        if len(sent) == 1 and _is_light(sent[0])
    }
    return frozenset(
        t.key
        for i, t in light.items()
        if not _is_term(flow, i) and _is_last(flow, i)
    )


def _is_term(flow: Flow, step: int) -> bool:
    """Whether it makes terms of gradients, which are no results."""
    (made,) = flow.plan.steps[step].made
    return bool(flow.served.get(made.number))


def _is_light(t: Transfer) -> bool:
    return t.kind == ALL_REDUCE and t.wish is None and t.nbytes <= LIGHT


def _is_last(flow: Flow, step: int) -> bool:
    """Whether few steps follow, none of which sends anything."""
    seen, queue = set[int](), [*flow.readers[step]]
    while queue and len(seen) <= FEW:
        reader = queue.pop()
        if reader in seen:
            continue
        if reader in flow.transfers or isinstance(
            flow.plan.steps[reader], plan.Nested
        ):
            return False
        seen.add(reader)
        queue += flow.readers[reader]
    return len(seen) <= FEW
