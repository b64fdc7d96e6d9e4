"""`StepTime`: the predicted time of one rank's step under a model of the hardware (roofline and
links).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ..byte_sizes import human_bytes
from ..collectives import SEND
from ..durations import human_seconds
from ..extensions import page_of
from ..hardware import Hardware, Link
from ..ops.loops import Branch, Loop, Scan, While, loop_of
from ..ops.messages import Receive, Send
from ..ops.pipeline import Pipeline, Run
from ..partition.planner import op_cost
from ..source_text import joined_paths, located, shape_of_path
from ..types import Collective, LocalProgram, MeshAxes

SHOWN = 10  # rows in the text
# op, axis, line, and the module as `shape_of_path` has it: of all layers
Key = tuple[str, str | None, str | None, tuple[str, ...] | None]
# op, axis, line, module, how often it runs, seconds of one run
Entry = tuple[str, str | None, str | None, str | None, int, float]


@attrs.frozen
class Timeline:
    """The seconds of compute, communication and exposed communication of one rank's step. Compute
    has one queue, and each mesh axis one queue of collectives.
    """

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0  # exposed communication

    @property
    def total(self) -> float:
        """Return the time of the step."""
        return self.compute + self.exposed

    @property
    def hidden(self) -> float:
        """Return the share of communication that overlaps with compute."""
        return 1.0 if self.communication == 0 else max(0.0, 1 - self.exposed / self.communication)

    def times(self, n: int) -> Timeline:
        """Return the timeline of n steps, one after the other."""
        return Timeline(n * self.compute, n * self.communication, n * self.exposed)


@attrs.frozen
class OpTime:
    """The time of the equal ops of one line, in equal modules.

    Args:
        name: the op, or the kind of collective.
        axis: the mesh axis of a collective. None for an op.
        count: how often a step runs it.
        seconds: of all of them.
        source: the line.
        module: the path of the submodule; of those of several layers with the range of their
            numbers, layers.0-31.up.
    """

    name: str
    axis: str | None
    count: int
    seconds: float
    source: str | None
    module: str | None = None

    def __str__(self) -> str:
        name = self.name if self.axis is None else f"{self.name} over {self.axis}"
        where = located(self.source, self.module)
        line = f"{_aligned(self.seconds)}  {self.count:>5} x {name:<28} {where}"
        return line.rstrip()


@attrs.frozen
class StepTime:
    """The time of one rank's step, in seconds.

    Args:
        name: of the program.
        hardware: the name of the model.
        compute: of all ops.
        communication: of all collectives.
        exposed: the communication that no op runs beside, in the order of the schedule.
        ops: the ops and collectives of each line, the longest first.
        endless: the number of while loops. Each counts as one step, as the number of steps
            depends on values.
        capacity: bytes of a device's memory. None: not known.
        memory: counts the bytes of the rank at its peak.
        bubble: the time in which the rank waits for other stages of a pipeline, until the last of
            them is done.
    """

    name: str
    hardware: str
    compute: float
    communication: float
    exposed: float
    ops: tuple[OpTime, ...]
    endless: int = 0
    capacity: float | None = None
    memory: Callable[[], float] | None = attrs.field(default=None, eq=False, repr=False)
    bubble: float = 0.0

    @property
    def excess(self) -> float:
        """Return the bytes at the peak that do not fit in the memory of the device; 0 if all do."""
        if self.capacity is None or self.memory is None:
            return 0.0
        return max(0.0, self.memory() - self.capacity)

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return self.compute + self.exposed + self.bubble

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in a notebook."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {human_seconds(self.total)} a step on {self.hardware}",
            f"  compute        {_aligned(self.compute)}",
            f"  communication  {_aligned(self.communication)}",
            f"  exposed        {_aligned(self.exposed)}",
            *self.bubble_line(),
            *self.out_of_memory_line(),
            "the longest first",
        ]
        shown = self.ops[:SHOWN]
        lines += [f"  {row}" for row in shown]
        if len(self.ops) > len(shown):
            lines.append(f"  and {len(self.ops) - len(shown)} more")
        if self.endless:
            lines.append(f"{self.endless} while loops count as one step each")
        return "\n".join(lines)

    def bubble_line(self) -> list[str]:
        """Return a line for a stage of a pipeline."""
        if not self.bubble:
            return []
        return [f"  bubble         {_aligned(self.bubble)}, {self.bubble / self.total:.1%}"]

    def out_of_memory_line(self) -> list[str]:
        """Return a line if the peak does not fit in the memory of the device."""
        excess = self.excess
        if not excess:
            return []
        assert self.capacity is not None
        peak, most = human_bytes(int(self.capacity + excess)), human_bytes(int(self.capacity))
        return [f"  does not fit: the peak of {peak} is above the {most} of a device"]


def step_time(
    program: LocalProgram,
    hardware: Hardware,
    links: Mapping[str, Link] | None = None,
    memory: Callable[[], float] | None = None,
    stages: Sequence[LocalProgram] = (),
) -> StepTime:
    """Predict the time of one rank's step, in the order of its schedule.

    Args:
        program: of the rank.
        hardware: the model.
        links: of mesh axes, by name, in place of the hardware's.
        memory: counts the bytes of the rank at its peak.
        stages: the programs of all coordinates of a pipeline's axis, of the rank's other
            coordinates.
    """
    clock = Clock(hardware, program.axes, links or {})
    times = clock.timeline(program.graph)
    counts: collections.Counter[Key] = collections.Counter()
    seconds: dict[Key, float] = collections.defaultdict(float)
    paths: dict[Key, dict[str, None]] = collections.defaultdict(dict)
    for name, axis, source, module, count, took in clock.entries(program.graph):
        if took:
            key = name, axis, source, shape_of_path(module)
            counts[key] += count
            seconds[key] += count * took
            paths[key].update({module: None} if module else {})
    rows = [
        OpTime(key[0], key[1], counts[key], took, key[2], joined_paths(paths[key]) or None)
        for key, took in seconds.items()
    ]
    longest = sorted(rows, key=lambda row: -row.seconds)
    return StepTime(
        program.name,
        hardware.name,
        times.compute,
        times.communication,
        times.exposed,
        tuple(longest),
        _count_while_loops(program.graph),
        hardware.capacity,
        memory,
        clock.bubble(program.graph, [x.graph for x in stages]),
    )


class Clock:
    """A model of time: the seconds of each op and collective of a program.

    Args:
        hardware: the model.
        axes: of the mesh.
        links: of axes, in place of the hardware's.
    """

    def __init__(self, hardware: Hardware, axes: MeshAxes, links: Mapping[str, Link]) -> None:
        self.hardware = hardware
        self.sizes = dict(zip(axes.names, axes.sizes, strict=True))
        self.links = {**hardware.links(axes), **links}

    def send(self, record: Collective) -> float:
        """Return the seconds of a collective."""
        link, n = self.links[record.axis], self.sizes[record.axis]
        return link.send(record.kind, record.nbytes, n)

    def timeline(self, graph: torch.fx.Graph) -> Timeline:
        """Simulate a graph: compute runs in order, and the collectives of each axis run in order
        beside it.
        """
        now = compute = communication = exposed = 0.0
        free = dict.fromkeys(self.sizes, 0.0)
        ends: dict[torch.fx.Node, float] = {}
        for node in graph.nodes:
            record = node.meta.get("collective")
            if record is not None:
                took = self.send(record)
                ends[node] = free[record.axis] = max(now, free[record.axis]) + took
                communication += took
            elif node.target is op_cost.WAIT:
                waited = max(0.0, ends.get(node.args[0], now) - now)
                exposed += waited
                now += waited
            elif isinstance(node.target, Loop):
                inside = self.loop(loop_of(node))
                compute += inside.compute
                communication += inside.communication
                exposed += inside.exposed
                now += inside.total
            elif node.op == "call_function":
                took = op_cost.seconds(node, self.hardware)
                compute += took
                now += took
        return Timeline(compute, communication, exposed)

    def loop(self, loop: Loop) -> Timeline:
        """Return the timeline of a loop (all its steps) or of a branch (its longer body)."""
        if isinstance(loop, Pipeline):
            return self.alone(loop)
        inside = [self.timeline(graph) for graph in loop.graphs]
        if isinstance(loop, Branch):
            return max(inside, key=lambda times: times.total)
        steps = [times.times(_steps(loop)) for times in inside]
        return Timeline(
            sum(times.compute for times in steps),
            sum(times.communication for times in steps),
            sum(times.exposed for times in steps),
        )

    def bubble(self, graph: torch.fx.Graph, stages: Sequence[torch.fx.Graph]) -> float:
        """Return the seconds in which a rank waits for other stages of its pipelines."""
        rows = zip(*map(_pipelines, stages), strict=True)
        pairs = zip(_pipelines(graph), rows, strict=False)
        return sum(self.together(row) - self.alone(own).total for own, row in pairs)

    def alone(self, pipeline: Pipeline) -> Timeline:
        """Return the timeline of a coordinate's part of a pipeline if it never waits."""
        inside = [self.timeline(graph) for graph in pipeline.graphs]
        runs = [inside[x.graph] for x in pipeline.actions()]
        sent = sum(map(self.message, pipeline.sends()))
        return Timeline(
            sum(times.compute for times in runs),
            sum(times.communication for times in runs) + sent,
            sum(times.exposed for times in runs),
        )

    def message(self, send: Send) -> float:
        """Return the seconds of a message."""
        return self.links[send.axis].send(SEND, send.message.aval.nbytes, self.sizes[send.axis])

    def together(self, pipelines: Sequence[Pipeline]) -> float:
        """Return the seconds from the first action of all coordinates of a pipeline to the last.
        Messages of one direction follow each other, beside all computation.
        """
        inside = [[self.timeline(graph).total for graph in x.graphs] for x in pipelines]
        at, now = [0] * len(pipelines), [0.0] * len(pipelines)
        arrival: dict[int, float] = {}
        free: dict[tuple[int, int], float] = collections.defaultdict(float)
        while any(i < len(x.instructions) for i, x in zip(at, pipelines, strict=True)):
            before = list(at)
            for c, pipeline in enumerate(pipelines):
                for x in pipeline.instructions[at[c] :]:
                    if isinstance(x, Receive) and x.message.number not in arrival:
                        break
                    if isinstance(x, Receive):
                        now[c] = max(now[c], arrival[x.message.number])
                    elif isinstance(x, Send):
                        way = x.message.source, x.message.target
                        free[way] = max(now[c], free[way]) + self.message(x)
                        arrival[x.message.number] = free[way]
                    elif isinstance(x, Run):
                        now[c] += inside[c][x.graph]
                    at[c] += 1
            assert at != before, "coordinates of a pipeline wait for each other"
        return max(now)

    def entries(self, graph: torch.fx.Graph, times: int = 1) -> Iterator[Entry]:
        """Yield each op of a graph and its loops."""
        for node in graph.nodes:
            source, module = node.meta.get("source"), node.meta.get("module")
            record = node.meta.get("collective")
            if record is not None:
                yield record.kind, record.axis, source, module, times, self.send(record)
            elif isinstance(node.target, Loop):
                loop = loop_of(node)
                for send in loop.sends() if isinstance(loop, Pipeline) else ():
                    x = send.message
                    yield SEND, send.axis, x.source_line, x.module, times, self.message(send)
                for inner in self._counted_bodies(loop):
                    yield from self.entries(inner, times * _steps(loop))
            elif node.op == "call_function" and node.target is not op_cost.WAIT:
                name = getattr(node.target, "_opname", node.name)
                took = op_cost.seconds(node, self.hardware)
                yield name, None, source, module, times, took

    def _counted_bodies(self, loop: Loop) -> tuple[torch.fx.Graph, ...]:
        """Return the graphs of a loop that count in the time: of a cond the longer one."""
        if isinstance(loop, Branch):
            return (max(loop.graphs, key=lambda graph: self.timeline(graph).total),)
        return loop.graphs


def _steps(loop: Loop) -> int:
    """Return the number of steps of a loop, as far as it is known: 1 for while_loop."""
    return loop.length if isinstance(loop, (Scan, Pipeline)) else 1


def _pipelines(graph: torch.fx.Graph) -> list[Pipeline]:
    """Return the pipelines of a graph."""
    return [node.target for node in graph.nodes if isinstance(node.target, Pipeline)]


def _count_while_loops(graph: torch.fx.Graph) -> int:
    """Count the while loops of a graph, those inside other loops included."""
    count = 0
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            loop = loop_of(node)
            count += isinstance(loop, While)
            count += sum(_count_while_loops(inner) for inner in loop.graphs)
    return count


def _aligned(seconds: float) -> str:
    return f"{human_seconds(seconds):>13}"
