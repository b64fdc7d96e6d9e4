"""The variants of a step, one for each number of microbatches, rematerialization policy and
pipeline schedule.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..accepted import described
from ..capture.checkpoint import policies
from ..errors import ScheduleError, ShardError
from ..ops.pipeline import Pipeline
from ..pipelines import Schedule
from ..runtime.stages import Lowered
from ..transforms._transformed import name_of
from ..types import LocalProgram

MICROBATCHES, REMAT, SCHEDULE = "microbatches", "remat", "schedule"
# what the function of each keyword looks like
EXAMPLES = {
    MICROBATCHES: "def step(params, batch, *, microbatches): "
    "sf.accumulate(sf.value_and_grad(loss), microbatches)(params, batch)",
    REMAT: "def step(params, batch, *, remat), whose loss calls "
    "layer = sf.checkpoint(block, policy=remat)",
    SCHEDULE: "def step(params, batch, *, schedule): "
    "sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule)(params, batch)",
}
USES = {
    MICROBATCHES: "sf.accumulate",
    REMAT: "sf.checkpoint as policy=",
    SCHEDULE: "pipelined_grad",
}
PLACES = "lambda mesh, schedule: (sf.strategy('pipeline', params, mesh).params, None)"


@attrs.frozen(eq=False)
class Variant:
    """A step with some of its keywords bound: it is captured once for all meshes.

    Args:
        fn: the step, of positional arguments.
        options: the keywords.
    """

    fn: Callable[..., Any]
    options: Mapping[str, Any]

    @property
    def schedule(self) -> Schedule | None:
        """Return the schedule of its pipeline."""
        return self.options.get(SCHEDULE)


def variants_of(where: str, fn: Callable[..., Any], choices: Mapping[str, Any]) -> list[Variant]:
    """Return a variant for each combination of the choices that are given.

    Args:
        where: the function, for errors.
        fn: the step.
        choices: the values of each keyword; None for a keyword that is not passed.

    Raises:
        ShardError: values that are not a list, or wrong ones; the step does not take a keyword.
        ScheduleError: the same, of schedules.
    """
    given = {key: values for key, values in choices.items() if values is not None}
    for key, values in given.items():
        _check(where, key, values)
        if not _takes(fn, key):
            error = ScheduleError if key == SCHEDULE else ShardError
            raise error.of(
                f"{where}, fn",
                f"the function takes no argument {key}",
                needed=f"a function that also takes {key}= and passes it to {USES[key]}",
                fix=EXAMPLES[key],
            )
    rows = itertools.product(*given.values())
    return [_bound(fn, dict(zip(given, row, strict=True))) for row in rows]


def _bound(fn: Callable[..., Any], options: Mapping[str, Any]) -> Variant:
    """Bind the keywords of a step."""
    if not options:
        return Variant(fn, options)

    def step(*args: Any) -> Any:
        return fn(*args, **options)

    step.__name__ = name_of(fn)
    step.__signature__ = inspect.signature(functools.partial(fn, **options))  # type: ignore[attr-defined]
    return Variant(step, options)


def _takes(fn: Callable[..., Any], key: str) -> bool:
    """Return whether a function can be called with a keyword."""
    parameters = inspect.signature(fn).parameters.values()
    named = [x for x in parameters if x.name == key and x.kind is not x.POSITIONAL_ONLY]
    return bool(named) or any(x.kind is x.VAR_KEYWORD for x in parameters)


def is_list(x: Any) -> bool:
    """Return whether a value is a sequence with a row, and not a text."""
    return isinstance(x, Sequence) and not isinstance(x, str) and len(x) > 0


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


# of each keyword: its argument, the test of one value, what a list needs, and one that is right
LISTS: dict[str, tuple[str, Callable[[Any], bool], str, str]] = {
    MICROBATCHES: (MICROBATCHES, _is_count, "a list of positive ints", "microbatches=[1, 2, 4]"),
    REMAT: (
        REMAT,
        lambda x: isinstance(x, str),
        "a list of checkpoint_policies",
        "remat=['everything_saveable', 'dots_saveable', 'nothing_saveable']",
    ),
    SCHEDULE: (
        "pipelines",
        lambda x: isinstance(x, Schedule),
        "a list of sf.Schedules",
        "pipelines=[sf.schedules.gpipe(4, 8), sf.schedules.one_f_one_b(4, 8)]",
    ),
}


def _check(where: str, key: str, values: Any) -> None:
    """Check the values of a keyword.

    Raises:
        ShardError: they are not a list of what it takes; a ScheduleError of schedules.
    """
    argument, is_right, needed, fix = LISTS[key]
    if not is_list(values) or not all(map(is_right, values)):
        error = ScheduleError if key == SCHEDULE else ShardError
        got = f"it is {described(values)}"
        raise error.of(f"{where}, {argument}", got, needed=needed, fix=fix)
    for x in values if key == REMAT else ():
        policies.check(f"{where}, {argument}", x)


def refuse_other_schedule(where: str, programs: Sequence[LocalProgram], schedule: Schedule) -> None:
    """Refuse a step that does not run by the schedule that it was called with.

    Args:
        where: the function, for errors.
        programs: of all coordinates of the pipeline; none without stages.
        schedule: of the call.

    Raises:
        ScheduleError: it has no pipeline, or one of another schedule.
    """
    runs = [
        (k, node.target.actions())
        for k, program in enumerate(programs)
        for node in program.graph.nodes
        if isinstance(node.target, Pipeline)
    ]
    if not runs:
        raise ScheduleError.of(
            f"{where}, pipelines",
            f"{schedule.name} is not used: no parameter is on a pipeline stage, or fn does not "
            "call pipelined_grad",
            fix=f"in_placements={PLACES}",
        )
    for k, actions in runs:
        table = map(tuple, schedule.table[k])  # actions in which nothing is computed do not run
        if not all((x.kind, x.stage, x.microbatch) in table for x in actions):
            raise ScheduleError.of(
                f"{where}, fn",
                f"the function was called with {schedule.name}, but its pipelined_grad uses "
                "another schedule",
                fix=EXAMPLES[SCHEDULE],
            )


def programs_of(lowered: Lowered) -> list[LocalProgram]:
    """Return the program of a rank, or those of all coordinates of its pipeline."""
    axis = lowered.partition.stage_axis
    if axis is None:
        return [lowered.program]
    return [lowered.stage(k) for k in range(lowered.program.axes.sizes[axis])]
