"""`Trace`: the timeline of a step as a file for Perfetto and chrome://tracing.

Source: the trace event format of Chrome ("Trace Event Format"), which ui.perfetto.dev reads.
"""

from __future__ import annotations

import bisect
import functools
import gzip
import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ...errors import ShardError, call_site
from ...stored import complete_files
from .events import BUBBLE, COMPUTE, EXPOSED, Event
from .ranks import RankTimeline

MOST_DRAWN = 200_000  # events of all ranks
ENDINGS = (".json", ".json.gz")
WAITS = "waits"  # the thread of what is exposed and of the bubble
VIEWER = "https://ui.perfetto.dev"
MICROSECONDS = 1e6
ROUNDING = 1e-12  # seconds
Row = dict[str, Any]  # of a trace file


@attrs.frozen
class Trace:
    """A written trace file.

    Args:
        path: the path of the file.
        ranks: the names of the processes of the trace, each of which stands for ranks with equal
            timelines.
        events: the number of events.
        left_out: a text about the events that the trace omits, or "".
    """

    path: str
    ranks: tuple[str, ...]
    events: int
    left_out: str = ""

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.events} events of {'; '.join(self.ranks)}"]
        lines += [self.left_out] if self.left_out else []
        return "\n".join([*lines, f"open it at {VIEWER}"])


def write_trace(
    path: str | os.PathLike[str],
    title: str,
    ranks: Sequence[RankTimeline],
    memory: Mapping[int, Sequence[tuple[float, int]]] | None = None,
    most: int = MOST_DRAWN,
) -> Trace:
    """Write the timelines of all ranks.

    Args:
        path: of the file, which ends in ".json" or ".json.gz".
        title: of the trace.
        ranks: what they do.
        memory: of some of them, by number, the bytes that they hold from a time on.
        most: events that are drawn at most.

    Raises:
        ShardError: the file has another ending, or cannot be written.
    """
    file = checked_path("StepTime.trace", path)
    processes, left_out = processes_of(ranks, most)
    rows = [row for process in processes for row in process.rows()]
    rows += [row for process in processes for row in process.arrows(processes)]
    for pid, sizes in (memory or {}).items():
        rows += [_counter(pid, start, nbytes) for start, nbytes in sizes]
    save("StepTime.trace", file, rows, {"title": title, "left out": left_out})
    names = tuple(rank.name for rank in ranks)
    return Trace(str(file), names, sum(len(x.events) for x in processes), left_out)


def checked_path(where: str, path: str | os.PathLike[str]) -> Path:
    """Return the path of a trace to write.

    Raises:
        ShardError: its ending is another.
    """
    file = Path(path)
    if file.name.endswith(ENDINGS):
        return file
    raise ShardError.of(
        f"{where}, path",
        f"{str(file)!r} has another ending",
        needed=f"a file that ends in {' or '.join(ENDINGS)}",
        fix=f'path="{file.name.partition(".")[0] or "step"}.json.gz"',
        source=call_site(),
        arg_path="path",
    )


def save(where: str, file: Path, rows: Sequence[Row], about: dict[str, str]) -> None:
    """Write the rows of a trace, compressed if the name of the file ends so.

    Raises:
        ShardError: the file cannot be written.
    """
    page = {"displayTimeUnit": "ns", "otherData": about, "traceEvents": rows}
    data = json.dumps(page, separators=(",", ":")).encode()
    if file.suffix == ".gz":
        data = gzip.compress(data, compresslevel=5, mtime=0)
    try:
        complete_files.write(file, data)
    except OSError as error:
        got = f"{str(file)!r} cannot be written: {error.strerror}"
        fix = "a folder that exists"
        source = call_site()
        raise ShardError.of(
            f"{where}, path", got, fix=fix, source=source, arg_path="path"
        ) from error


def processes_of(
    ranks: Sequence[RankTimeline], most: int = MOST_DRAWN
) -> tuple[list[Process], str]:
    """Choose the events that are drawn of each rank, and say what is left out. Loops are unrolled
    as deep as there is room; of more events than that the longest stay.
    """
    each = most // len(ranks)
    processes = []
    is_outline, dropped = False, 0
    for pid, rank in enumerate(ranks):
        depth = rank.run.depth_within(each)
        events = rank.run.unrolled(depth)
        is_outline |= depth < rank.run.depth
        dropped += max(0, len(events) - each)
        processes.append(Process(pid, rank.name, _longest(events, each)))
    parts = ["outline: each loop body is drawn as one event per track"] if is_outline else []
    parts += [f"the {dropped} shortest events are not drawn"] if dropped else []
    return processes, "; ".join(parts)


def _longest(events: Sequence[Event], most: int) -> tuple[Event, ...]:
    """Return the longest events, in order of their start."""
    chosen = heapq.nlargest(most, range(len(events)), key=lambda i: events[i].seconds)
    return tuple(events[i] for i in sorted(chosen))


@attrs.frozen(eq=False)
class Process:
    """The ranks of one timeline as a process of a trace: a thread for what they compute, one for
    what they wait for, and one for each mesh axis.

    Args:
        pid: its number.
        name: of the process.
        events: that are drawn, in order of their start.
    """

    pid: int
    name: str
    events: tuple[Event, ...]

    @functools.cached_property
    def threads(self) -> dict[str, int]:
        """The number of the thread of each track."""
        axes = sorted({x.track for x in self.events} - {COMPUTE, EXPOSED, BUBBLE})
        return {COMPUTE: 0, EXPOSED: 1, BUBBLE: 1, **{axis: 2 + i for i, axis in enumerate(axes)}}

    @functools.cached_property
    def ops(self) -> list[Event]:
        """The events of the thread for compute."""
        return [x for x in self.events if x.track == COMPUTE]

    @functools.cached_property
    def starts(self) -> list[float]:
        """The starts of the ops."""
        return [x.start for x in self.ops]

    def rows(self) -> Iterator[Row]:
        """Yield the names of the process and its threads, and its events."""
        yield _about("process_name", self.pid, 0, name=self.name)
        yield _about("process_sort_index", self.pid, 0, sort_index=self.pid)
        for track, tid in self.threads.items():
            if track != BUBBLE:
                name = WAITS if track == EXPOSED else track
                yield _about("thread_name", self.pid, tid, name=name)
                yield _about("thread_sort_index", self.pid, tid, sort_index=tid)
        for event in self.events:
            yield row_of(event, self.pid, self.threads[event.track])

    def arrows(self, processes: Sequence[Process]) -> Iterator[Row]:
        """Yield an arrow from each collective to the op that runs when it has been waited for, and
        from each message to the op that its receiver runs then.
        """
        for number, event in enumerate(self.events):
            if event.read is None:
                continue
            reader = self if event.target is None else processes[event.target]
            op = reader.next_op(event.read)
            if op is not None:
                key = {"name": event.name, "cat": "reads", "id": f"{self.pid}.{number}"}
                start = {"ph": "s", "pid": self.pid, "tid": self.threads[event.track]}
                end = {"ph": "f", "bp": "e", "pid": reader.pid, "tid": reader.threads[COMPUTE]}
                yield {**key, **start, "ts": MICROSECONDS * event.start}
                yield {**key, **end, "ts": MICROSECONDS * op.start}

    def next_op(self, now: float) -> Event | None:
        """Return the first op that starts at a time or later."""
        i = bisect.bisect_left(self.starts, now - ROUNDING)
        return self.ops[i] if i < len(self.ops) else None


def _about(kind: str, pid: int, tid: int, **args: Any) -> Row:
    """Return a row about a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _counter(pid: int, start: float, nbytes: int) -> Row:
    """Return a row for the bytes that ranks hold from a time on."""
    ts, args = MICROSECONDS * start, {"bytes": nbytes}
    return {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": ts, "args": args}


def row_of(event: Event, pid: int, tid: int) -> Row:
    """Return the row of one event."""
    details = {
        "line": event.source,
        "module": event.module,
        "axis": event.axis,
        "bytes": event.nbytes or None,
        "bucket": event.bucket,
        "action": event.action,
        "repeats": event.repeats if event.repeats > 1 else None,
    }
    return {
        "ph": "X",
        "name": f"wait for {event.name}" if event.track == EXPOSED else event.name,
        "cat": event.track,
        "pid": pid,
        "tid": tid,
        "ts": MICROSECONDS * event.start,
        "dur": MICROSECONDS * event.seconds,
        "args": {key: x for key, x in details.items() if x is not None},
    }
