"""The parts of a step: the forward, the backward, and the ops that reduce or read gradients."""

from __future__ import annotations

from collections.abc import Sequence

FORWARD, BACKWARD, AFTER = "forward", "backward", "reductions and updates"


def parts_of(phases: Sequence[str]) -> list[str]:
    """Return the part of each op. What is no part of the backward, and runs once it has begun,
    reduces gradients or reads them.

    Args:
        phases: of the ops in their order, as the program notes them.
    """
    begin = phases.index(BACKWARD) if BACKWARD in phases else len(phases)
    late = [x if x == BACKWARD else AFTER for x in phases[begin:]]
    return [x or FORWARD for x in phases[:begin]] + late
