"""The user's line in the error of an op that checks values while a program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import source_text
from ..errors import ShardError
from ..ops.loops import inner_nodes
from ..ops.nodes import origin_of
from ..ops.ragged import READS_COUNTS
from ..types import LocalProgram

Execute = Callable[[list[Any]], list[Any]]


def located(execute: Execute, program: LocalProgram) -> Execute:
    """Wrap a function that runs a program, if an op of it checks values: its errors name the lines
    of such ops.

    Args:
        execute: runs the program.
        program: of one rank.

    Returns:
        The function itself, if no op checks values.
    """
    checks = [x for x in inner_nodes(program.graph, once=True) if x.target in READS_COUNTS]
    origins = [origin_of(x) for x in checks if x.meta.get("source")]
    lines = dict.fromkeys(source_text.located(**origin, full=True) for origin in origins)
    if not lines:
        return execute

    def locate(leaves: list[Any]) -> list[Any]:
        try:
            return execute(leaves)
        except ShardError as error:
            error.locate(" or ".join(lines))
            raise

    return locate
