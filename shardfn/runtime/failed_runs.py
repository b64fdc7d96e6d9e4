"""Errors while a program runs: torch's error, with a note on the function, op and line."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable

import torch

from ..errors import ShardError
from ..ops.debug import has_effect
from ..ops.nodes import origin_of
from ..source_text import located
from ..tracebacks import has_our_note, note_run
from ..types import LocalProgram
from .simulator import failed_node, simulate

GENERATED = "<eval_with_key>"  # of the Python that torch.fx writes for a graph
RESULT = re.compile(r"\s*(\w+) = ")  # of a line of it


def explained(
    error: Exception,
    name: str,
    program: LocalProgram,
    inputs: Callable[[], list[list[torch.Tensor]]] | None,
) -> Exception:
    """Return the error to raise for one that a program has raised while it ran, with a note of
    the function, and of the op and the line where they are known.

    Compiled code raises errors of its own. If the program can run once more, op by op, the error
    is that of the op.

    Args:
        error: the error.
        name: of the function.
        program: of one rank.
        inputs: makes the inputs of the program, if they are as before the run and the program
            needs no other rank. None otherwise.
    """
    if isinstance(error, ShardError) or has_our_note(error):
        return error
    node = _failed(error, program)
    if node is None and inputs is not None and not any(map(has_effect, program.graph.nodes)):
        error, node = _of_an_op(error, program, inputs)
    at = "" if node is None else f", by {node.target} at {located(**origin_of(node), full=True)}"
    note_run(error, name, at)
    return error


def _failed(error: Exception, program: LocalProgram) -> torch.fx.Node | None:
    """Return the node of the graph that has raised an error, if its frames tell."""
    named = {node.name: node for node in program.graph.nodes}
    frames = [*traceback.walk_tb(error.__traceback__)]
    for frame, line in reversed(frames):
        if node := failed_node(frame):
            return node
        file = frame.f_code.co_filename
        match = RESULT.match(linecache.getline(file, line)) if GENERATED in file else None
        if match is not None and match[1] in named:
            return named[match[1]]
    return None


def _of_an_op(
    error: Exception, program: LocalProgram, inputs: Callable[[], list[list[torch.Tensor]]]
) -> tuple[Exception, torch.fx.Node | None]:
    """Run a program op by op, and return the error of its op and the op; without one, the error
    itself.
    """
    try:
        simulate([program], inputs(), [()])
    except Exception as again:
        again.__context__ = None
        return again, _failed(again, program)
    return error, None
