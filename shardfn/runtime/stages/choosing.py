"""The choice of the placements for `sf.auto`, from the program of a call."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs

from ... import schedule as passes
from ...byte_sizes import human_bytes
from ...compile.memory import memory_as_run
from ...errors import PlacementError
from ...hardware import H100, Hardware
from ...inspect.memory import KINDS, Memory
from ...mesh import group_names
from ...partition import Plan
from ...partition.auto.free_arguments import Contradiction, free_arguments_of
from ...partition.auto.search import Candidate, Search, with_hardware_links
from ...partition.planner.inline_loops import inlined
from ...placement import describe
from ...types import MeshPlacements, Program
from ..arguments import donated_places
from .lowering import backward_of, forward_of, local_program
from .traced import Traced

log = logging.getLogger("shardfn")
TRIES = 3  # of an integer program whose program needs more than it counted


@attrs.frozen(eq=False)
class Choice:
    """Placements of a call's tensor arguments that `sf.auto` may take, with their price.

    Args:
        marks: of each tensor.
        peak: bytes of the rank that holds most; None where memory is not limited.
    """

    marks: tuple[MeshPlacements, ...]
    peak: int | None


def chosen(
    traced: Traced, is_free: Sequence[bool], limit: int | None = None, hardware: Hardware = H100
) -> Choice:
    """Choose the argument placements with the least step time.

    Args:
        traced: the function, traced with free arguments replicated.
        is_free: which tensor arguments are free.
        limit: bytes of a rank's memory.
        hardware: that computes, and whose links a mesh without links has.

    Raises:
        PlacementError: nothing fits in the limit, or given placements contradict.
    """
    search = _search(traced, is_free, hardware)
    first = search.candidates(limit)
    if search.is_late:
        log.warning(
            "%s: sf.auto: the integer program is too large, or had no solution within the "
            "search limits; shardfn takes the cheapest of data parallel and fully sharded "
            "placements",
            traced.request.name,
        )
    count = len(traced.placed.tensors)
    if limit is None:
        return Choice(first[0].placements[:count], None)
    found, peak = _fitting(traced, search, first, limit)
    return Choice(found.placements[:count], peak)


def _fitting(
    traced: Traced, search: Search, first: list[Candidate], limit: int
) -> tuple[Candidate, int]:
    """Find the first candidate whose peak fits in a rank's memory, and that peak."""
    peaks: dict[tuple[MeshPlacements, ...], int] = {}
    candidates = first
    allowed = float(limit)
    for _ in range(TRIES):
        for candidate in candidates:
            if candidate.placements not in peaks:
                peaks[candidate.placements] = peak_of(traced, candidate.plan).peak
            if peaks[candidate.placements] <= limit:
                return candidate, peaks[candidate.placements]
        if not peaks:  # the arguments alone are more than that
            break
        # the integer program counts less than the schedule holds
        allowed *= limit / min(peaks.values())
        candidates = search.candidates(allowed)
    least = search.least()
    rest = [*candidates, *([least] if least is not None else [])] or search.candidates(None)
    best = min(rest, key=lambda x: peak_of(traced, x.plan).peak)
    found = peak_of(traced, best.plan)
    if found.peak <= limit:
        return best, found.peak
    raise _nothing_fits(traced, found, limit)


def _nothing_fits(traced: Traced, least: Memory, limit: int) -> PlacementError:
    """Build the error for a memory limit below the least peak of all candidates."""
    parts = [f"{human_bytes(least.of(kind))} of {kind}" for kind in KINDS]
    shown = [x for x, kind in zip(parts, KINDS, strict=True) if least.of(kind)]
    at = f", at {least.at}" if least.at else ""
    return PlacementError.of(
        f"{traced.request.name}, memory",
        f"no placements found on {traced.placed.axes} fit in {human_bytes(limit)} a rank",
        f"the smallest peak is {human_bytes(least.peak)}{at}: {', '.join(shown)}",
        fix=f"more ranks, a smaller batch, sf.checkpoint, sf.accumulate, or memory={least.peak}",
        mesh=traced.placed.mesh,
        arg_path="memory",
    )


def _search(traced: Traced, is_free: Sequence[bool], hardware: Hardware) -> Search:
    """Set up the search over argument placements for the program of a call.

    Raises:
        PlacementError: tensors that follow one parameter are placed otherwise.
    """
    axes, ins, outs, unreduced = traced.placements()
    free = [*is_free, *(False for _ in ins[len(is_free) :])]
    given = [None if x else marks for marks, x in zip(ins, free, strict=True)]
    flat = inlined(traced.program)
    try:
        unknowns = free_arguments_of(flat.program, axes, given, outs, flat.rows)
    except Contradiction as error:
        parameter, by_marks = error.args
        rows = [f"{path} is {describe(m, axes)}" for m, path in by_marks.items()]
        raise PlacementError.of(
            f"{traced.request.name}, argument {parameter}",
            "sf.auto cannot place the parameter together with its state, because their given "
            "placements differ",
            *rows,
            fix="give the same placement to all these tensors, or sf.auto to all of them",
            arg_path=parameter,
        ) from None
    timed = with_hardware_links(axes, hardware)
    planner = traced.request.planner
    return Search(traced.program, flat, unknowns, axes, timed, unreduced, planner, hardware)


def peak_of(traced: Traced, plan: Plan) -> Memory:
    """Compute the memory peak of the rank with the largest shards, over the forward or the
    backward.
    """
    program = traced.program
    if traced.request.followed is None:
        return _peak(traced, plan, program)
    both = traced.halves(plan)
    forward = _peak(traced, both.forward, forward_of(program, both))
    backward = _peak(traced, both.backward, backward_of(program, both))
    return max(forward, backward, key=lambda found: found.peak)


def _peak(traced: Traced, plan: Plan, program: Program) -> Memory:
    """Compute the memory peak of one local program."""
    first = tuple(0 for _ in traced.placed.axes.sizes)
    name = traced.request.name
    agreed = passes.plan_schedule(plan, name)
    names = group_names(traced.placed.mesh)
    placed = traced.placed
    own = local_program(name, program, placed, plan, agreed, first, names)
    backend = traced.request.backend
    return memory_as_run(own, backend, donated_places(placed))
