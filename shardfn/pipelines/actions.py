"""The actions of a pipeline's schedule: what each computes, and which results it needs."""

from __future__ import annotations

from typing import NamedTuple

KINDS = {
    "F": "the forward",
    "B": "the gradients of the stage's inputs, which the stage before waits for",
    "W": "the gradients of the stage's weights",
    "BW": "B and W as one",
}


class Action(NamedTuple):
    """What one coordinate computes at a time: F, B, W or BW of one stage and microbatch.

    A result is named as the action that computes it alone, so BW has the results B and W.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def results(self) -> tuple[Action, ...]:
        """The results of the action."""
        if self.kind == "BW":
            return (self._replace(kind="B"), self._replace(kind="W"))
        return (self,)

    def needs(self, stages: int) -> tuple[Action, ...]:
        """Return the results that the action reads, in a pipeline of so many stages.

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
