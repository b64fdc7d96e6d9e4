"""A program that communicates, beside which the watchdog of the job stands."""

from __future__ import annotations

import torch

from ...compile.backends import Runner
from ...jobs.beside import watch_of
from ...jobs.calls import Event
from ...jobs.watch import Watch
from ...mesh import group_names, ranks_of
from ...ops.loops import inner_nodes
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
    world, mesh = placed.world, placed.mesh
    if world.kind != "real" or world.size == 1 or mesh is None:
        return compiled
    sends = _sends(program.graph)
    if not sends:
        return compiled
    watch = watch_of(world)
    lane = watch.lane(" ".join(group_names(mesh)), ranks_of(mesh))
    text = f"{name} of ({_signature(placed)})"

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if watch.raised is not None:
            watch.caught_up(name)
        watch.enter(event)
        try:
            out = compiled(inputs)
        except Exception as error:
            _explain(watch, event, name, error)
            raise
        watch.enter(None)
        return out

    run.__wrapped__ = compiled  # its generated code may come later
    event = Event(lane, next(lane.numbers), text, sends, run.__code__)
    return run


def _signature(placed: Placed) -> str:
    """The dtypes and shapes of the first tensors."""
    shown = [f"{x.dtype} {list(x.shape)}" for x in placed.avals[:SHOWN]]
    more = [", ..."] if len(placed.avals) > SHOWN else []
    return "".join([", ".join(shown).replace("torch.", ""), *more])


def _explain(watch: Watch, event: Event, name: str, error: Exception) -> None:
    """Raise the reason why a program fails, if it is another rank. Else tell the others that it
    has failed here.
    """
    reason = watch.why(name, error)
    if reason is not None:
        raise reason from error
    watch.has_raised(event.lane, event.text, error)


def _sends(graph: torch.fx.Graph) -> dict[str, str]:
    """The collective that each node starts or waits for: its kind, its axis and its line."""
    rows = dict[str, str]()
    for node in inner_nodes(graph, once=True):
        record = node.meta.get("collective")
        if record is None:
            continue
        at = f" for {record.source}" if record.source else ""
        text = f"{record.kind} over {record.axis}{at}"
        rows.update({x.name: text for x in (node, *node.users)})
    return rows
