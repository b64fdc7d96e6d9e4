"""The proof that a pipeline schedule never deadlocks, however long messages take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

import attrs

from ..errors import ScheduleError
from .actions import KINDS, Action
from .running import Table, spans_of

SHOWN = 8  # problems in an error
UNIT_COSTS = {"F": 1.0, "B": 1.0, "W": 1.0}


@attrs.frozen
class Checked:
    """The cost of a schedule that passed `check`.

    Args:
        alive: for each rank of the pipeline axis, the largest number of activations at one time.
            One activation is everything that the forward of one stage saves for one microbatch.
        time: the time from the start of the first action to the end of the last action, if messages
            take no time.
        busy: for each rank of the pipeline axis, the time in which the rank computes.
    """

    alive: tuple[int, ...]
    time: float
    busy: tuple[float, ...]

    @property
    def idle(self) -> float:
        """The share of the time in which the ranks of the pipeline axis wait (the bubble)."""
        return 1 - sum(self.busy) / (len(self.busy) * self.time) if self.time else 0.0


class Place(NamedTuple):
    """Where an action stands: its coordinate, and its number in that coordinate's row."""

    coordinate: int
    index: int


class Wait(NamedTuple):
    """A coordinate's step after which another one goes on. Its step 2 i is the start of its action
    i, when it has received that action's message. Step 2 i + 1 is the end, when it has sent one.
    """

    coordinate: int
    step: int


Places = Mapping[Action, Place]


def proved(
    where: str,
    table: Table,
    stages: int,
    *,
    on_the_way: int,
    costs: Mapping[str, float],
    alive: int | None,
) -> Checked:
    """Prove that a schedule runs to its end.

    Args:
        where: the function and the schedule, for errors.
        table: the actions of each coordinate, in order.
        stages: of the pipeline.
        on_the_way: the messages from one coordinate to another that may wait to be received.
        costs: the time of each kind of action, as `check_costs` accepts it.
        alive: the most activations that a coordinate may keep; any number if None.

    Returns:
        What it costs.

    Raises:
        ScheduleError: it does not run to its end, or keeps more than allowed.
    """
    places = {
        result: Place(c, i)
        for c, row in reversed([*enumerate(table)])
        for i, action in reversed([*enumerate(row)])
        for result in action.results
    }  # the first of each
    problems = chain(
        _unmatched(table, stages),
        _doubled(table, places),
        _missing(table, places, stages),
        _early(table, places, stages),
    )
    if shown := list(islice(problems, SHOWN + 1)):
        raise _refused(where, shown)
    if circle := _circular_wait(table, places, stages, on_the_way):
        fix = "swap two actions of one of these pipeline ranks, or allow more messages in flight"
        raise ScheduleError.of(where, "circular wait:", *circle, fix=fix)
    kept = [_most_alive(row) for row in table]
    if alive is not None and (wrong := list(_over(table, kept, alive))):
        fix = "run backward actions earlier; if B and W are separate actions, run W earlier"
        needed = f"at most {alive} activations on each pipeline rank at any time"
        raise ScheduleError.of(where, *wrong[:SHOWN], needed=needed, fix=fix)
    return _costs(table, tuple(most for most, _ in kept), costs)


def check_costs(table: Table, costs: Mapping[str, float]) -> None:
    """Check that costs have the kinds of a schedule's actions, and no others.

    Raises:
        ScheduleError: lists those that are missing or unknown.
    """
    kinds = {action.kind for row in table for action in row}
    if "BW" not in costs and "BW" in kinds:
        kinds = (kinds - {"BW"}) | {"B", "W"}
    lines = [
        *(f"costs lack {kind}" for kind in sorted(kinds - costs.keys())),
        *(f"costs have {kind!r}" for kind in sorted(costs.keys() - KINDS.keys())),
    ]
    if lines:
        needed = f"the time of each kind of action: {', '.join(KINDS)}"
        fix = 'costs={"F": 1, "B": 1, "W": 1}'
        raise ScheduleError.of("Schedule.check, costs", *lines, needed=needed, fix=fix)


def _costs(table: Table, alive: tuple[int, ...], costs: Mapping[str, float]) -> Checked:
    """Return what a schedule costs, if it runs to its end."""

    def cost(action: Action) -> float:
        if action.kind in costs:
            return costs[action.kind]
        return sum(costs[result.kind] for result in action.results)

    spans = spans_of(table, cost)
    time = max(span.end for row in spans for span in row)
    busy = tuple(float(sum(map(cost, row))) for row in table)
    return Checked(alive, time, busy)


def _refused(where: str, problems: list[str]) -> ScheduleError:
    lines = problems[:SHOWN] + ["and more"] * (len(problems) > SHOWN)
    needed = (
        "for each stage and microbatch, one pipeline rank runs an action F, and either actions B "
        "and W or an action BW; each action comes after the actions whose results it reads"
    )
    fix = "use a schedule of sf.schedules, which are valid for any number of microbatches"
    return ScheduleError.of(where, *lines, needed=needed, fix=fix)


def _words(action: Action) -> str:
    return f"{action} (stage {action.stage}, microbatch {action.microbatch})"


def _unmatched(table: Table, stages: int) -> Iterator[str]:
    """Describe the actions of stages that do not exist or are on two coordinates."""
    homes: dict[int, tuple[int, Action]] = {}
    for c, row in enumerate(table):
        for action in row:
            home, first = homes.setdefault(action.stage, (c, action))
            if action.stage >= stages:
                yield (
                    f"unknown stage: pipeline rank {c} runs {_words(action)}, but the pipeline has "
                    f"only {stages} stages"
                )
            elif home != c:
                yield (
                    f"stage on two ranks: pipeline rank {c} runs {_words(action)}, but pipeline "
                    f"rank {home} runs {first} of the same stage"
                )


def _doubled(table: Table, places: Places) -> Iterator[str]:
    """Describe the actions that compute a result again."""
    for c, row in enumerate(table):
        for i, action in enumerate(row):
            firsts = [places[x] for x in action.results if places[x] != (c, i)]
            if firsts:
                first = table[firsts[0].coordinate][firsts[0].index]
                yield (
                    f"computed twice: pipeline rank {c} runs {_words(action)} at position {i}, but "
                    f"pipeline rank {firsts[0].coordinate} runs {first} at position "
                    f"{firsts[0].index}"
                )


def _missing(table: Table, places: Places, stages: int) -> Iterator[str]:
    """Describe the results that no action computes."""
    homes = {result.stage: place.coordinate for result, place in places.items()}
    microbatches = 1 + max(action.microbatch for row in table for action in row)
    for stage in range(stages):
        home = f"pipeline rank {homes[stage]} does not run" if stage in homes else None
        for k in range(microbatches):
            for kind in UNIT_COSTS:
                result = Action(kind, stage, k)
                if result not in places:
                    yield f"missing: {home or 'no pipeline rank runs'} {_words(result)}"


def _early(table: Table, places: Places, stages: int) -> Iterator[str]:
    """Describe the actions before what they need on the same coordinate."""
    for c, row in enumerate(table):
        for i, action in enumerate(row):
            for need in action.needs(stages):
                place = places.get(need)
                if place is not None and place.coordinate == c and place.index > i:
                    yield (
                        f"too early: pipeline rank {c} runs {_words(action)} at position {i}, "
                        f"before it runs {row[place.index]} at position {place.index}"
                    )


def _most_alive(row: Iterable[Action]) -> tuple[int, Action | None]:
    """Return the most activations that a coordinate keeps, and the forward that makes them so
    many: F keeps one, and the action that has its W frees it.
    """
    now, most, at = 0, 0, None
    for action in row:
        now += (action.kind == "F") - (action.kind in ("W", "BW"))
        if now > most:
            most, at = now, action
    return most, at


def _over(table: Table, kept: list[tuple[int, Action | None]], alive: int) -> Iterator[str]:
    """Describe the coordinates that keep too many activations."""
    for c, (most, at) in enumerate(kept):
        if at is not None and most > alive:
            i = table[c].index(at)
            yield (
                f"too many activations: pipeline rank {c} keeps {most} activations when it runs "
                f"{_words(at)} at position {i}"
            )


def _circular_wait(table: Table, places: Places, stages: int, on_the_way: int) -> list[str]:
    """Describe a circle of coordinates that wait for each other, if there is one.

    Each step of a coordinate waits for its step before, and for at most one step of another
    coordinate, whatever time messages take. So the order in which steps are tried here decides
    nothing: the coordinates reach the ends of their rows, or stop at the same steps.
    """
    waits = _waits(table, places, stages, on_the_way)
    done = [0] * len(table)  # steps of each coordinate
    stopped: dict[int, Wait] = {}
    waiting: dict[int, list[int]] = {}  # the coordinates that wait for one
    runnable = deque(range(len(table)))
    while runnable:
        c = runnable.popleft()
        stopped.pop(c, None)
        before = done[c]
        while done[c] < 2 * len(table[c]):
            wait = waits.get(Wait(c, done[c]))
            if wait is not None and done[wait.coordinate] <= wait.step:
                stopped[c] = wait
                waiting.setdefault(wait.coordinate, []).append(c)
                break
            done[c] += 1
        if done[c] > before:
            runnable.extend(waiting.pop(c, ()))
    if not stopped:
        return []
    path = [next(iter(stopped))]
    while path[-1] not in path[:-1]:
        path.append(stopped[path[-1]].coordinate)
    circle = path[path.index(path[-1]) : -1]
    return [_described(table, Wait(c, done[c]), stopped[c], on_the_way) for c in circle]


def _waits(table: Table, places: Places, stages: int, on_the_way: int) -> dict[Wait, Wait]:
    """Return the step of another coordinate for which each step waits.

    An action that reads a message starts after the one that sends it has ended. An action that
    sends a message ends when there is room: when all but `on_the_way` of the messages up to it are
    received. A coordinate receives in the order in which its actions read.
    """
    waits: dict[Wait, Wait] = {}
    messages: dict[tuple[int, int], list[tuple[int, int]]] = {}  # the actions that send and read
    for c, row in enumerate(table):
        for i, action in enumerate(row):
            for source in (places[need] for need in action.needs(stages)):
                if source.coordinate != c:
                    waits[Wait(c, 2 * i)] = Wait(source.coordinate, 2 * source.index + 1)
                    messages.setdefault((source.coordinate, c), []).append((source.index, i))
    for (sender, receiver), pairs in messages.items():
        late = sorted(i for i, _ in pairs)[on_the_way:]
        for i, (_, j) in zip(late, pairs, strict=False):
            waits[Wait(sender, 2 * i + 1)] = Wait(receiver, 2 * j)
    return waits


def _described(table: Table, step: Wait, wait: Wait, on_the_way: int) -> str:
    """Describe the wait of one coordinate for another."""
    i, j = step.step // 2, wait.step // 2
    action, awaited = table[step.coordinate][i], table[wait.coordinate][j]
    words = f"pipeline rank {step.coordinate}, at position {i}, {_words(action)}, waits"
    there = f"pipeline rank {wait.coordinate}"
    if step.step % 2 == 0:
        return f"{words} for the message of {awaited}, at position {j} of {there}"
    return (
        f"{words} to send to {there}, which has {on_the_way} unread and reads the next message "
        f"in {awaited}, at position {j}"
    )
