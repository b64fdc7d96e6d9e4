"""The contents of a report: all figures of a lowered step, as the page's JSON has them."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch.fx import Graph

from ..compile.memory import memory_as_run
from ..durations import human_seconds
from ..hardware import NETWORK, NODE, Hardware, physical_links
from ..inspect.memory import Memory
from ..inspect.step_time import StepTime
from ..ops.loops import Loop, loop_of
from ..partition.planner import op_cost
from ..runtime.arguments import donated_places
from ..runtime.stages import Lowered
from ..source_text import located_in_program
from ..types import Collective, LocalProgram, MeshAxes
from .advice import first_change
from .collectives import Reason, SentByLine, collective_rows, sent_by_line
from .memory import memory_rows
from .placements import placement_rows
from .program import program_rows
from .strings import Strings
from .summary import ARITHMETIC, BUBBLE, TRAFFIC, Summary, communication_over
from .timeline import timeline_rows


@attrs.frozen(eq=False)
class Step:
    """A lowered step on some hardware, as the sections of a report read it.

    Args:
        lowered: its forward and, where autograd follows the call, its backward.
        times: of each.
        memory: of the one that holds more; with a pipeline, of the coordinate that holds most.
        holder: that coordinate, such as "pp=3"; empty without a pipeline.
        collectives: of a step, in the order of their start.
        sent: the same, by line.
        assumed: what the hardware is taken to reach, as a sentence.
    """

    lowered: tuple[Lowered, ...]
    times: tuple[StepTime, ...]
    memory: Memory
    holder: str
    collectives: tuple[Collective, ...]
    sent: tuple[SentByLine, ...]
    assumed: str

    @property
    def programs(self) -> tuple[LocalProgram, ...]:
        """The programs of this rank, one after the other."""
        return tuple(x.program for x in self.lowered)


def step_of(lowered: Lowered, hardware: Hardware) -> Step:
    """Read the figures of a lowered step.

    Args:
        lowered: the step.
        hardware: the model of time.
    """
    halves = (lowered,) if lowered.backward is None else (lowered, lowered.backward)
    times = tuple(x.time(hardware) for x in halves)
    collectives = lowered.explain().collectives
    sent = sent_by_line(collectives, times, lowered.plan)
    memories = dict(_memories(halves))
    holder = max(memories, key=lambda name: memories[name].peak)
    of_pipeline = "" if lowered.partition.stage_axis is None else holder
    assumed = _assumed(hardware, lowered.program.axes)
    return Step(halves, times, memories[holder], of_pipeline, collectives, sent, assumed)


def _assumed(hardware: Hardware, axes: MeshAxes) -> str:
    """Return what a model of hardware takes its devices and links to reach."""
    share, physical = hardware.efficiency, physical_links(hardware, axes)
    products, attention = (hardware.power * x for x in (share.product16, share.attention))
    where = {NODE: "within a node", NETWORK: "between nodes"}
    links = [
        f"{name} sends {where[physical[name]]}, {link.bandwidth / 1e9:.0f} GB/s"
        for name, link in hardware.links(axes).items()
    ]
    return (
        f"Assumptions: matrix products reach {products:.0%} of the device's peak, attention "
        f"{attention:.0%}, memory traffic {share.memory:.0%}; {'; '.join(links)}."
    )


def _memories(halves: Sequence[Lowered]) -> Iterator[tuple[str, Memory]]:
    """Yield the memory of each program of a step, or of each coordinate of a pipeline."""
    lowered = halves[0]
    axis = lowered.partition.stage_axis
    if axis is None:
        yield from ((str(k), half.memory) for k, half in enumerate(halves))
        return
    axes, traced = lowered.program.axes, lowered.traced
    donated = donated_places(traced.placed)
    for k in range(axes.sizes[axis]):
        memory = memory_as_run(lowered.stage(k), traced.request.backend, donated)
        yield f"{axes.names[axis]}={k}", memory


def summary_of(step: Step, reasons: Mapping[SentByLine, Reason]) -> Summary:
    """Return the figures of a step's sentence, with what to change first.

    Args:
        step: the step.
        reasons: why its collectives are sent, and what spares them.
    """
    program, times = step.programs[0], step.times
    arithmetic = sum(map(_arithmetic, times, step.programs))
    parts = {ARITHMETIC: arithmetic, TRAFFIC: sum(time.compute for time in times) - arithmetic}
    sends = collections.defaultdict[str, float](float)
    for x in step.sent:
        name = communication_over(x.axis)
        parts[name] = parts.get(name, 0.0) + x.exposed
        sends[x.axis] += x.seconds
    parts[BUBBLE] = sum(time.bubble for time in times)
    summary = Summary(
        name=program.name,
        mesh=str(program.axes),
        hardware=times[0].hardware,
        total=sum(time.total for time in times),
        parts=parts,
        sends=sends,
        peak=step.memory.peak,
        holder=step.holder,
        capacity=times[0].capacity,
        nbytes=sum(x.nbytes for x in step.collectives),
        collectives=len(step.collectives),
        mfu=sum(time.mfu * time.total for time in times) / (sum(x.total for x in times) or 1),
    )
    placements = step.lowered[0].placements.table
    first = first_change(summary, reasons, step.memory, placements, _slowest(step))
    return attrs.evolve(summary, first=first)


def _slowest(step: Step) -> str:
    """Return the op that takes longest, with its line."""
    ops = [op for time in step.times for op in time.ops if op.axis is None]
    op = max(ops, key=lambda op: op.seconds, default=None)
    if op is None:
        return "nothing"
    return f"{op.name} at {located_in_program(op.source, op.module)}, {human_seconds(op.seconds)}"


def _arithmetic(time: StepTime, program: LocalProgram) -> float:
    """Return the seconds of matrix products, convolutions and attention."""
    names = set(_names_with_flops(program.graph))
    return sum(op.seconds for op in time.ops if op.axis is None and op.name in names)


def _names_with_flops(graph: Graph) -> list[str]:
    names = []
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            for body in loop_of(node).graphs:
                names += _names_with_flops(body)
        elif node.op == "call_function" and "collective" not in node.meta and op_cost.flops(node):
            names.append(getattr(node.target, "_opname", node.name))
    return names


def contents_of(
    step: Step, summary: Summary, reasons: Mapping[SentByLine, Reason]
) -> dict[str, Any]:
    """Return all sections of the page.

    Args:
        step: the step.
        summary: its sentence and figures.
        reasons: why its collectives are sent, and what spares them.
    """
    lowered, strings = step.lowered[0], Strings()
    axes = lowered.program.axes
    contents: dict[str, Any] = {
        "name": lowered.program.name,
        "mesh": str(axes),
        "axes": [*map(list, zip(axes.names, axes.sizes, strict=True))],
        "rank": list(lowered.traced.placed.coordinate),
        "hardware": step.times[0].hardware,
        "summary": summary.contents(),
        "assumed": step.assumed,
        "endless": sum(time.endless for time in step.times),
        "timeline": timeline_rows(step.times, strings),
        "memory": {**memory_rows(step.memory, strings), "holder": step.holder},
        "collectives": collective_rows(step.sent, reasons, strings),
        "placements": placement_rows(lowered.placements.table, strings),
        "program": program_rows(step.programs),
    }
    contents["lines"] = strings.lines()
    contents["strings"] = strings.texts()
    return contents
