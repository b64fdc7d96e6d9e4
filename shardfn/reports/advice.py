"""Advice on what to change first in a step."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from ..byte_sizes import human_bytes
from ..durations import human_seconds
from ..inspect.memory import ACTIVATION, ARGUMENT, Allocation, Memory
from ..patterns import general
from ..placement import names_of
from ..placement_table import Placements
from ..source_text import located_in_program
from .collectives import Reason, SentByLine
from .summary import BUBBLE, Summary, communication_over

WORTH = 0.01  # of the step: a smaller change is not named
MUCH = 0.05  # of the step: a shorter wait is not named


def first_change(
    summary: Summary,
    reasons: Mapping[SentByLine, Reason],
    memory: Memory,
    placements: Placements,
    slowest: str,
) -> str:
    """Return what to change first, as a sentence.

    Args:
        summary: the figures of the step.
        reasons: why its collectives are sent, and what spares them.
        memory: of a rank.
        placements: of the arguments.
        slowest: the op that takes longest, with its line.
    """
    if idle := _idle_axes(summary, placements):
        return idle
    if summary.fits is False:
        return f"Change first: {_smaller(summary, reasons, memory, placements)}."
    spared = [x for x, reason in reasons.items() if reason.saves]
    if spared:
        best = max(spared, key=lambda x: reasons[x].seconds)
        if reasons[best].seconds >= WORTH * summary.total:
            return f"Change first: {_sparing(best, reasons[best])}."
    return _by_bound(summary, reasons, slowest)


def _idle_axes(summary: Summary, placements: Placements) -> str:
    """Return a sentence on axes over which nothing is placed and nothing is sent: their ranks
    compute the same.
    """
    axes = placements.axes
    if axes is None or not any(row.spec is not None for row in placements.rows):
        return ""
    used = {x.removeprefix(communication_over("")) for x, took in summary.parts.items() if took}
    for row in placements.rows:
        used |= {name for names in names_of(row.spec) for name in names} if row.spec else set()
        used |= {*row.stages}
    idle = [
        (name, n)
        for name, n in zip(axes.names, axes.sizes, strict=True)
        if n > 1 and name not in used
    ]
    if not idle:
        return ""
    name, n = idle[0]
    return (
        f"Change first: shard the batch or parameters over {name}. No argument is sharded over "
        f"{name}, so its {n} ranks compute the same."
    )


def _sparing(x: SentByLine, reason: Reason) -> str:
    """Return a change that spares collectives, with what they are."""
    waits = f", for which a rank waits {human_seconds(x.exposed)}" if x.exposed else ""
    spared = f"{x}{x.place}, {human_seconds(x.seconds)}{waits}"
    return f"{reason.instead}. With it, {reason.saves}. Among what it spares: {spared}"


def _by_bound(summary: Summary, reasons: Mapping[SentByLine, Reason], slowest: str) -> str:
    """Return a change for what a rank waits for longest."""
    bubble = summary.parts.get(BUBBLE, 0.0)
    longest = max(reasons, key=lambda x: x.exposed, default=None)
    if bubble >= max(MUCH * summary.total, longest.exposed if longest else 0.0):
        return (
            "Change first: the bubble, in which a rank waits for other stages, is "
            f"{bubble / summary.total:.0%} of the step. More microbatches, or several stages "
            "per pipeline rank, shorten the bubble."
        )
    if longest is None or longest.exposed < MUCH * summary.total:
        return f"No other placement of an argument saves much time. The longest op is {slowest}."
    reason = reasons[longest]
    why = f" ({reason.why})" if reason.why else ""
    fewer = f"fewer ranks on {longest.axis}, or a larger batch, hide more of this communication"
    constraint = f"try {reason.instead}, whose gain is not estimated" if reason.instead else ""
    return (
        f"Look first at {longest}{longest.place}, for which a rank waits "
        f"{human_seconds(longest.exposed)}{why}: {constraint or fewer}."
    )


def _smaller(
    summary: Summary, reasons: Mapping[SentByLine, Reason], memory: Memory, placements: Placements
) -> str:
    """Return a change for a step that does not fit."""
    by_kind = collections.Counter[str]()
    for x in memory.alive:
        by_kind[x.kind] += x.nbytes
    kind, nbytes = by_kind.most_common(1)[0]
    if kind == ARGUMENT:
        return (
            _fewer_arguments(placements)
            or "use more ranks: even the arguments do not fit in memory"
        )
    if kind == ACTIVATION:
        largest = _largest_module(memory)
        return (
            f"use sf.checkpoint around {largest}, or sf.accumulate over smaller batches: "
            f"activations take {human_bytes(nbytes)} at the memory peak"
        )
    x = memory.alive[0]
    place = located_in_program(x.source, x.module)
    size = human_bytes(x.nbytes)
    return f"make the value {x.name} at {place} smaller: it takes {size} at the memory peak"


def _fewer_arguments(placements: Placements) -> str:
    """Return an argument to shard over an axis of which each rank holds all of it; the one that
    spares most.
    """
    axes = placements.axes
    if axes is None:
        return ""
    options = []
    for row in placements.rows:
        used = {name for names in names_of(row.spec) for name in names} if row.spec else set()
        for axis, n in zip(axes.names, axes.sizes, strict=True):
            if axis not in used and axis not in row.stages and n > 1 and row.sizes:
                options.append((row.nbytes * (n - 1) // n, row, axis))
    if not options:
        return ""
    saved, row, axis = max(options, key=lambda option: option[0])
    return (
        f"shard {row.path} over {axis} too: its placement is {row.placement}, and sharding "
        f"saves {human_bytes(saved)} per rank"
    )


def _largest_module(memory: Memory) -> str:
    """Return the module or line whose activations take most at the peak."""
    sizes = collections.Counter[str]()
    for x in memory.alive:
        if x.kind == ACTIVATION:
            sizes[_place(x)] += x.nbytes
    return sizes.most_common(1)[0][0] or "a layer"


def _place(x: Allocation) -> str:
    return general(x.module) if x.module else located_in_program(x.source, None)
