"""`overlay`: the predicted time of a step next to the time of a real run, by collective and op."""

from __future__ import annotations

import collections
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ...accepted import accept
from ...durations import human_seconds
from ...errors import ShardError, call_site
from ...source_text import RANGE, collective_range, line_range
from ..step_time import StepTime
from .events import BUBBLE, COMPUTE, EXPOSED, Event
from .profile import MeasuredCall, OpKey, calls_in, read_trace
from .trace import Row, checked_path, processes_of, save

WHERE = "overlay"
SHOWN = 20  # rows in the text
LISTED = 6  # collectives in an error
PREDICTED = "predicted: "  # how the names of processes in a merged trace begin


@attrs.frozen
class OverlayRow:
    """The predicted and measured time of a collective, or of the ops of one source line.

    Args:
        name: the name of the op, or the kind and axis of the collective.
        where: the module path and the source line.
        count: the predicted number of runs in a step.
        predicted: the predicted seconds of all runs in a step.
        measured: the measured seconds of all runs in a step, as the median over the calls.
    """

    name: str
    where: str
    count: int
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Return the measured seconds minus the predicted seconds."""
        return self.measured - self.predicted

    @property
    def ratio(self) -> float:
        """Return the measured time divided by the predicted time."""
        return self.measured / self.predicted if self.predicted else float("inf")

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        ratio = f"{self.ratio:.2f}" if self.predicted else "-"
        times = human_seconds(self.predicted), human_seconds(self.measured)
        return (*times, ratio, str(self.count), self.name, self.where)


@attrs.frozen
class Overlay:
    """The predicted and measured times of a step, in seconds. Measured times are medians over the
    calls of the run.

    Args:
        name: the name of the program.
        hardware: the name of the hardware model.
        calls: the number of calls in the run.
        step: the times of the whole step.
        compute: the times in which the rank does not wait for a collective or another stage.
        rows: one row for each collective and op, the largest difference first.
        path: the path of the merged trace, or None.
    """

    name: str
    hardware: str
    calls: int
    step: OverlayRow
    compute: OverlayRow
    rows: tuple[OverlayRow, ...]
    path: str | None = None

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        heads = ("predicted", "measured", "ratio", "count", "", "")
        shown = [self.step, self.compute, *self.rows[:SHOWN]]
        grid = [heads, *(row.cells() for row in shown)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [f"{self.name}: predicted on {self.hardware}, measured in {self.calls} calls"]
        for numbers in grid:
            cells = [x.rjust(n) for x, n in zip(numbers[:4], widths, strict=False)]
            names = [x.ljust(n) for x, n in zip(numbers[4:], widths[4:], strict=True)]
            lines.append(f"  {'  '.join([*cells, *names])}".rstrip())
        if len(self.rows) > SHOWN:
            lines.append(f"  and {len(self.rows) - SHOWN} more")
        if self.path is not None:
            lines.append(f"both in {self.path}")
        return "\n".join(lines)


def overlay(
    predicted: Any, profile: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Overlay:
    """Compare the predicted time of a step with a real run of the step.

    Args:
        predicted: the predicted time, `fn.lower(*args).time(hardware)`. If a lowered function is
            passed as `predicted`, its time is predicted for an H100.
        profile: the path of a trace of one rank, which `export_chrome_trace` of torch.profiler
            wrote and which contains calls of the function.
        path: the path of a trace to write, which shows the predicted step next to the run. The path
            of the trace must end in ".json" or ".json.gz". Without `path`, `overlay` writes no
            file.

    Returns:
        The predicted and real times of the step, of each collective and, with backend="aten", of
        the ops of each source line.

    Raises:
        ShardError: the profile cannot be read, or was recorded from another program. The message
            names the collectives that are missing in the profile or in the prediction.

    Source: trace event format of Chrome; torch.profiler.

    Example:
        >>> import pathlib, tempfile, torch, shardfn as sf
        >>> from torch.profiler import ProfilerActivity, profile
        >>> step, x = sf.jit(lambda x: (x @ x).sum(), backend="aten"), torch.ones(64, 64)
        >>> with profile(activities=[ProfilerActivity.CPU]) as run:
        ...     _ = step(x), step(x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = str(pathlib.Path(folder, "profiler.json"))
        ...     run.export_chrome_trace(file)
        ...     sf.overlay(step.lower(x), file).calls
        2
    """
    accept(WHERE, profile=profile, path=path)
    time = _time_of(predicted)
    file = None if path is None else checked_path(WHERE, path)
    page = read_trace(WHERE, os.fspath(profile))
    calls = calls_in(WHERE, time.name, page["traceEvents"])
    names = _names(time)
    _refuse_other(time.name, names, calls)
    rows = [*_collectives(names, calls), *_ops(time, calls)]
    whole = statistics.median(call.seconds for call in calls)
    busy = statistics.median(call.seconds - call.waits for call in calls)
    if file is not None:
        about = page.get("otherData") or {}
        save(WHERE, file, _merged(time, page["traceEvents"], calls), {**about, "title": time.name})
    return Overlay(
        time.name,
        time.hardware,
        len(calls),
        OverlayRow("the step", "", 1, time.total, whole),
        OverlayRow("without waits", "", 1, time.compute, busy),
        tuple(sorted(rows, key=lambda row: -abs(row.difference))),
        None if file is None else str(file),
    )


def _time_of(predicted: Any) -> StepTime:
    """Return the predicted time of a step.

    Raises:
        ShardError: it is something else.
    """
    if isinstance(predicted, StepTime):
        return predicted
    time = predicted.time() if callable(getattr(predicted, "time", None)) else None
    if isinstance(time, StepTime):
        return time
    raise ShardError.of(
        f"{WHERE}, predicted",
        f"predicted is of type {type(predicted).__name__}",
        needed="the time of a lowered function",
        fix='sf.overlay(fn.lower(*args).time("H100"), "profiler.json")',
        source=call_site(),
        arg_path="predicted",
    )


def _own(time: StepTime) -> Iterator[tuple[Event, int]]:
    """Yield the events of this rank in order, each with how often a step has it. Those of loops'
    bodies come last.
    """
    for run, count in time.ranks[time.coordinate].run.counts().items():
        for event in run.events:
            yield event, count


def _names(time: StepTime) -> dict[str, tuple[str, int, float]]:
    """Return kind, count and seconds of each collective, by the name of its range. Messages of a
    pipeline have none.
    """
    names: dict[str, tuple[str, int, float]] = {}
    for x, count in _own(time):
        if x.axis is not None and x.track not in (EXPOSED, BUBBLE) and x.target is None:
            key = collective_range(x.name, x.axis, x.source, x.module)
            _, before, seconds = names.get(key, (x.name, 0, 0.0))
            names[key] = x.name, before + count, seconds + count * x.seconds
    return names


def _refuse_other(
    name: str, names: Mapping[str, tuple[str, int, float]], calls: Sequence[MeasuredCall]
) -> None:
    """Refuse a trace of another program.

    Raises:
        ShardError: a call has other collectives.
    """
    for call in calls:
        wanted, found = _counted(names, call)
        if wanted != found:
            missing, extra = wanted - found, found - wanted
            problems = [f"missing: {_listed(missing)}"] if missing else []
            problems += [f"not predicted: {_listed(extra)}"] if extra else []
            raise ShardError.of(
                f"{WHERE}, profile",
                "the profile is a trace of another program",
                *problems,
                needed=f"the profile of a call of {name} with the shapes, mesh and "
                "placements of the prediction",
                fix="lower the function with the arguments of the profiled call",
                source=call_site(),
            )


def _counted(
    names: Mapping[str, tuple[str, int, float]], call: MeasuredCall
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Count the collectives as predicted and of a call, by name; where some of the call have no
    name, by kind.
    """
    if all(x.range is not None for x in call.collectives):
        wanted = collections.Counter({key: count for key, (_, count, _) in names.items()})
        return wanted, collections.Counter(str(x.range) for x in call.collectives)
    kinds: collections.Counter[str] = collections.Counter()
    for kind, count, _ in names.values():
        kinds[kind] += count
    return kinds, collections.Counter(x.kind for x in call.collectives)


def _listed(counts: collections.Counter[str]) -> str:
    """List some collectives."""
    rows = [f"{n} {name.removeprefix(RANGE)}" for name, n in sorted(counts.items())]
    more = [f"{len(rows) - LISTED} more"] if len(rows) > LISTED else []
    return "; ".join([*rows[:LISTED], *more])


def _collectives(
    names: Mapping[str, tuple[str, int, float]], calls: Sequence[MeasuredCall]
) -> Iterator[OverlayRow]:
    """Yield a row for each collective of a line; for each kind where the run has no lines."""
    is_named = all(x.range is not None for call in calls for x in call.collectives)
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for key, (kind, _, _) in names.items():
        groups[key if is_named else kind].append(key)
    for group, keys in groups.items():
        sums = [
            sum(x.seconds for x in call.collectives if group == (x.range if is_named else x.kind))
            for call in calls
        ]
        title, _, where = group.removeprefix(RANGE).partition(", ")
        count = sum(names[key][1] for key in keys)
        seconds = sum(names[key][2] for key in keys)
        yield OverlayRow(title, where, count, seconds, statistics.median(sums))


def _ops(time: StepTime, calls: Sequence[MeasuredCall]) -> Iterator[OverlayRow]:
    """Yield a row for each op of a line, if the run has lines."""
    if not any(call.ops for call in calls):
        return
    counts: collections.Counter[OpKey] = collections.Counter()
    seconds: dict[OpKey, float] = collections.defaultdict(float)
    for x, count in _own(time):
        if x.track == COMPUTE:
            key = x.name, line_range(x.source, x.module)
            counts[key] += count
            seconds[key] += count * x.seconds
    for key in {**seconds, **{key: None for call in calls for key in call.ops}}:
        measured = statistics.median(call.ops.get(key, 0.0) for call in calls)
        name, line = key
        yield OverlayRow(
            name, line.removeprefix(RANGE), counts[key], seconds.get(key, 0.0), measured
        )


def _merged(time: StepTime, rows: Sequence[Row], calls: Sequence[MeasuredCall]) -> list[Row]:
    """Put the predicted step into the trace of the run, at the start of its last call."""
    taken = [x["pid"] for x in rows if isinstance(x.get("pid"), int)]
    first, start = max(taken, default=0) + 1, calls[-1].start
    processes, _ = processes_of(time.ranks)
    merged = list(rows)
    for process in processes:
        for row in process.rows():
            moved = {**row, "pid": first + row["pid"]}
            if "ts" in row:
                moved["ts"] = row["ts"] + start
            if row["name"] == "process_name":
                moved["args"] = {"name": PREDICTED + row["args"]["name"]}
            merged.append(moved)
    return merged
