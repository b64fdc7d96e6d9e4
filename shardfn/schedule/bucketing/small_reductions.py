"""Fused small reductions. A small sum that only results need, such as the loss, shares a bucket.
Small sums that one op reads, such as the squares of a global norm, are one collective.
"""

from __future__ import annotations

from typing import Any

from ...collectives import ALL_REDUCE
from ...partition import plan
from ..data_flow import Flow, Transfer

LIGHT = 4096  # bytes; negligible next to a bucket
FEW = 8


def fusable_reductions(flow: Flow) -> frozenset[Any]:
    """Find the small reductions that may share a bucket, such as that of the loss: nothing
    sends after them.
    """
    if not flow.plan.gradients:
        return frozenset()
    light = {
        i: sent[0] for i, sent in flow.transfers.items() if len(sent) == 1 and _is_light(sent[0])
    }
    return frozenset(t.key for i, t in light.items() if not _is_term(flow, i) and _is_last(flow, i))


def common_readers(flow: Flow) -> dict[Any, int]:
    """Group the small reductions that a single op reads, such as the squares of a global norm."""
    found: dict[Any, int] = {}
    for i, sent in flow.transfers.items():
        reader = _reader(flow, i)
        if reader is None:
            continue
        found.update((t.key, reader) for t in sent if _is_light(t))
    return found


def _reader(flow: Flow, step: int) -> int | None:
    """Follow a step to the first step with several inputs; None if several steps read it."""
    while True:
        readers = set(flow.readers[step])
        if len(readers) != 1 or step in flow.returned:
            return None
        (reader,) = readers
        if not isinstance(flow.plan.steps[reader], plan.Apply):
            return None
        if set(flow.sources(reader)) != {step}:
            return reader
        step = reader


def _is_term(flow: Flow, step: int) -> bool:
    """Return whether a step makes terms of gradients."""
    (made,) = flow.plan.steps[step].made
    return bool(flow.served.get(made.number))


def _is_light(t: Transfer) -> bool:
    """Return whether a transfer is a small all-reduce that is no gradient."""
    return t.kind == ALL_REDUCE and t.options is None and t.nbytes <= LIGHT


def _is_last(flow: Flow, step: int) -> bool:
    """Return whether few steps follow, and none of them sends."""
    seen = set[int]()
    queue = [*flow.readers[step]]
    while queue and len(seen) <= FEW:
        reader = queue.pop()
        if reader in seen:
            continue
        if reader in flow.transfers or isinstance(flow.plan.steps[reader], plan.Nested):
            return False
        seen.add(reader)
        queue += flow.readers[reader]
    return len(seen) <= FEW
