"""The actions of a pipeline schedule: what an action computes, and which results it needs."""

from __future__ import annotations

from typing import NamedTuple

KINDS = {
    "F": "the forward",
    "B": "gradients of the stage's inputs, for which the previous stage waits",
    "W": "gradients of the stage's weights",
    "BW": "B and W in one action",
}


class Action(NamedTuple):
    """One action of a pipeline rank: the F, B, W or BW of one stage and one microbatch.

    An F action computes the forward of the stage, a B action the gradients of the stage's inputs,
    and a W action the gradients of the stage's weights. A BW action computes what the B and the W
    action compute.

    The property `results` lists what the action computes, and `needs` what it reads. Both name the
    result of an F, B or W action by the action itself, and the two results of a BW action by the B
    and the W action.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def results(self) -> tuple[Action, ...]:
        """The results that the action computes."""
        if self.kind == "BW":
            return (self._replace(kind="B"), self._replace(kind="W"))
        return (self,)

    def needs(self, stages: int) -> tuple[Action, ...]:
        """Return the results that the action reads, in a pipeline with the given number of stages.

        Example:
            >>> [str(x) for x in Action("B", 1, 0).needs(stages=3)]
            ['F1.0', 'B2.0']
        """
        kind, s, k = self
        if kind == "F":
            return (Action("F", s - 1, k),) if s > 0 else ()
        if kind == "W":
            return (Action("B", s, k),)
        after = (Action("B", s + 1, k),) if s + 1 < stages else ()
        return (Action("F", s, k), *after)
