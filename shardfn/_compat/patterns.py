"""Inductor's attention patterns, made to compare constants such as the dim of a softmax.

Inductor looks for attention by patterns that it has traced before, on other sizes, and ignores
every integer in them, such as the dim of a softmax and the order of a permutation. A pattern of
other ops it traces again, for the sizes that it meets, and compares all. So it does here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .compilations.caches import settings

TRACED = "search_fn_pattern"  # the variable of a pattern's check that holds the traced one


@contextlib.contextmanager
def constants_compared() -> Iterator[None]:
    """Clear the pre-traced attention patterns, so that Inductor traces each for the sizes at
    hand, and keep casts that change values.
    """
    from torch._inductor import config

    saved = [(cell, cell.cell_contents) for cell in _cells() if cell.cell_contents is not None]
    for cell, _ in saved:
        cell.cell_contents = None
    try:
        with settings(config, emulate_precision_casts=True):
            yield
    finally:
        for cell, pattern in saved:
            cell.cell_contents = pattern


def _cells() -> list[Any]:
    """List the closure cells of Inductor's pattern checks that store a pre-traced pattern."""
    from torch._inductor.fx_passes import joint_graph

    joint_graph.lazy_init(None)
    entries = [e for p in joint_graph.pass_patterns for es in p.patterns.values() for e in es]
    checks: list[Any] = [getattr(e, "extra_check", None) for e in entries]
    cells = []
    for check in checks:
        names = getattr(getattr(check, "__code__", None), "co_freevars", ())
        if TRACED in names:
            cells.append(check.__closure__[names.index(TRACED)])
    return cells
