"""A step in one sentence: whether it fits, how long it takes, what bounds it, what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..byte_sizes import human_bytes
from ..durations import human_seconds

ARITHMETIC, TRAFFIC, BUBBLE = "arithmetic", "memory traffic", "the bubble"
COMMUNICATION = "communication"
MUCH = 0.1  # of a step, from which on waits have a sentence
HALF = 0.5  # of a step: a smaller part does not bound it alone, and a link is busy from it on


@attrs.frozen
class Summary:
    """The figures of a step that its sentence names.

    Args:
        name: of the function.
        mesh: as text.
        hardware: the name of the model.
        total: seconds of a step.
        parts: seconds by what a rank is busy with or waits for: "arithmetic", "memory traffic",
            "communication over dp", "the bubble".
        peak: bytes of a rank at its peak; with a pipeline, of the rank that holds most.
        capacity: bytes of a device; None if they are not known.
        nbytes: payload bytes of all collectives of a rank.
        collectives: how many a step has.
        mfu: the share of the device's peak arithmetic; None if it is not known.
        sends: seconds that the collectives over each axis take, hidden or not.
        first: what to change first; empty if nothing is known.
        holder: with a pipeline, the coordinate that holds most.
    """

    name: str
    mesh: str
    hardware: str
    total: float
    parts: Mapping[str, float]
    peak: int
    capacity: float | None
    nbytes: int
    collectives: int
    mfu: float | None = None
    sends: Mapping[str, float] = attrs.field(factory=dict)
    first: str = ""
    holder: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in a device's memory; None if its size is not known."""
        return None if self.capacity is None else self.peak <= self.capacity

    @property
    def bounds(self) -> dict[str, float]:
        """The seconds by what may bound a step: the communication over all axes is one."""
        seconds: dict[str, float] = {}
        for name, x in self.parts.items():
            kind = COMMUNICATION if name.startswith(COMMUNICATION) else name
            seconds[kind] = seconds.get(kind, 0.0) + x
        return seconds

    @property
    def bound(self) -> str:
        """What takes the largest part of a step."""
        return max(self.bounds, key=lambda name: self.bounds[name], default="")

    def sentences(self) -> list[str]:
        """Return the step in sentences: fit, time, what bounds it, what to change first."""
        return [self._fit(), self._time(), *self._bound(), *([self.first] if self.first else [])]

    def _fit(self) -> str:
        peak = human_bytes(self.peak)
        at = f", at {self.holder}" if self.holder else ""
        if self.capacity is None:
            return f"{self.name} on mesh {self.mesh} holds {peak} a rank{at}."
        verb = "fits" if self.fits else "does not fit"
        most = human_bytes(self.capacity)
        return f"{self.name} on mesh {self.mesh} {verb}: {peak} of the {most} of a device{at}."

    def _time(self) -> str:
        rate = "" if self.mfu is None else f", at {self.mfu:.1%} MFU"
        return f"A step takes {human_seconds(self.total)} on {self.hardware}{rate}."

    def _bound(self) -> list[str]:
        if not self.total or not self.bound:
            return []
        waits = self.bounds.get(COMMUNICATION, 0.0)
        waiting = f"{waits / self.total:.0%} of the step"
        if self.bound == COMMUNICATION:
            lines = [f"Communication bounds it: for {waiting} a rank only waits for collectives."]
        else:
            share, part = self.bounds[self.bound] / self.total, capitalised(self.bound)
            verb = "bounds it" if share >= HALF else "takes the largest part of it"
            lines = [f"{part} {verb}: {share:.0%} of the step."]
            if waits >= MUCH * self.total:
                lines.append(f"For {waiting} a rank waits for collectives.")
        axis, sends = max(self.sends.items(), key=lambda item: item[1], default=("", 0.0))
        if waits >= MUCH * self.total and sends >= HALF * self.total:
            share = sends / self.total
            lines.append(f"Collectives over {axis} are on their way for {share:.0%} of the step.")
        return lines

    def contents(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        return {
            "sentences": self.sentences(),
            "total": self.total,
            "parts": [[name, seconds] for name, seconds in self.parts.items() if seconds],
            "bound": [self.bound, self.bounds.get(self.bound, 0.0)],
            "peak": self.peak,
            "capacity": self.capacity,
            "fits": self.fits,
            "nbytes": self.nbytes,
            "collectives": self.collectives,
            "mfu": self.mfu,
        }


def capitalised(text: str) -> str:
    """Return a text as a sentence begins."""
    return text[:1].upper() + text[1:]


def communication_over(axis: str) -> str:
    """Return the name of the time in which a rank waits for collectives over an axis."""
    return f"{COMMUNICATION} over {axis}"
