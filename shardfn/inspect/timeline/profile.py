"""The calls of a transformed function in a trace of torch.profiler, with the times of their ops,
collectives and waits.
"""

from __future__ import annotations

import bisect
import collections
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ...collectives import COLLECTIVES, kind_of_op
from ...errors import ShardError, call_site
from ...source_text import RANGE, WAIT_RANGE, call_range

MICROSECOND = 1e-6
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MESSAGES = (":send", ":recv")  # how the names of a pipeline's messages end
Row = dict[str, Any]  # of a trace file
Kernels = Mapping[Any, Sequence[Row]]  # by the id of the op that starts them
OpKey = tuple[str, str]  # the op, and the range of its line


@attrs.frozen
class MeasuredCollective:
    """A collective of one call.

    Args:
        kind: of the collective.
        range: the range in which it started, which names its axis, line and module; None without
            one.
        seconds: how long its backend took; without a record of that, until it was waited for.
    """

    kind: str
    range: str | None
    seconds: float


@attrs.frozen
class MeasuredCall:
    """One call of a function.

    Args:
        start: in the microseconds of the trace.
        seconds: of the call.
        waits: seconds in which it waited for collectives.
        collectives: in the order of their start.
        ops: the seconds of all ops, by op and line; empty where ops have no lines, as with
            Inductor.
    """

    start: float
    seconds: float
    waits: float
    collectives: tuple[MeasuredCollective, ...]
    ops: Mapping[OpKey, float]


def read_trace(where: str, path: str | Path) -> dict[str, Any]:
    """Read a trace.

    Raises:
        ShardError: the file cannot be read, or holds something else.
    """
    fix = 'call profiler.export_chrome_trace("profiler.json") of torch.profiler after a call'
    try:
        data = Path(path).read_bytes()
        page = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        rows = page["traceEvents"]
    except OSError as error:
        got = f"{str(path)!r} cannot be read: {error.strerror}"
        raise ShardError.of(f"{where}, profile", got, fix=fix, source=call_site()) from error
    except (ValueError, KeyError, TypeError) as error:
        got = f"{str(path)!r} is not a trace"
        needed = "a file exported by torch.profiler: JSON with traceEvents"
        raise ShardError.of(
            f"{where}, profile", got, needed=needed, fix=fix, source=call_site()
        ) from error
    return {**page, "traceEvents": [x for x in rows if isinstance(x, dict)]}


def calls_in(where: str, name: str, rows: Sequence[Row]) -> list[MeasuredCall]:
    """Return the calls of a function in a trace.

    Args:
        where: the function that reads, for errors.
        name: of the function that was called.
        rows: of the trace.

    Raises:
        ShardError: the trace has no call of it.
    """
    spans = sorted((x for x in rows if x.get("ph") == "X"), key=lambda x: (x["ts"], -x["dur"]))
    calls = [x for x in spans if x["name"] == call_range(name)]
    if not calls:
        prefix = call_range("")
        others = {x["name"].removeprefix(prefix) for x in spans if x["name"].startswith(prefix)}
        got = f"it has calls of {', '.join(sorted(others))}" if others else "it has no call"
        raise ShardError.of(
            f"{where}, profile",
            f"the profile is a trace of another program: {got}",
            needed=f"a profile recorded during a call of {name}",
            fix=f"profile a call of {name} without a loaded artefact and without CUDA graphs",
            source=call_site(),
        )
    threads: dict[Any, list[Row]] = collections.defaultdict(list)
    for x in spans:
        threads[x.get("pid"), x.get("tid")].append(x)
    device = _on_device(spans)
    sent = _Sent([x for x in spans if _is_sent(x)])
    return [_call(x, threads[x["pid"], x["tid"]], device, sent) for x in calls]


def _is_sent(x: Row) -> bool:
    """Return whether a row is a collective as its backend runs it: of Gloo on a thread, of NCCL a
    kernel.
    """
    name: str = x["name"]
    is_kernel = x.get("cat") in ON_DEVICE and name.startswith("nccl")
    is_gloo = x.get("cat") == "user_annotation" and name.startswith("gloo:")
    return is_kernel or (is_gloo and not name.endswith(MESSAGES))


class _Sent:
    """What backends ran, each taken once, in the order of their start."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = collections.deque(rows)

    def after(self, start: float) -> Row | None:
        """Return the next one that starts after a time."""
        while self.rows and self.rows[0]["ts"] < start:
            self.rows.popleft()
        return self.rows.popleft() if self.rows else None


def _on_device(spans: Sequence[Row]) -> Kernels | None:
    """Return what runs on an accelerator, by the id of the op that starts it; None on a CPU."""
    kernels: dict[Any, list[Row]] = collections.defaultdict(list)
    for x in spans:
        if x.get("cat") in ON_DEVICE:
            kernels[_id(x)].append(x)
    return kernels or None


def _id(x: Row) -> Any:
    return x.get("args", {}).get("External id")


def _span_and_waits(
    call: Row, inside: Sequence[Row], device: Kernels | None
) -> tuple[float, float]:
    """Return how long a call takes, and how long it waits for collectives. On an accelerator a call
    takes from its first kernel to the end of the last, and waits while no kernel computes.
    """
    ids = dict.fromkeys(map(_id, inside))
    kernels = [x for each in ids for x in (device or {}).get(each, [])]
    if not kernels:
        return call["dur"], sum(x["dur"] for x in inside if _is_wait(x))
    start, end = min(x["ts"] for x in kernels), max(map(_end, kernels))
    busy, now = 0.0, start
    for x in sorted(kernels, key=lambda x: x["ts"]):
        if not _is_sent(x):
            busy += max(0.0, _end(x) - max(now, x["ts"]))
            now = max(now, _end(x))
    return end - start, end - start - busy


def _call(call: Row, thread: Sequence[Row], device: Kernels | None, sent: _Sent) -> MeasuredCall:
    """Read what one call took."""
    first = bisect.bisect_left(thread, call["ts"], key=lambda x: x["ts"])
    last = bisect.bisect_right(thread, _end(call), key=lambda x: x["ts"])
    inside = [x for x in thread[first:last] if x is not call and _end(x) <= _end(call) + 1e-3]
    waits: dict[str, collections.deque[Row]] = collections.defaultdict(collections.deque)
    for x in filter(_is_wait, inside):
        waits[RANGE + x["name"].removeprefix(WAIT_RANGE)].append(x)
    collectives = []
    for kind, x, line in _starts(inside):
        name = line["name"] if line is not None and _is_collective(line["name"]) else None
        wait = waits[name].popleft() if name is not None and waits[name] else x
        own = sent.after(x["ts"])
        took = _end(wait) - x["ts"] if own is None else own["dur"]
        collectives.append(MeasuredCollective(kind, name, MICROSECOND * took))
    span, waited = _span_and_waits(call, inside, device)
    return MeasuredCall(
        call["ts"],
        MICROSECOND * span,
        MICROSECOND * waited,
        tuple(collectives),
        _ops(inside, device),
    )


def _starts(inside: Sequence[Row]) -> list[tuple[str, Row, Row | None]]:
    """List the ops that start collectives, with the kind and the range of each. An op that a
    dispatch mode has seen stands in the trace twice: the inner one counts.
    """
    starts: list[tuple[str, Row, Row | None]] = []
    for x, line in _with_ranges(inside):
        kind = _kind(x)
        if kind is not None:
            if starts and starts[-1][0] == kind and _end(x) <= _end(starts[-1][1]):
                starts.pop()
            starts.append((kind, x, line))
    return starts


def _ops(inside: Sequence[Row], device: Kernels | None) -> dict[OpKey, float]:
    """Sum the seconds of the ops of each line: of the outermost, with what they call."""
    seconds: dict[OpKey, float] = collections.defaultdict(float)
    outermost: Row | None = None
    key: OpKey | None = None
    for x, line in _with_ranges(inside):
        if x.get("cat") != "cpu_op" or line is None or _is_collective(line["name"]):
            continue
        if outermost is None or x["ts"] >= _end(outermost):
            outermost, key = x, (x["name"].rpartition("::")[2], line["name"])
            seconds[key] += 0.0 if device is not None else MICROSECOND * x["dur"]
        if device is not None and key is not None:
            seconds[key] += MICROSECOND * sum(each["dur"] for each in device.get(_id(x), []))
    return dict(seconds)


def _with_ranges(inside: Sequence[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Yield each op with the range that it is in."""
    line: Row | None = None
    for x in inside:
        if x["name"].startswith(RANGE) and x.get("cat") != "cpu_op":
            line = x
        else:
            yield x, line if line is not None and x["ts"] < _end(line) else None


def _kind(x: Row) -> str | None:
    """Return the kind of collective that an op starts."""
    row = kind_of_op(x["name"].replace("::", ".")) if x.get("cat") == "cpu_op" else None
    return None if row is None else row.name


def _is_wait(x: Row) -> bool:
    return x["name"].startswith(WAIT_RANGE) and x.get("cat") != "cpu_op"


def _is_collective(name: str) -> bool:
    """Return whether a range is that of a collective, or of the wait for it."""
    kind, over, _ = name.removeprefix(WAIT_RANGE).removeprefix(RANGE).partition(" over ")
    return bool(over) and kind in COLLECTIVES


def _end(x: Row) -> float:
    return x["ts"] + x["dur"]
