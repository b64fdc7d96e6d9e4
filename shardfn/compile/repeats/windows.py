"""Windows of a sequence that occur more than once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Span = tuple[int, int]  # the first position, and the one after the last
SEED = 4  # elements by which places that may begin a window are found
TRIES = 100_000  # windows looked at, of a sequence without any that pay


@attrs.frozen
class Windows:
    """Windows with the same elements, that do not overlap.

    Args:
        starts: the position of each one's first element, ascending.
        length: elements of each.
    """

    starts: tuple[int, ...]
    length: int

    @property
    def saving(self) -> int:
        """Return the elements that are not needed if the window stands once."""
        return (len(self.starts) - 1) * self.length

    @property
    def order(self) -> tuple[int, int]:
        """Return what sorts windows: those that save most first, then those that begin first."""
        return -self.saving, self.starts[0]


def repeated(
    sequence: Sequence[int], least: int, take: Callable[[Windows], Sequence[Span]]
) -> None:
    """Offer repeated windows of a sequence, those that save most first.

    Args:
        sequence: its elements; no window holds a negative one.
        least: elements that a window must save.
        take: is given windows, and returns the spans of them that it uses up, if any. What is
            used up is in no window that is offered later.
    """
    search = _Search(np.array(sequence, dtype=np.int64), least)
    queue = _queue(search)
    for _ in range(TRIES):
        if not queue:
            return
        *promised, seed = heapq.heappop(queue)
        windows = search.best(seed)
        if windows is None:
            continue
        if windows.order > tuple(promised):  # it saves less than when it was put there
            heapq.heappush(queue, (*windows.order, seed))
            continue
        spans = take(windows)
        search.use_up(spans)
        if spans:
            heapq.heappush(queue, (*windows.order, seed))


def _queue(search: _Search) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return a heap of the groups of places at which windows may begin, by what they save."""
    found = ((search.best(seed), seed) for seed in search.seeds())
    queue = [(*windows.order, seed) for windows, seed in found if windows]
    heapq.heapify(queue)
    return queue


@attrs.define(eq=False)
class _Search:
    """The elements that are left, and the windows found among them."""

    left: Ints  # negative where used up
    least: int

    def use_up(self, spans: Sequence[Span]) -> None:
        """Take elements out of all later windows."""
        for start, end in spans:
            self.left[start:end] = -1

    def seeds(self) -> list[tuple[int, ...]]:
        """Return the groups of places that have the same first elements, and not all the same
        element before them.
        """
        places: dict[bytes, list[int]] = {}
        for start in range(len(self.left) - SEED + 1):
            places.setdefault(self.left[start : start + SEED].tobytes(), []).append(start)
        return [
            tuple(group)
            for group in places.values()
            if len(group) > 1
            and min(self.left[group[0] : group[0] + SEED]) >= 0
            and not self._continues_to_the_left(group)
        ]

    def _continues_to_the_left(self, group: Sequence[int]) -> bool:
        """Return whether all places of a group have the same element before them."""
        before = {int(self.left[start - 1]) if start else -1 for start in group}
        return len(before) == 1 and -1 not in before

    def best(self, seed: Sequence[int]) -> Windows | None:
        """Return the windows that begin at some of these places and save most; None if they do
        not save enough.
        """
        starts = np.array(seed, dtype=np.int64)
        found: Windows | None = None
        length = 0
        while len(starts) > 1:
            agreed = self._agreed(starts, length)
            length += agreed
            if agreed and (len(starts) - 1) * length > (found.saving if found else self.least - 1):
                found = Windows(tuple(starts.tolist()), length)
            starts = self._continuing(starts, length)
        return found

    def _agreed(self, starts: Ints, length: int) -> int:
        """Return how many more elements all windows have in common, without overlapping."""
        room = int(min(np.diff(starts).min(), len(self.left) - starts[-1])) - length
        if room <= 0:
            return 0
        taken, step = 0, 16
        while taken < room:
            step = min(2 * step, room - taken)
            columns = length + taken + np.arange(step)
            elements = self.left[starts[:, None] + columns]
            equal = (elements == elements[0]).all(axis=0) & (elements[0] >= 0)
            if not equal.all():
                return taken + int(equal.argmin())
            taken += step
        return taken

    def _continuing(self, starts: Ints, length: int) -> Ints:
        """Return those of the windows that can be one element longer, together with the most
        others.
        """
        inside = starts[starts + length < len(self.left)]
        elements = self.left[inside + length]
        kinds, counts = np.unique(elements[elements >= 0], return_counts=True)
        if not len(kinds):
            return inside[:0]
        chosen = inside[elements == kinds[counts.argmax()]]
        kept, end = [], -1
        for start in chosen.tolist():
            if start >= end:
                kept.append(start)
                end = start + length + 1
        return np.array(kept, dtype=np.int64)
