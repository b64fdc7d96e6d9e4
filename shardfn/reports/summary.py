"""A step in one sentence: whether it fits, how long it takes, what bounds it, what to change."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import attrs

from ..byte_sizes import human_bytes
from ..durations import human_seconds

ARITHMETIC, TRAFFIC, BUBBLE = "arithmetic", "memory traffic", "the bubble"
COMMUNICATION = "communication"
MUCH = 0.1  # of a step, from which on waits have a sentence


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
    sends: Mapping[str, float] = types.MappingProxyType({})
    first: str = ""
    holder: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in a device's memory; None if its size is not known."""
        return None if self.capacity is None else self.peak <= self.capacity

    @property
    def waits(self) -> float:
        """The seconds in which a rank only waits for collectives, over all axes."""
        return sum(x for name, x in self.parts.items() if name.startswith(COMMUNICATION))

    @property
    def bounds(self) -> dict[str, float]:
        """The seconds of what may bound a step: computation, the bubble, and communication, which
        is as long as its busiest link sends, or as all waits.
        """
        computes = self.parts.get(ARITHMETIC, 0.0) + self.parts.get(TRAFFIC, 0.0)
        communicates = max(self.waits, *self.sends.values(), 0.0)
        return {
            self._computation: computes,
            COMMUNICATION: communicates,
            BUBBLE: self.parts.get(BUBBLE, 0.0),
        }

    @property
    def _computation(self) -> str:
        """What takes most of the computation."""
        return max(ARITHMETIC, TRAFFIC, key=lambda name: self.parts.get(name, 0.0))

    @property
    def bound(self) -> str:
        """What a step takes longest for, whatever runs beside it."""
        bounds = self.bounds
        return max(bounds, key=lambda name: bounds[name]) if any(bounds.values()) else ""

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
        of_step = lambda seconds: f"{seconds / self.total:.0%} of the step"
        waits = f"during {of_step(self.waits)} a rank only waits for collectives"
        if self.bound != COMMUNICATION:
            share = of_step(self.parts[self.bound])
            lines = [f"{capitalised(self.bound)} bounds the step: {share}."]
            return [*lines, f"{capitalised(waits)}."] if self.waits >= MUCH * self.total else lines
        axis, sends = max(self.sends.items(), key=lambda item: item[1], default=("", 0.0))
        busy = f", and collectives over {axis} run during {of_step(sends)}" if axis else ""
        return [f"Communication bounds the step: {waits}{busy}."]

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
