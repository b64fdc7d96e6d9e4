"""`Certificate`: which properties of a schedule were checked, and its time and memory before and
after.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ..buckets import human_bytes
from ..durations import human_seconds
from ..hardware import Hardware
from ..partition.planner import op_cost
from ..schedule.schedule_plan import SchedulePlan
from ..types import Collective, LocalProgram, MeshAxes
from .memory import peak_bytes
from .timeline.clock import Clock, Timeline


@attrs.frozen
class Certificate:
    """The checked properties of a schedule, with its memory and time before and after.

    Args:
        name: the name of the program.
        kinds: the number of different programs of ranks. Ranks with equal local shapes share one
            program.
        nodes: the number of nodes of this rank's graph.
        same_nodes: whether the graph has the same multiset of nodes before and after scheduling.
        same_order: whether the programs of all ranks start the collectives of each axis in the same
            order.
        waits_hold: whether each collective has one wait, after its start and before the first use.
        peak_before: the peak of live bytes before scheduling.
        peak_after: the peak of live bytes after scheduling.
        before: the timeline before scheduling.
        after: the timeline after scheduling.
        hardware: the hardware model of the timelines.
        order: for each axis, the collectives in the order in which all ranks start them.
    """

    name: str
    kinds: int
    nodes: int
    same_nodes: bool
    same_order: bool
    waits_hold: bool
    peak_before: int
    peak_after: int
    before: Timeline
    after: Timeline
    hardware: Hardware
    order: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def holds(self) -> bool:
        """Return whether the schedule passed all checks."""
        return self.same_nodes and self.same_order and self.waits_hold

    @property
    def exposed_ms(self) -> float:
        """Return the exposed communication of a step, in milliseconds."""
        return 1e3 * self.after.exposed

    def __str__(self) -> str:
        claims = (
            (
                self.same_nodes,
                f"the program has the same {self.nodes} nodes before and after scheduling",
            ),
            (
                self.same_order,
                (
                    f"collectives start in the same order on all ranks ({self.kinds} different "
                    "local programs)"
                ),
            ),
            (
                self.waits_hold,
                "each wait comes after its collective's start and before the first use of the "
                "result",
            ),
        )
        lines = [
            f"schedule of {self.name}",
            *(f"  {'holds' if ok else 'BROKEN'}: {text}" for ok, text in claims),
        ]
        change = human_bytes(abs(self.peak_after - self.peak_before))
        sign = "more" if self.peak_after >= self.peak_before else "less"
        lines.append(
            f"  peak memory of live values: {human_bytes(self.peak_after)}, {change} {sign} "
            "than in the written order"
        )
        lines.append(
            f"  on {self.hardware.name}: {_timeline_text(self.after)}; as written: "
            f"{human_seconds(self.before.exposed)} exposed"
        )
        return "\n".join(lines)


def _timeline_text(t: Timeline) -> str:
    """Return a Timeline as text: compute, communication and the exposed part."""
    compute, sent = human_seconds(t.compute), human_seconds(t.communication)
    parts = f"{compute} of computation, {sent} of communication"
    return f"{parts}, {human_seconds(t.exposed)} exposed ({t.hidden:.0%} hidden)"


def certify(
    programs: Sequence[LocalProgram],
    program: LocalProgram,
    schedule_plan: SchedulePlan,
    hardware: Hardware,
) -> Certificate:
    """Check the order and the waits of all local programs, and measure one of them.

    Args:
        programs: the different local programs.
        program: the program whose memory and time are measured.
        schedule_plan: the schedule that all ranks agreed on.
        hardware: the model.
    """
    clock = Clock(hardware, program.axes, {})
    return Certificate(
        name=program.name,
        kinds=len(programs),
        nodes=len(program.graph.nodes),
        same_nodes=all(_multiset(p.unordered) == _multiset(p.graph) for p in programs),
        same_order=all(_batch_numbers(p.graph) == list(schedule_plan.starts) for p in programs),
        waits_hold=all(_waits_hold(p.graph) for p in programs),
        peak_before=peak_bytes(program.unordered),
        peak_after=peak_bytes(program.graph),
        before=clock.timeline(program.unordered),
        after=clock.timeline(program.graph),
        hardware=hardware,
        order=_order_by_axis(program.graph, program.axes),
    )


def _multiset(graph: torch.fx.Graph) -> collections.Counter[Any]:
    """Count the nodes of a graph by their text, so that two orders of the same nodes compare
    equal.
    """
    return collections.Counter(
        (n.op, str(n.target), n.name, str(n.args), str(n.kwargs)) for n in graph.nodes
    )


def _batch_numbers(graph: torch.fx.Graph) -> list[int]:
    """Return the batch number of each collective of a graph, in order."""
    return [n.meta["batch"] for n in graph.nodes if "collective" in n.meta]


def _order_by_axis(
    graph: torch.fx.Graph, axes: MeshAxes
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the names of the collectives of each mesh axis, in order."""
    records: list[Collective] = [
        n.meta["collective"] for n in graph.nodes if "collective" in n.meta
    ]
    return tuple((axis, tuple(r.name for r in records if r.axis == axis)) for axis in axes.names)


def _waits_hold(graph: torch.fx.Graph) -> bool:
    """Return whether each collective has one wait, after its start and before the first use."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if "collective" in node.meta:
            waits = list(node.users)
            if len(waits) != 1 or waits[0].target is not op_cost.WAIT:
                return False
            if (
                not position[node]
                < position[waits[0]]
                < min((position[u] for u in waits[0].users), default=len(position))
            ):
                return False
    return True
