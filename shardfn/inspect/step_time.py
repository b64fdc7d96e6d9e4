"""`StepTime`: the predicted time of one rank's step under a model of the hardware (roofline and
links).
"""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from ..accepted import accept
from ..byte_sizes import human_bytes
from ..durations import human_seconds
from ..extensions import page_of
from ..hardware import Hardware, Link
from ..ops.loops import Loop, While, loop_of
from ..source_text import joined_paths, located, shape_of_path
from ..types import LocalProgram, MeshAxes
from .step_flops import StepFlops, step_flops, with_shares
from .timeline.clock import Clock, Prices
from .timeline.events import BUBBLE, COMPUTE, EXPOSED, Event, GraphRun
from .timeline.ranks import RankTimeline
from .timeline.trace import Trace, write_trace

if TYPE_CHECKING:
    from .memory import Moment

SHOWN = 10  # rows in the text
MOST_OPS = 20_000  # of a program whose memory is drawn over time
# op, axis, line, and the module as `shape_of_path` has it: of all layers
Key = tuple[str, str | None, str | None, tuple[str, ...] | None]


@attrs.frozen
class OpTime:
    """The total time of the equal ops of one source line, in modules of the same kind.

    Args:
        name: the name of the op, or the kind of collective.
        axis: the mesh axis of a collective, or None for an op.
        count: how often one step runs the op.
        seconds: the total seconds of all runs.
        source: the source line of the op.
        module: the path of the submodule, with a range for several layers, such as layers.0-31.up.
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
    """The predicted time of one rank's step, in seconds.

    Args:
        name: the name of the program.
        hardware: the name of the hardware model.
        compute: the seconds of all ops.
        communication: the seconds of all collectives.
        exposed: the seconds of communication that no op overlaps.
        ops: the ops and collectives of each source line, the longest first.
        endless: the number of while loops, each of which counts as one step, because its number of
            steps depends on values.
        capacity: the bytes of a device's memory, or None if they are not known.
        memory: a function that returns the bytes of the rank at its memory peak.
        bubble: the seconds in which the rank waits for other pipeline stages, until the last stage
            is done.
        ranks: one timeline for each rank of the pipeline axis, because all other ranks run equal
            programs at equal times.
        coordinate: the index of the rank on the pipeline axis.
        operations: the floating-point operations of the rank.
        moments: a function that returns the memory of the rank during each op, in order.
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
    ranks: tuple[RankTimeline, ...] = attrs.field(default=(), eq=False, repr=False)
    coordinate: int = 0
    operations: StepFlops = StepFlops(0.0, 0.0, 0.0, 0.0)
    moments: Callable[[], Sequence[Moment]] = attrs.field(default=tuple, eq=False, repr=False)

    @property
    def flops(self) -> float:
        """Return the floating-point operations that the rank's program runs in a step, including
        recomputation, and half of the pairs of a causal attention.
        """
        return self.operations.run

    @property
    def model_flops(self) -> float:
        """Return the floating-point operations that the model needs, without recomputation, and
        with all pairs of an attention. A transformer with N parameters besides its embedding needs
        6 N + 12 L d s operations for each token.
        """
        return self.operations.model

    @property
    def hfu(self) -> float:
        """Return the hardware FLOPs utilization (HFU): the rate of `flops` as a share of the
        device's peak rate, from 0 to 1.
        """
        return self.operations.run_at_peak / self.total if self.total else 0.0

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization (MFU): the rate of `model_flops` as a share of the
        device's peak rate, from 0 to 1.
        """
        return self.mfu_of(self.model_flops)

    def mfu_of(self, flops: float) -> float:
        """Return the model FLOPs utilization (MFU) for another count of operations, such as a count
        that halves causal attention.

        Args:
            flops: the operations of one rank in a step.
        """
        accept("StepTime.mfu_of", flops=flops)
        if not self.total or not self.model_flops:
            return 0.0
        return flops / self.model_flops * self.operations.model_at_peak / self.total

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the events of the rank in a step, in the order of their start."""
        return self.ranks[self.coordinate].events

    @property
    def excess(self) -> float:
        """Return the bytes of the memory peak that exceed the memory of the device, or 0."""
        if self.capacity is None or self.memory is None:
            return 0.0
        return max(0.0, self.memory() - self.capacity)

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return self.compute + self.exposed + self.bubble

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Write the timelines of all ranks as a file for Perfetto (ui.perfetto.dev). The trace has
        one process for each rank of the pipeline axis, with threads for compute, for waits, and for
        each mesh axis. Events have the user's source line, the module path, bytes, buckets and
        actions. For a program of at most 20,000 ops, the trace shows the memory of the rank as a
        counter.

        Args:
            path: the path of the file, which ends in ".json" or ".json.gz".

        Returns:
            A `Trace`, which describes the written file. For a timeline of more than 200,000 events,
            the trace is only an outline.

        Raises:
            ShardError: the path has another ending, or the file cannot be written.

        Source: the trace event format of Chrome.
        """
        accept("StepTime.trace", path=path)
        title = f"{self.name}: {human_seconds(self.total)} a step on {self.hardware}"
        starts = self.ranks[self.coordinate].run.starts
        moments = self.moments() if len(starts) <= MOST_OPS else ()
        timed = [x for x in moments if x.op in starts]
        # a fused kernel may run after an op that the schedule has later
        times = itertools.accumulate((starts[x.op] for x in timed), max)
        sizes = [(start, x.nbytes) for start, x in zip(times, timed, strict=True)]
        return write_trace(path, title, self.ranks, {self.coordinate: sizes})

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
            *self.flops_line(),
            *self.out_of_memory_line(),
            "the longest first",
        ]
        shown = self.ops[:SHOWN]
        lines += [f"  {row}" for row in shown]
        if len(self.ops) > len(shown):
            lines.append(f"  and {len(self.ops) - len(shown)} more")
        if self.endless:
            lines.append(f"{self.endless} while loops count as one iteration each")
        return "\n".join(lines)

    def bubble_line(self) -> list[str]:
        """Return a line for a stage of a pipeline."""
        if not self.bubble:
            return []
        return [f"  bubble         {_aligned(self.bubble)}, {self.bubble / self.total:.1%}"]

    def flops_line(self) -> list[str]:
        """Return a line for a program with products."""
        if not self.flops:
            return []
        return [f"  operations     {self.flops:>10.3g}, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}"]

    def out_of_memory_line(self) -> list[str]:
        """Return a line of text if the memory peak exceeds the memory of the device."""
        excess = self.excess
        if not excess:
            return []
        assert self.capacity is not None
        peak, most = human_bytes(int(self.capacity + excess)), human_bytes(int(self.capacity))
        return [f"  does not fit: peak memory of {peak} is above the device's {most}"]


def step_time(
    program: LocalProgram,
    hardware: Hardware,
    links: Mapping[str, Link] | None = None,
    memory: Callable[[], float] | None = None,
    stages: Sequence[LocalProgram] = (),
    stage_axis: int | None = None,
    prices: Prices | None = None,
    whole: torch.fx.Graph | None = None,
) -> StepTime:
    """Predict the time of one rank's step, in the order of its schedule.

    Args:
        program: of the rank.
        hardware: the model.
        links: of mesh axes, by name, in place of the hardware's.
        memory: counts the bytes of the rank at its peak.
        stages: the programs of all coordinates of a pipeline's axis, of the rank's other
            coordinates; the rank's own is one of them.
        stage_axis: the index of the axis of a pipeline.
        prices: the seconds of the ops of a graph. None: each op runs as one kernel.
        whole: the program of all ranks on global tensors, which says what the model needs.
    """
    if stage_axis is None:
        return step_times([program], hardware, links, [memory], prices=prices, whole=whole)[0]
    own = next(k for k, x in enumerate(stages) if x is program)
    peaks = [memory if k == own else None for k in range(len(stages))]
    return step_times(stages, hardware, links, peaks, stage_axis, prices, whole)[own]


def step_times(
    programs: Sequence[LocalProgram],
    hardware: Hardware,
    links: Mapping[str, Link] | None,
    memories: Sequence[Callable[[], float] | None],
    stage_axis: int | None = None,
    prices: Prices | None = None,
    whole: torch.fx.Graph | None = None,
) -> list[StepTime]:
    """Predict the time of a step on each coordinate of a pipeline's axis, or on the one rank of a
    program without a pipeline.

    Args:
        programs: of each coordinate.
        hardware: the model.
        links: of mesh axes, by name, in place of the hardware's.
        memories: count the bytes of each coordinate at its peak.
        stage_axis: the index of the axis of a pipeline.
        prices: the seconds of the ops of a graph. None: each op runs as one kernel.
        whole: the program of all ranks on global tensors, which says what the model needs.
    """
    axes = programs[0].axes
    axis = None if stage_axis is None else axes.names[stage_axis]
    clock = Clock(hardware, axes, links or {}, axis, prices)
    graphs = [program.graph for program in programs]
    operations = [step_flops(graph, hardware) for graph in graphs]
    if whole is not None:
        ranks = math.prod(axes.sizes) // len(graphs)
        operations = with_shares(operations, whole, ranks, hardware)
    runs = [clock.run(graphs[0])] if axis is None else clock.run_together(graphs)
    ranks = tuple(
        RankTimeline("" if axis is None else f"{axis}={k}", _ranks_at(axes, stage_axis, k), run)
        for k, run in enumerate(runs)
    )
    return [
        StepTime(
            program.name,
            hardware.name,
            run.busy.get(COMPUTE, 0.0),
            run.communication,
            run.busy.get(EXPOSED, 0.0),
            _rows(run),
            _count_while_loops(program.graph),
            hardware.capacity,
            memory,
            run.busy.get(BUBBLE, 0.0),
            ranks,
            k,
            operations[k],
        )
        for k, (program, run, memory) in enumerate(zip(programs, runs, memories, strict=True))
    ]


def _rows(run: GraphRun) -> tuple[OpTime, ...]:
    """Sum the time of equal ops and collectives, the longest first."""
    counts: collections.Counter[Key] = collections.Counter()
    seconds: dict[Key, float] = collections.defaultdict(float)
    paths: dict[Key, dict[str, None]] = collections.defaultdict(dict)
    for part, times in run.counts().items():
        for x in part.events:
            if x.seconds and x.track not in (EXPOSED, BUBBLE):
                key = x.name, x.axis, x.source, shape_of_path(x.module)
                counts[key] += times
                seconds[key] += times * x.seconds
                paths[key].update({x.module: None} if x.module else {})
    rows = [
        OpTime(key[0], key[1], counts[key], took, key[2], joined_paths(paths[key]) or None)
        for key, took in seconds.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _ranks_at(axes: MeshAxes, axis: int | None, k: int) -> tuple[int, ...]:
    """Return the row-major indices of the ranks at a coordinate of an axis; all without one."""
    if axis is None:
        return tuple(range(math.prod(axes.sizes)))
    every = enumerate(itertools.product(*map(range, axes.sizes)))
    return tuple(i for i, coordinates in every if coordinates[axis] == k)


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
