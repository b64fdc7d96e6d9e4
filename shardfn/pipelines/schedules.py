"""The published schedules of pipelines, each for any number of coordinates and microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from ..accepted import accept
from .actions import Action
from .schedule import Schedule

__all__ = ["gpipe", "interleaved", "one_f_one_b"]


def gpipe(coordinates: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards. Stage s is on coordinate s.

    A coordinate keeps the activations of all microbatches.

    Args:
        coordinates: of the mesh axis, n.
        microbatches: slices of the batch, m.

    Returns:
        The schedule. Its idle share is (n - 1) / (m + n - 1).

    Raises:
        ShardError: a number below 1.

    Source: Huang et al. 2019, GPipe, arXiv 1811.06965.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.gpipe(2, 2)
        >>> " ".join(map(str, schedule.table[0]))
        'F0.0 F0.1 BW0.0 BW0.1'
    """
    accept("gpipe", coordinates=coordinates, microbatches=microbatches)
    rows = []
    for stage in range(coordinates):
        forwards = [Action("F", stage, k) for k in range(microbatches)]
        backwards = [Action("BW", stage, k) for k in range(microbatches)]
        rows.append(forwards + backwards)
    return Schedule("gpipe", rows)


def one_f_one_b(coordinates: int, microbatches: int) -> Schedule:
    """Return 1F1B: one forward after each backward, as soon as the first microbatch comes back.
    Stage s is on coordinate s.

    A coordinate keeps the activations of at most n - s microbatches.

    Args:
        coordinates: of the mesh axis, n.
        microbatches: slices of the batch, m.

    Returns:
        The schedule. Its idle share is that of GPipe.

    Raises:
        ShardError: a number below 1.

    Source: Narayanan et al. 2021, PipeDream-Flush in Megatron-LM, arXiv 2104.04473.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.one_f_one_b(2, 3)
        >>> " ".join(map(str, schedule.table[0]))
        'F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2'
    """
    accept("one_f_one_b", coordinates=coordinates, microbatches=microbatches)
    rows = []
    for stage in range(coordinates):
        forwards = [Action("F", stage, k) for k in range(microbatches)]
        backwards = [Action("BW", stage, k) for k in range(microbatches)]
        rows.append(_one_by_one(forwards, backwards, coordinates - stage))
    return Schedule("one_f_one_b", rows)


def interleaved(coordinates: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return interleaved 1F1B: each coordinate has several stages. Stage s is on coordinate
    s mod n.

    The idle share falls with the number of stages a coordinate has, and messages grow with it.

    Args:
        coordinates: of the mesh axis, n.
        microbatches: slices of the batch, m.
        chunks: stages a coordinate, v.

    Returns:
        The schedule. Its idle share is (n - 1) / (v m + n - 1), where n divides m.

    Raises:
        ShardError: a number below 1.

    Source: Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473, section 2.2.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.interleaved(2, 2)
        >>> " ".join(map(str, schedule.table[1]))
        'F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 BW1.0 BW1.1'
    """
    accept("interleaved", coordinates=coordinates, microbatches=microbatches, chunks=chunks)
    n = coordinates
    whole = -(-microbatches // n) * n  # a full group of n microbatches at a time
    rows = []
    for c in range(n):
        stages = range(c, n * chunks, n)
        forwards = list(_in_groups("F", stages, whole, n))
        backwards = list(_in_groups("BW", stages[::-1], whole, n))
        rows.append(_one_by_one(forwards, backwards, 2 * (n - c - 1) + (chunks - 1) * n + 1))
    return Schedule("interleaved", _first_microbatches(rows, microbatches))


def _one_by_one(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> list[Action]:
    """Order forwards and backwards: so many forwards first, then one backward, one forward."""
    pairs = zip(backwards, forwards[ahead:], strict=False)
    done = len(forwards[ahead:])
    return [*forwards[:ahead], *chain.from_iterable(pairs), *backwards[done:]]


def _in_groups(kind: str, stages: Sequence[int], microbatches: int, size: int) -> Iterator[Action]:
    """Order actions by groups of microbatches, and in each group stage by stage."""
    for first in range(0, microbatches, size):
        for stage in stages:
            for k in range(first, min(first + size, microbatches)):
                yield Action(kind, stage, k)


def _first_microbatches(rows: Sequence[Sequence[Action]], microbatches: int) -> list[list[Action]]:
    """Leave out the microbatches from a number up.

    Microbatches do not depend on each other, so what is left is right if all of it was. Each
    message is still written and read in one order.
    """
    return [[action for action in row if action.microbatch < microbatches] for row in rows]
