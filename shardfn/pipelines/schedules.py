"""The published pipeline schedules, for any number of ranks and microbatches.

Example:
    >>> for schedule in (gpipe(4, 8), one_f_one_b(4, 8), zero_bubble(4, 8)):
    ...     print(f"{schedule.name}: idle {schedule.check(schedule.stages).idle:.1%}")
    gpipe: idle 27.3%
    one_f_one_b: idle 27.3%
    zero_bubble: idle 11.1%
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, cycle

from ..accepted import accept
from .actions import Action
from .merging import merged
from .schedule import Schedule

__all__ = ["dualpipev", "gpipe", "interleaved", "one_f_one_b", "zbv", "zero_bubble"]

# Two stages a coordinate, two coordinates, and thus both kinds of messages on both ways: an order
# of F and B in which each is read as it was written. For each coordinate, its start and its round.
TWO_BY_TWO = (("FFFF", "BFBBFFBF"), ("FFFBFB", "BFBFFBFB"))


def gpipe(coordinates: int, microbatches: int) -> Schedule:
    """Return the GPipe schedule, which runs all forwards, and then all backwards. Stage s is on
    rank s of the pipeline axis.

    With GPipe, a rank keeps the activations of all microbatches.

    Args:
        coordinates: the number n of ranks along the pipeline axis.
        microbatches: the number m of microbatches.

    Returns:
        The schedule. The idle share of GPipe with n ranks and m microbatches is (n - 1) / (m + n -
        1).

    Raises:
        ShardError: the number of pipeline ranks or of microbatches is below 1.

    Source: Huang et al. 2019, GPipe, arXiv 1811.06965.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.gpipe(2, 2)
        >>> " ".join(map(str, schedule.table[0]))
        'F0.0 F0.1 BW0.0 BW0.1'
    """
    accept("schedules.gpipe", coordinates=coordinates, microbatches=microbatches)
    rows = []
    for stage in range(coordinates):
        forwards = [Action("F", stage, k) for k in range(microbatches)]
        backwards = [Action("BW", stage, k) for k in range(microbatches)]
        rows.append(forwards + backwards)
    return Schedule("gpipe", rows)


def one_f_one_b(coordinates: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule, in which forwards and backwards alternate after the first forwards.
    Stage s is on rank s of the pipeline axis.

    With n ranks, rank s keeps the activations of at most n - s microbatches.

    Args:
        coordinates: the number n of ranks along the pipeline axis.
        microbatches: the number m of microbatches.

    Returns:
        The schedule. The idle share of 1F1B equals that of GPipe.

    Raises:
        ShardError: the number of pipeline ranks or of microbatches is below 1.

    Source: Narayanan et al. 2021, PipeDream-Flush in Megatron-LM, arXiv 2104.04473.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.one_f_one_b(2, 3)
        >>> " ".join(map(str, schedule.table[0]))
        'F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2'
    """
    accept("schedules.one_f_one_b", coordinates=coordinates, microbatches=microbatches)
    rows = []
    for stage in range(coordinates):
        forwards = [Action("F", stage, k) for k in range(microbatches)]
        backwards = [Action("BW", stage, k) for k in range(microbatches)]
        rows.append(_one_by_one(forwards, backwards, coordinates - stage))
    return Schedule("one_f_one_b", rows)


def interleaved(coordinates: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule, in which each rank has several stages. Stage s is on
    rank s mod n of the pipeline axis.

    More stages on each rank reduce the idle share, and increase the number of messages.

    Args:
        coordinates: the number n of ranks along the pipeline axis.
        microbatches: the number m of microbatches.
        chunks: the number v of stages on each rank.

    Returns:
        The schedule. For n ranks with v stages each, and m microbatches, the idle share is (n - 1)
        / (v m + n - 1) if n divides m.

    Raises:
        ShardError: coordinates, microbatches or chunks is below 1.

    Source: Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473, section 2.2.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.interleaved(2, 2)
        >>> " ".join(map(str, schedule.table[1]))
        'F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 BW1.0 BW1.1'
    """
    accept(
        "schedules.interleaved", coordinates=coordinates, microbatches=microbatches, chunks=chunks
    )
    n = coordinates
    whole = -(-microbatches // n) * n  # a full group of n microbatches at a time
    rows = []
    for c in range(n):
        stages = range(c, n * chunks, n)
        forwards = list(_in_groups("F", stages, whole, n))
        backwards = list(_in_groups("BW", stages[::-1], whole, n))
        ahead = 2 * (n - c - 1) + (chunks - 1) * n + 1
        if n == 2 and chunks == 2:
            rows.append(_by_letters(TWO_BY_TWO[c], forwards, backwards))
        elif n == 2 and chunks > 2:
            rows.append(forwards + backwards)
        else:
            rows.append(_one_by_one(forwards, backwards, ahead))
    return Schedule("interleaved", _first_microbatches(rows, microbatches))


def zero_bubble(coordinates: int, microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B in which the gradients of weights (W) fill the idle time at
    the end. Stage s is on rank s of the pipeline axis.

    With n ranks, no rank keeps more than n activations, as many as the first rank in 1F1B.

    Args:
        coordinates: the number n of ranks along the pipeline axis.
        microbatches: the number m of microbatches.

    Returns:
        The schedule. With n ranks, each rank is idle for the time (n - 1) (F + B - W), where F, B
        and W are the times of one action each.

    Raises:
        ShardError: the number of pipeline ranks or of microbatches is below 1.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.zero_bubble(2, 3)
        >>> " ".join(map(str, schedule.table[1]))
        'F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2'
    """
    accept("schedules.zero_bubble", coordinates=coordinates, microbatches=microbatches)
    rows = []
    for stage in range(coordinates):
        ahead = min(microbatches, coordinates - stage)
        row = [Action("F", stage, k) for k in range(ahead)]
        for k in range(microbatches):
            row.append(Action("B", stage, k))
            if k >= stage:
                row.append(Action("W", stage, k - stage))
            if k + ahead < microbatches:
                row.append(Action("F", stage, k + ahead))
        late = range(max(0, microbatches - stage), microbatches)
        rows.append(row + [Action("W", stage, k) for k in late])
    return Schedule("zero_bubble", rows)


def zbv(coordinates: int, microbatches: int) -> Schedule:
    """Return the ZBV schedule, which computes the gradients of weights separately. Each rank has
    two stages, and the stages lie on the ranks in ascending and then in descending order, like a V.
    Stages s and 2n - 1 - s are on rank s of the pipeline axis.

    With n ranks, a rank keeps at most 2n activations, each half as large as with one stage per
    rank.

    Args:
        coordinates: the number n of ranks along the pipeline axis.
        microbatches: the number m of microbatches.

    Returns:
        The schedule. With n ranks, if F, B and W each take the time t, each rank is idle for (n -
        1) t, before its first and after its last action.

    Raises:
        ShardError: the number of pipeline ranks or of microbatches is below 1.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6. Unlike in
    the paper, a rank receives the messages of another rank in the order in which they are sent.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.zbv(2, 2)
        >>> " ".join(map(str, schedule.table[1]))
        'F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 W2.0 W1.0 W2.1 W1.1'
    """
    accept("schedules.zbv", coordinates=coordinates, microbatches=microbatches)
    n = coordinates
    return Schedule("zbv", _v(n, microbatches, ahead=(n, n), keep=2 * n))


def dualpipev(coordinates: int, microbatches: int) -> Schedule:
    """Return the DualPipeV schedule, in which each rank has two stages, and the stages lie on the
    ranks in ascending and then in descending order, like a V. Most F actions run together with the
    B action of another microbatch, so that one action computes while the other communicates. Stages
    s and 2n - 1 - s are on rank s of the pipeline axis.

    With n ranks, a rank keeps at most 2n + 1 activations, each half as large as with one stage per
    rank.

    Args:
        coordinates: the number n of ranks along the pipeline axis.
        microbatches: the number m of microbatches.

    Returns:
        The schedule. With n ranks, if F, B and W each take the time t, each rank is idle for at
        most 2 (n - 1) t. The DeepSeek-V3 paper states the idle time (n - 1) (F&B + B - 2 W), where
        F&B is the time of F, B and W together.

    Raises:
        ShardError: the number of pipeline ranks or of microbatches is below 1.

    Source: DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1 (DualPipe); DualPipeV by
    Qi et al. 2025, which cuts DualPipe in half. Unlike in the paper, a rank receives the messages
    of another rank in the order in which they are sent.

    Example:
        >>> import shardfn as sf
        >>> schedule = sf.schedules.dualpipev(2, 2)
        >>> " ".join(map(str, schedule.table[1]))
        'F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 W2.0 W1.0 W2.1 W1.1'
    """
    accept("schedules.dualpipev", coordinates=coordinates, microbatches=microbatches)
    n = coordinates
    return Schedule("dualpipev", _v(n, microbatches, ahead=(n, n + 1), keep=2 * n + 1))


def _v(n: int, microbatches: int, ahead: tuple[int, int], keep: int) -> list[list[Action]]:
    """Return rows of two stages a coordinate, in the form of a V.

    Messages up the coordinates are F of the first stages and B of the second ones; messages down
    are F of the second and B of the first. Each coordinate has the same order of either, 1F1B with
    so many forwards ahead, so it reads messages as they were written.
    """
    orders = []
    for c in range(n):
        first, second = c, 2 * n - 1 - c
        forwards = [[Action("F", s, k) for k in range(microbatches)] for s in (first, second)]
        backwards = [[Action("B", s, k) for k in range(microbatches)] for s in (second, first)]
        own = zip(forwards, backwards, ahead, strict=True)
        orders.append([_one_by_one(*each) for each in own])

    def rank(action: Action) -> int:
        if action.kind == "F":
            return 0 if action.stage >= n else 2
        return 1 if action.kind == "B" else 3

    return merged(orders, keep, rank)


def _by_letters(
    letters: tuple[str, str], forwards: Sequence[Action], backwards: Sequence[Action]
) -> list[Action]:
    """Order forwards and backwards by the letters F and B of a start and of each round."""
    start, round_ = letters
    queues = {"F": deque(forwards), "B": deque(backwards)}
    row = []
    for letter in chain(start, cycle(round_)):
        if queues[letter]:
            row.append(queues[letter].popleft())
        if not any(queues.values()):
            break
    return row


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
