"""`MeshPlans`: the best placements of one program on each of several meshes, and the schedules of
its pipeline, compared in a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from ..byte_sizes import human_bytes
from ..collectives import COLLECTIVES
from ..durations import human_seconds
from ..pipelines import Schedule
from ..placement_table import ArgumentPlacements
from ..types import Collective, MeshAxes
from .memory import Memory
from .step_time import StepTime

HEADS = ("mesh", "time a step", "sent a rank", "peak a rank", "collectives")
OF_SCHEDULE = ("schedule", "stages", "microbatches", "idle")


@attrs.frozen(eq=False)
class MeshPlan:
    """The best placements that were found on one mesh, or those of one schedule on it.

    Args:
        axes: names and sizes of the mesh.
        time: of a step of one rank; of a pipeline, on the coordinate that takes the longest.
        memory: of one rank; of a pipeline, on the coordinate that holds the most.
        collectives: of one rank; of a pipeline, on the coordinate that sends the most.
        placements: of the arguments.
        schedule: of the pipeline; None without one.
        idle: the share of the time of all coordinates in which they wait for other stages.
    """

    axes: MeshAxes
    time: StepTime
    memory: Memory
    collectives: tuple[Collective, ...]
    placements: ArgumentPlacements
    schedule: Schedule | None = None
    idle: float = 0.0

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends in a step."""
        return sent_bytes(self.collectives, self.axes)

    def cells(self) -> tuple[str, ...]:
        """Return the plan as a row of the table."""
        counts = Counter(f"{c.kind} over {c.axis}" for c in self.collectives)
        kinds = [f"{n} {kind}" for kind, n in sorted(counts.items())]
        return (
            str(self.axes),
            *self._cells_of_schedule(),
            human_seconds(self.time.total),
            human_bytes(self.sent),
            human_bytes(self.memory.peak),
            ", ".join(kinds) or "none",
        )

    def _cells_of_schedule(self) -> tuple[str, ...]:
        """Return the cells that only a pipeline has."""
        x = self.schedule
        if x is None:
            return ()
        return x.name, str(x.stages), str(x.microbatches), f"{self.idle:.1%}"


@attrs.frozen(eq=False)
class MeshPlans:
    """Plans on several meshes, the fastest first.

    Args:
        name: of the function.
        plans: of the meshes on which placements were found, or of the schedules that fit.
        refused: for each other mesh, why there are none, and for each other schedule its peak.
    """

    name: str
    plans: tuple[MeshPlan, ...]
    refused: tuple[tuple[MeshAxes, str], ...] = ()

    @property
    def best(self) -> MeshPlan:
        """Return the fastest plan."""
        return self.plans[0]

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        hardware = self.best.time.hardware
        heads = HEADS if self.best.schedule is None else (HEADS[0], *OF_SCHEDULE, *HEADS[1:])
        grid = [heads, *(plan.cells() for plan in self.plans)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [f"{self.name} on {hardware}"]
        for row in grid:
            cells = [x.ljust(n) for x, n in zip(row, widths, strict=True)]
            lines.append(f"  {'  '.join(cells)}".rstrip())
        lines += [f"  {axes}: {why}" for axes, why in self.refused]
        texts = [f"on {x.axes}: in_placements = {x.placements.text()}" for x in self.plans]
        return "\n".join([*lines, *dict.fromkeys(texts)])


def sent_bytes(collectives: Iterable[Collective], axes: MeshAxes) -> float:
    """Sum the bytes that a rank sends in some collectives, each run as a ring."""
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return sum(_share(c.kind, sizes[c.axis]) * c.nbytes for c in collectives)


def _share(kind: str, n: int) -> float:
    """Return the share of a collective's bytes that a rank of n sends."""
    row = COLLECTIVES[kind]
    return 1.0 if row.is_message else row.rounds * (n - 1) / n
