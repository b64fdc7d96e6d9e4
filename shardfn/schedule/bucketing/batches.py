"""Batches: transfers that share one collective, and the order of those that a given plan lists."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ...errors import TreeError
from ..data_flow import Transfer

SAME_PROGRAM = "use the plan of the same program: fn.lower(...).plan"


@attrs.define(eq=False)
class Batch:
    """Transfers that share one collective."""

    index: int
    members: list[Transfer] = attrs.field(factory=list)
    depends: int = 0  # bits: the batches that it depends on directly
    cap: int = 0
    nbytes: int = 0  # bytes of its leaves
    riding: int = 0  # bytes of its fused small reductions
    wanted: int | None = None  # its bucket in a given plan

    @property
    def bucketed(self) -> bool:
        """Whether this is a bucket of bucketed_grad."""
        return self.members[0].options is not None and not self.members[0].options.ignored

    @property
    def leaves(self) -> list[Transfer]:
        """The transfers of gradients, without fused small reductions."""
        return [t for t in self.members if t.options is not None]

    @property
    def planned(self) -> int:
        """The number of the user's bucket that this batch follows."""
        assert self.wanted is not None, f"batch {self.index} has no given plan"
        return self.wanted

    @property
    def reduces(self) -> bool:
        """Whether the collective reduces."""
        return self.members[0].reduces


def reaches(batches: Sequence[Batch], chained: int, depends: int, target: Batch) -> bool:
    """Return whether a transfer depends on a batch, directly or through other batches.

    Args:
        batches: all.
        chained: bits: those that depend on others.
        depends: bits: the batches to begin with.
        target: the batch to reach.
    """
    goal = 1 << target.index
    seen = depends
    left = depends & chained
    while left and not seen & goal:
        lowest = left & -left
        more = batches[lowest.bit_length() - 1].depends & ~seen
        seen |= more
        left = (left ^ lowest) | (more & chained)
    return bool(seen & goal)


def follow(
    batches: Sequence[Batch], places: Mapping[Any, int], name: str
) -> tuple[tuple[Batch, ...], dict[int, int]]:
    """Reorder buckets, and the leaves of each, as the user's plan lists them.

    Args:
        batches: all, as the program fills them.
        places: the positions of the plan's transfers in their buckets.
        name: of the program, for errors.

    Returns:
        The batches, numbered again, and for some of them the batch that starts before. The
        plan's order is enforced only where it differs from the program's: among reductions, and
        among the gathers of a phase.

    Raises:
        TreeError: a bucket comes before one on which it depends.
    """
    listed = list(batches)
    for slots in _slots(batches):
        wanted = sorted((batches[i] for i in slots), key=lambda b: b.planned)
        for i, batch in zip(slots, wanted, strict=True):
            listed[i] = batch
            sort_leaves(batch, lambda t: places[t.key])
    chains = [(b, a) for slots in _slots(batches) for b, a in _chains(batches, listed, slots)]
    _renumber(listed)
    after = {b.index: a.index for b, a in chains}
    if after:
        _refuse_circles(listed, after, name)
    return tuple(listed), after


def _slots(batches: Sequence[Batch]) -> list[list[int]]:
    """List the positions of the batches that follow one user's plan."""
    planned = [i for i, b in enumerate(batches) if b.wanted is not None]
    if len({batches[i].wanted for i in planned}) == len(planned):
        return [planned]
    plans: dict[str, list[int]] = collections.defaultdict(
        list
    )  # two bucketed_grads, each with a plan of its own
    for i in planned:
        plans[batches[i].leaves[0].region].append(i)
    return list(plans.values())


def sort_leaves(batch: Batch, place: Callable[[Transfer], Any]) -> None:
    """Sort the gradients of a batch; fused small reductions keep their positions."""
    ordered = iter(sorted(batch.leaves, key=place))
    batch.members = [next(ordered) if t.options is not None else t for t in batch.members]


def _chains(
    batches: Sequence[Batch], listed: Sequence[Batch], slots: Sequence[int]
) -> Iterator[tuple[Batch, Batch]]:
    """Yield pairs (later, earlier) of batches whose order in the plan differs from the
    program's.
    """
    streams: dict[Any, list[Batch]] = collections.defaultdict(list)
    for i in slots:
        streams[_stream(listed[i])].append(listed[i])
    for stream, wanted in streams.items():
        filled = [batches[i] for i in slots if _stream(batches[i]) == stream]
        if wanted != filled:
            yield from ((b, a) for a, b in itertools.pairwise(wanted))


def _stream(batch: Batch) -> str:
    """Name the group of batches within which order matters."""
    return "reductions" if batch.reduces else f"{batch.members[0].kind} {batch.members[0].phase}"


def _renumber(listed: Sequence[Batch]) -> None:
    """Number batches in the order of a list."""
    number = {b.index: i for i, b in enumerate(listed)}
    if all(old == new for old, new in number.items()):
        return
    for batch in listed:
        batch.depends = sum(1 << number[i] for i in _ones(batch.depends))
    for i, batch in enumerate(listed):
        batch.index = i


def _ones(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits of a number."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _refuse_circles(listed: Sequence[Batch], after: Mapping[int, int], name: str) -> None:
    """Raise an error for a planned order that makes a batch wait for itself."""
    edges = {
        b.index: [*_ones(b.depends), *([after[b.index]] if b.index in after else [])]
        for b in listed
    }
    for later, earlier in after.items():
        if later in _reached(edges, edges[earlier]):
            first = listed[earlier].leaves[0].options
            second = listed[later].leaves[0].options
            assert first is not None and second is not None
            got = (
                f"the bucket of {first.leaf} comes before the bucket of {second.leaf}, but "
                "depends on it"
            )
            fix = "put each bucket after the buckets that it depends on, as in fn.lower(...).plan"
            raise TreeError.of(f"{name}, plan", got, fix=fix, arg_path=first.leaf)


def _reached(edges: Mapping[int, Sequence[int]], start: Sequence[int]) -> set[int]:
    """Collect some batches and all batches before them."""
    seen = set[int]()
    queue = [*start]
    while queue:
        i = queue.pop()
        if i not in seen:
            seen.add(i)
            queue += edges[i]
    return seen
