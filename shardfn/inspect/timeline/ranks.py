"""`RankTimeline`: the timeline of ranks that run equal programs at equal times."""

from __future__ import annotations

import functools

import attrs

from .events import MOST_EVENTS, Event, GraphRun

SHOWN = 4  # ranks in a name


@attrs.frozen(eq=False)
class RankTimeline:
    """What some ranks of a mesh do in a step. They run equal programs at equal times.

    Args:
        title: their coordinate on the axis of a pipeline, such as "pp=1"; "" without one.
        ranks: their row-major indices in the mesh.
        run: the step on each of them.
    """

    title: str
    ranks: tuple[int, ...]
    run: GraphRun = attrs.field(repr=False)

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of a step on each of them, in order of their start. Loops are unrolled as
        deep as that gives no more than 50,000; a deeper body is one event a track.
        """
        return self.run.unrolled(self.run.depth_within(MOST_EVENTS))

    @property
    def name(self) -> str:
        """Return their coordinate and their numbers."""
        shown = ", ".join(map(str, self.ranks[:SHOWN]))
        if len(self.ranks) > SHOWN:
            shown += f", ... {self.ranks[-1]}"
        ranks = f"rank {shown}" if len(self.ranks) == 1 else f"each of ranks {shown}"
        return f"{self.title}, {ranks}" if self.title else ranks
