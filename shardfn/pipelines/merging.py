"""Construction of pipeline schedules from orders of F and B actions, with W actions in the gaps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .actions import Action

Order = Sequence[Action]
Channel = tuple[int, int]  # from one coordinate to another


class Step(NamedTuple):
    """An action that a coordinate can run now."""

    action: Action
    queue: deque[Action]  # which has it first
    receives: Channel | None
    sends: Channel | None


def merged(
    orders: Sequence[Sequence[Order]], keep: int, rank: Callable[[Action], int]
) -> list[list[Action]]:
    """For each pipeline rank, merge several sequences of F and B actions into one sequence, and
    fill the idle time with W actions.

    `merged` simulates all ranks together, one action of each rank per step. An action can run when
    its inputs are available, and when its rank has no message in flight to the receiving rank.

    Args:
        orders: for each rank along the pipeline axis, a list of sequences of its F and B actions.
            `merged` keeps the order inside each sequence, and may run actions of different
            sequences in any order. All actions can run if, for any ranks s and r, one sequence of
            rank s sends all messages from s to r, and one sequence of rank r receives the messages
            in the order of sending.
        keep: the largest number of activations that a rank may keep.
        rank: a function that returns the priority of an action; the lowest number runs first. If
            two actions have the same priority, the earlier microbatch runs first.

    Returns:
        For each rank along the pipeline axis, the sequence of its actions.

    Example:
        >>> orders = [
        ...     [[Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)]]
        ... ]
        >>> (row,) = merged(orders, keep=2, rank=lambda action: "BFW".index(action.kind))
        >>> " ".join(map(str, row))
        'F0.0 F0.1 B0.0 B0.1 W0.0 W0.1'
    """
    homes = {x.stage: c for c, own in enumerate(orders) for order in own for x in order}
    queues = [[*map(deque, own), deque[Action]()] for own in orders]  # the last one is that of W
    rows: list[list[Action]] = [[] for _ in orders]
    alive = [0] * len(orders)
    results: set[Action] = set()
    on_the_way: dict[Channel, Action] = {}
    while any(map(any, queues)):
        runnable = [
            [
                step
                for queue in own
                if queue and (step := _step(queue, homes, results, on_the_way))
                if step.action.kind != "F" or alive[c] < keep
            ]
            for c, own in enumerate(queues)
        ]
        for steps in runnable:
            steps.sort(key=lambda step: (rank(step.action), step.action.microbatch))
        chosen = _with_room(runnable, on_the_way)
        assert any(chosen), "orders that wait in a circle"
        for step in chosen:
            if step is not None and step.receives is not None:
                del on_the_way[step.receives]
        for c, step in enumerate(chosen):
            if step is None:
                continue
            action = step.queue.popleft()
            rows[c].append(action)
            results.add(action)
            alive[c] += (action.kind == "F") - (action.kind == "W")
            if step.sends is not None:
                on_the_way[step.sends] = action
            if action.kind == "B":
                queues[c][-1].append(action._replace(kind="W"))
    return rows


def _step(
    queue: deque[Action],
    homes: Mapping[int, int],
    results: set[Action],
    on_the_way: Mapping[Channel, Action],
) -> Step | None:
    """Return the first action of a queue, if what it needs is there."""
    action = queue[0]
    home = homes[action.stage]
    receives = None
    for need in action.needs(len(homes)):
        source = homes[need.stage]
        if source != home:
            receives = (source, home)
            if on_the_way.get(receives) != need:
                return None
        elif need not in results:
            return None
    neighbour = {"F": action.stage + 1, "B": action.stage - 1}.get(action.kind, action.stage)
    target = homes.get(neighbour, home)
    return Step(action, queue, receives, (home, target) if target != home else None)


def _with_room(
    runnable: Sequence[Sequence[Step]], on_the_way: Mapping[Channel, Action]
) -> list[Step | None]:
    """Choose the first action of each coordinate whose message has room, or gets it now because
    another chosen action receives the one before.
    """
    left = [deque(steps) for steps in runnable]
    while True:
        received = {steps[0].receives for steps in left if steps}
        full = [
            steps
            for steps in left
            if steps and steps[0].sends in on_the_way and steps[0].sends not in received
        ]
        if not full:
            return [steps[0] if steps else None for steps in left]
        for steps in full:
            steps.popleft()
