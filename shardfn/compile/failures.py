"""`failure`: the error for a program that Inductor cannot compile, with the function, the op and
its line.
"""

from __future__ import annotations

import torch

from .. import _compat
from ..errors import ShardError
from ..ops.nodes import origin_of
from ..source_text import NOWHERE, Origin


def failure(name: str, graph: torch.fx.Graph, error: Exception) -> ShardError:
    """Build the error for a program that Inductor does not compile.

    Args:
        name: the function.
        graph: its graph, which has the lines.
        error: of Inductor.
    """
    ops = list(dict.fromkeys(str(x.target) for x in _compat.culprits(error)))
    origin = _origin(graph, ops[0] if ops else "")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    detail = next((x for x in lines if "error:" in x), "")  # of a C++ compiler
    of = ", ".join(ops) or f"one of {', '.join(_op_names(graph))}"
    got = f"Inductor cannot compile {of}: {lines[0]} {detail}".strip()[:600]
    fix = 'backend="aten" runs the program op by op'
    return ShardError.of(name, got, needed="ops that Inductor compiles", fix=fix, **origin)


def _op_names(graph: torch.fx.Graph) -> list[str]:
    """Return the names of the first ops of a graph."""
    every = [str(x.target) for x in graph.nodes if x.op == "call_function"]
    return list(dict.fromkeys(every))[:8]


def _origin(graph: torch.fx.Graph, op: str) -> Origin:
    """Return the line and the module of the first op of that name, or of the nearest name if
    Inductor has decomposed it.
    """
    base = op.split(".")[1].strip("_") if "." in op else op
    nodes = [x for x in graph.nodes if x.op == "call_function" and x.meta.get("source")]
    equal = [x for x in nodes if str(x.target) == op]
    near = [x for x in nodes if base in str(x.target)]
    return next(map(origin_of, (*equal, *near, *nodes)), NOWHERE)
