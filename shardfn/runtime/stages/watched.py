"""Programs with collectives, which the watchdog of a job monitors."""

from __future__ import annotations

from typing import Any

import torch

from ... import extensions
from ...compile.backends import Runner
from ...mesh import group_names, ranks_of
from ...ops.loops import inner_nodes
from ...ops.pipeline import Pipeline
from ...source_text import located
from ...types import LocalProgram
from ..arguments import Placed

SHOWN = 4  # arguments in an error


def watched(compiled: Runner, name: str, placed: Placed, program: LocalProgram) -> Runner:
    """A compiled program that says when it begins and ends, where it waits for other processes.
    Any other program is returned as it is.

    Args:
        compiled: the program.
        name: of the function, which errors name.
        placed: its arguments.
        program: the local program that was compiled.
    """
    world, mesh, job = placed.world, placed.mesh, extensions.service(extensions.Job)
    if job is None or world.kind != "real" or world.size == 1 or mesh is None:
        return compiled
    sends = _sends(program.graph)
    if not sends:
        return compiled
    lane = " ".join(group_names(mesh)), ranks_of(mesh)
    described = extensions.Program(name, lane, f"{name} of ({_signature(placed)})", sends)
    run: Any = job.watched(world, described, compiled)
    run.__wrapped__ = compiled  # its generated code may come later
    return run


def _signature(placed: Placed) -> str:
    """Print dtypes and shapes of a call's first tensors, for the watchdog."""
    shown = [f"{x.dtype} {list(x.shape)}" for x in placed.avals[:SHOWN]]
    more = [", ..."] if len(placed.avals) > SHOWN else []
    return "".join([", ".join(shown).replace("torch.", ""), *more])


def _sends(graph: torch.fx.Graph) -> dict[str, str]:
    """Map each node that starts or awaits a collective to its kind, axis and line. A pipeline
    says itself which message it sends or awaits.
    """
    rows = dict[str, str]()
    for node in inner_nodes(graph, once=True):
        if isinstance(node.target, Pipeline):
            rows[node.name] = "messages of a pipeline"
        record = node.meta.get("collective")
        if record is None:
            continue
        at = f" for {located(**record.origin)}" if record.source else ""
        text = f"{record.kind} over {record.axis}{at}"
        rows.update({x.name: text for x in (node, *node.users)})
    return rows
