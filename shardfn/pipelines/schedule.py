"""`Schedule`: for each rank of the pipeline axis, its actions in order."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..accepted import accept, described
from ..errors import ScheduleError
from ..extensions import page_of
from .actions import KINDS, Action
from .drawing import grid
from .proof import UNIT_COSTS, Checked, check_costs, proved

SHOWN = 8  # problems in an error
EXAMPLE = 'sf.Schedule("mine", [[("F", 0, 0), ("BW", 0, 0)]])'


def _rows_of(table: Any) -> tuple[tuple[Action, ...], ...]:
    """Convert the rows of a table to actions.

    Raises:
        ScheduleError: lists the values that are not actions.
    """
    if not _is_sequence(table) or not all(map(_is_sequence, table)):
        raise _not_a_table(f"table is {described(table)}")
    wrong = [
        f"table[{row}][{i}] is {described(x)}"
        for row, actions in enumerate(table)
        for i, x in enumerate(actions)
        if not _is_action(x)
    ]
    if wrong:
        raise _not_a_table(*wrong[:SHOWN])
    if not any(map(len, table)):
        raise _not_a_table("table has no action")
    return tuple(tuple(Action(*x) for x in actions) for actions in table)


def _not_a_table(*lines: str) -> ScheduleError:
    needed = (
        "a sequence of actions for each pipeline rank, each action a tuple (kind, stage, "
        f"microbatch): the kind is one of {', '.join(KINDS)}, stage and microbatch are ints from 0"
    )
    return ScheduleError.of("Schedule, table", *lines, needed=needed, fix=EXAMPLE)


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def _is_action(x: Any) -> bool:
    if not _is_sequence(x) or len(x) != len(Action._fields):
        return False
    kind, *numbers = x
    return isinstance(kind, str) and kind in KINDS and all(map(_is_index, numbers))


def _is_index(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


@attrs.frozen(repr=False, cache_hash=True)
class Schedule:
    """The order of the actions of each rank along the pipeline axis of a mesh.

    An action is a tuple (kind, stage, microbatch). The kind of an action is F (the forward), B (the
    gradients of the stage's inputs, for which the previous stage waits), W (the gradients of the
    stage's weights), or BW (B and W together). `sf.schedules` contains schedules from published
    papers, such as GPipe and 1F1B.

    Args:
        name: a name for printing.
        table: for each rank along the pipeline axis, the sequence of its actions, each a tuple
            (kind, stage, microbatch).

    Raises:
        ScheduleError: the table is not one sequence of (kind, stage, microbatch) tuples for each
            rank.

    Example:
        >>> import shardfn as sf
        >>> rows = [[("F", s, 0), ("BW", s, 0)] for s in range(2)]
        >>> schedule = sf.Schedule("one microbatch", rows)
        >>> schedule.stages, schedule.home(1), schedule.order
        (2, 1, 'loop')
    """

    name: str
    table: tuple[tuple[Action, ...], ...] = attrs.field(converter=_rows_of)
    # plain attributes, which Dynamo can read in a step that is given its schedule
    microbatches: int = attrs.field(init=False, eq=False)
    stages: int = attrs.field(init=False, eq=False)

    @microbatches.default
    def _count_microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.actions)

    @stages.default
    def _count_stages(self) -> int:
        return 1 + max(action.stage for action in self.actions)

    def __attrs_post_init__(self) -> None:
        accept("Schedule", name=self.name)

    def __repr__(self) -> str:
        sizes = f"{self.coordinates}, microbatches={self.microbatches}, stages={self.stages}"
        return f"Schedule({self.name!r}, coordinates={sizes})"

    def __str__(self) -> str:
        return f"{self.title}\n{grid(self.table)}"

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    @property
    def title(self) -> str:
        """The name of the schedule, with the numbers of ranks, stages and microbatches."""
        sizes = f"{self.coordinates} coordinates, {self.stages} stages"
        return f"{self.name}: {sizes}, {self.microbatches} microbatches"

    @property
    def coordinates(self) -> int:
        """The number of ranks along the pipeline axis."""
        return len(self.table)

    @property
    def actions(self) -> Iterable[Action]:
        """The actions of all ranks along the pipeline axis, one rank after the other."""
        return (action for row in self.table for action in row)

    @functools.cached_property
    def parts(self) -> bool:
        """Whether the schedule computes the gradients of weights (W) separately from the gradients
        of inputs (B).
        """
        return any(action.kind == "W" for action in self.actions)

    @functools.cached_property
    def _homes(self) -> dict[int, set[int]]:
        """The coordinates of each stage."""
        homes: dict[int, set[int]] = {}
        for coordinate, row in enumerate(self.table):
            for stage in {action.stage for action in row}:
                homes.setdefault(stage, set()).add(coordinate)
        return homes

    def home(self, stage: int) -> int:
        """Return the rank along the pipeline axis that computes a stage.

        Args:
            stage: the number of the stage, from 0 up to `stages` - 1.

        Returns:
            The index of the rank along the pipeline axis.

        Raises:
            ScheduleError: the schedule does not contain the stage, or assigns the stage to two
                ranks.

        Example:
            >>> import shardfn as sf
            >>> sf.schedules.interleaved(2, 4).home(3)
            1
        """
        accept("Schedule.home", stage=stage)
        homes = sorted(self._homes.get(stage, ()))
        if len(homes) == 1:
            return homes[0]
        ranks = ", ".join(map(str, homes))
        on = f"is on pipeline ranks {ranks}" if homes else "is on no pipeline rank"
        raise ScheduleError.of(
            f"Schedule.home, {self.name}",
            f"stage {stage} {on}",
            needed="each stage on one pipeline rank",
            fix=f"a stage from 0 to {self.stages - 1}" if not homes else "schedule.check()",
        )

    @functools.cached_property
    def order(self) -> str:
        """The assignment of stages to n ranks: "loop" (stage s is on rank s mod n), "v" (two stages
        per rank, up the ranks and back down), or "other". On one rank, every order is "loop".
        """
        n = self.coordinates
        homes = [self._homes.get(stage) for stage in range(self.stages)]
        if homes == [{s % n} for s in range(self.stages)]:
            return "loop"
        return "v" if homes == [{s} for s in (*range(n), *reversed(range(n)))] else "other"

    def check(
        self,
        stages: int | None = None,
        *,
        on_the_way: int = 1,
        costs: Mapping[str, float] | None = None,
        alive: int | None = None,
    ) -> Checked:
        """Prove that the schedule never deadlocks, however long messages take, and compute its
        cost.

        Each stage must be on one rank along the pipeline axis. For each stage and microbatch, the
        schedule must contain the forward (F) once, and the backward once, either as B and W or as
        BW. Each action must come after the actions whose results it reads. Each message between two
        ranks must be received exactly once. Ranks must not wait for each other in a cycle, even if
        at most `on_the_way` messages from one rank to another can be in flight.

        Args:
            stages: the number of stages of the pipeline. By default, `stages` is the number of
                stages of the schedule.
            on_the_way: the number of messages from one rank to another that may be in flight at
                once.
            costs: the time of each kind of action. By default, F, B and W each take the time 1. A
                BW action takes the time of B plus the time of W, unless `costs` contains BW.
            alive: the largest number of activations that a rank may keep. By default, the number of
                activations is not limited.

        Returns:
            A record with `alive` (the most activations that each rank keeps), `time` (of the whole
            schedule), `busy` (the time in which each rank computes), and `idle` (the share of the
            time in which ranks wait). The predicted times do not include the sending of messages.

        Raises:
            ScheduleError: actions are missing, repeated or in a wrong order, ranks deadlock, or a
                rank keeps too many activations. The ScheduleError names the wrong actions and
                ranks.

        Example:
            >>> import shardfn as sf
            >>> price = sf.schedules.one_f_one_b(2, 3).check()
            >>> price.alive, price.time, price.idle
            ((2, 1), 12.0, 0.25)
        """
        stages = self.stages if stages is None else stages
        costs = UNIT_COSTS if costs is None else costs
        accept("Schedule.check", stages=stages, on_the_way=on_the_way, costs=costs, alive=alive)
        check_costs(self.table, costs)
        where = f"Schedule.check, {self.name}"
        return proved(where, self.table, stages, on_the_way=on_the_way, costs=costs, alive=alive)

    def to_json(self) -> str:
        """Return the schedule as JSON text, which is equal for equal schedules.

        Example:
            >>> Schedule("one", [[("F", 0, 0), ("BW", 0, 0)]]).to_json()
            '{"name": "one", "table": [[["F", 0, 0], ["BW", 0, 0]]]}'
        """
        return json.dumps({"name": self.name, "table": self.table})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Parse a schedule from JSON.

        Args:
            text: the text that `to_json` returned.

        Returns:
            The schedule.

        Raises:
            ScheduleError: the text is not a schedule.

        Example:
            >>> schedule = Schedule("one", [[("F", 0, 0), ("BW", 0, 0)]])
            >>> Schedule.from_json(schedule.to_json()) == schedule
            True
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise _not_json(f"it is not JSON: {error}") from error
        if not isinstance(fields, dict) or fields.keys() != {"name", "table"}:
            raise _not_json(f"it is {described(fields)}")
        return cls(**fields)


def _not_json(got: str) -> ScheduleError:
    return ScheduleError.of(
        "Schedule.from_json, text",
        got,
        needed='an object with "name" and "table"',
        fix="pass text that Schedule.to_json returned",
    )
