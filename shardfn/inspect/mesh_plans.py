"""`MeshPlans`: the best placements of one program on each of several meshes, compared
in a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from ..byte_sizes import human_bytes
from ..collectives import COLLECTIVES
from ..placement_table import ArgumentPlacements
from ..types import Collective, MeshAxes
from .memory import Memory
from .step_time import StepTime

HEADS = ("mesh", "ms a step", "sent a rank", "peak a rank", "collectives")


@attrs.frozen(eq=False)
class MeshPlan:
    """The best placements that were found on one mesh.

    Args:
        axes: names and sizes of the mesh.
        time: of a step of one rank.
        memory: of one rank.
        collectives: of one rank.
        placements: of the arguments.
    """

    axes: MeshAxes
    time: StepTime
    memory: Memory
    collectives: tuple[Collective, ...]
    placements: ArgumentPlacements

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
            f"{1e3 * self.time.total:.3f}",
            human_bytes(self.sent),
            human_bytes(self.memory.peak),
            ", ".join(kinds) or "none",
        )


@attrs.frozen(eq=False)
class MeshPlans:
    """Plans on several meshes, the fastest first.

    Args:
        name: of the function.
        plans: of the meshes on which placements were found.
        refused: for each other mesh, why there are none.
    """

    name: str
    plans: tuple[MeshPlan, ...]
    refused: tuple[tuple[MeshAxes, str], ...] = ()

    @property
    def best(self) -> MeshPlan:
        """Return the plan of the fastest mesh."""
        return self.plans[0]

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        hardware = self.best.time.hardware
        grid = [HEADS, *(plan.cells() for plan in self.plans)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [f"{self.name} on {hardware}"]
        for row in grid:
            cells = [x.ljust(n) for x, n in zip(row, widths, strict=True)]
            lines.append(f"  {'  '.join(cells)}".rstrip())
        lines += [f"  {axes}: {why}" for axes, why in self.refused]
        for plan in self.plans:
            lines.append(f"on {plan.axes}: in_placements = {plan.placements.text()}")
        return "\n".join(lines)


def sent_bytes(collectives: Iterable[Collective], axes: MeshAxes) -> float:
    """Sum the bytes that a rank sends in some collectives, each run as a ring."""
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return sum(
        COLLECTIVES[c.kind].rounds * c.nbytes * (sizes[c.axis] - 1) / sizes[c.axis]
        for c in collectives
    )
