"""Warnings about expensive parts of a lowered program, once for each function."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from ...inspect.expensive import expensive
from ...partition import Plan, propagate
from ...types import Program
from ..arguments import Placed
from ..options import Request


class Staged(Protocol):
    """The part of a traced function that a warning needs."""

    @property
    def request(self) -> Request: ...

    @property
    def placed(self) -> Placed: ...

    @property
    def program(self) -> Program: ...


def warn_of_expensive(traced: Staged, chosen: Plan, wanted: tuple[Any, ...]) -> None:
    """Warn once of what is expensive in a plan, with a placement that mends it.

    Args:
        traced: a function under `shard`; of other transforms nothing is said.
        chosen: its plan.
        wanted: the arguments of the partition.
    """
    request = traced.request
    program = traced.program
    axes, _, outs, unreduced = wanted
    weighed = request.store.weighed
    if not request.needs_mesh or unreduced or chosen in weighed:
        return
    weighed.add(chosen)
    place = lambda ins: propagate(program, axes, ins, outs)
    arguments = len(traced.placed.tensors)
    said = request.store.expensive
    for text in expensive(program, chosen, place, arguments):
        if text not in said:
            said.add(text)
            warnings.warn(text, stacklevel=2)
