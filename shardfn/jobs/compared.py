"""A comparison of texts over the store of a job, which waits for each process, but not for ever."""

from __future__ import annotations

import time
from typing import Any

from .. import _compat
from ..errors import DivergenceError, RendezvousError
from .rendezvous import listed


def compare(
    where: str, store: Any, prefix: str, ranks: tuple[int, int], mine: str, seconds: float
) -> None:
    """Check that all processes have the same text.

    Args:
        where: the function, which errors name.
        store: the store of the job.
        prefix: of the keys of this comparison.
        ranks: the rank of this process, and the number of ranks.
        mine: the text of this process.
        seconds: how long to wait for the others.

    Raises:
        RendezvousError: names the ranks that do not come.
        DivergenceError: quotes rank 0 and the first rank that differs.
    """
    rank, size = ranks
    store.set(f"{prefix}/{rank}", mine)
    deadline = time.monotonic() + seconds
    keys = [f"{prefix}/{r}" for r in range(size)]
    for key in keys:
        if not _compat.has_come(store, key, max(deadline - time.monotonic(), 0.001)):
            absent = [r for r in range(size) if not store.check([keys[r]])]
            got = f"rank {rank} waited {seconds:g} s for the others"
            fix = "the same calls of make_mesh on all ranks; the first error of theirs"
            raise RendezvousError.of(where, got, f"missing: {listed(absent)}", fix=fix)
    texts = [store.get(key).decode() for key in keys]
    other = next((r for r, text in enumerate(texts) if text != texts[0]), None)
    if other is None:
        return
    lines = f"rank 0: {texts[0]}", f"rank {other}: {texts[other]}"
    fix = "the same arguments on every rank"
    raise DivergenceError.of(where, "ranks differ", *lines, fix=fix)
