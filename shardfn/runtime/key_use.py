"""The keys that the calls of a program use, remembered under SHARDFN_CHECK=1."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..capture import Captured
from ..capture.key_reuse import used_keys
from ..random.used import check_key_unused
from .arguments import Placed
from .options import Request

Run = Callable[[list[Any]], Any]


def keys_noted(run: Run, request: Request, placed: Placed, captured: Captured) -> Run:
    """Wrap `run` so that under SHARDFN_CHECK=1 a key that an earlier call has used is refused."""
    if os.environ.get("SHARDFN_CHECK") != "1":
        return run
    known = captured.closed_over
    used = used_keys(captured.program.graph.graph, request.name, known)
    if not used:
        return run

    def note_and_run(leaves: list[Any]) -> Any:
        inputs = [*(leaves[i] for i in placed.tensors), *known]
        for i in used:
            check_key_unused(request.name, inputs[i])
        return run(leaves)

    return note_and_run
