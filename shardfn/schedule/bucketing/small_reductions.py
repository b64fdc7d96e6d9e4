"""Fused small reductions: a small sum that only results need, such as the loss, shares a
bucket.
"""

from __future__ import annotations

from typing import Any

from ...collectives import ALL_REDUCE
from ...partition import plan
from ..flow import Flow, Transfer

LIGHT = 4096  # bytes; negligible next to a bucket
FEW = 8


def riders(flow: Flow) -> frozenset[Any]:
    """The keys of the transfers that may share a bucket: no other transfer depends on them, and
    few ops do.
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
    """Whether a step makes terms of gradients."""
    (made,) = flow.plan.steps[step].made
    return bool(flow.served.get(made.number))


def _is_light(t: Transfer) -> bool:
    return t.kind == ALL_REDUCE and t.wish is None and t.nbytes <= LIGHT


def _is_last(flow: Flow, step: int) -> bool:
    """Whether few steps follow, and none of them sends."""
    seen = set[int]()
    queue = [*flow.readers[step]]
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
