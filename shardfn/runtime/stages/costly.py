"""Warnings about a lowered program, once for each function: its expensive parts, and options that
nothing uses.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...errors import warn
from ...inspect.expensive import expensive
from ...inspect.unused_options import unused_options
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
    """Warn once of what is expensive in a plan, with a placement that mends it, and of options that
    nothing uses.

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
    for text in (*unused_options(program, chosen), *expensive(program, chosen, place, arguments)):
        if text not in said:
            said.add(text)
            warn(text)
