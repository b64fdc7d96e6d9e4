"""Inductor's rules for the dtypes of results: made once a compilation.

Inductor makes all of them again for each op of each kernel, which takes 0.1 ms (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import threads


@contextlib.contextmanager
def rules_kept() -> Iterator[None]:
    """A context in which this thread makes the rules once, and again where one was added."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.utils import op_dtype_propagation_rules

    mine = threads.only_here()
    known: list[dict[str, Any]] = []

    def made(original: Any, handler: Any) -> None:
        if known != [op_dtype_propagation_rules]:
            original(handler)
            known[:] = [dict(op_dtype_propagation_rules)]

    with threads.overridden(DtypePropagationOpsHandler, "__init__", made, mine):
        yield
