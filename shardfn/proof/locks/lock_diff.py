"""The differences between a step's price and its lock, by the user's lines."""

from __future__ import annotations

import collections
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from ...byte_sizes import human_bytes
from ...collectives import COLLECTIVES
from ...inspect.budget import PUBLIC_READERS
from .lock_file import NUMBER, Bucket, Price, Sent
from .lock_price import DOES
from .source_lines import SourceLines, Statement

READERS = {*PUBLIC_READERS.values()}
SHOWN = 12  # differences of one kind in a message
TOLERANCES = {  # by which a figure may differ, as a share of that of the lock
    "collectives": 0.0,
    "bytes": 0.0,
    "peak_bytes": 0.05,
    "ms": 0.1,
    "ops": 0.0,
    "kernels": 0.0,
}
Row = tuple[Statement, str]  # a line, and an op that it runs or a collective that it sends


@attrs.frozen
class Differences:
    """What differs between a price and its lock.

    Args:
        lines: one for each difference.
        notes: fields that were not compared, and why.
    """

    lines: tuple[str, ...]
    notes: tuple[str, ...]


def differences(
    old: Price,
    new: Price,
    source: SourceLines,
    places: Mapping[str, str],
    tolerances: Mapping[str, float],
) -> Differences:
    """Compare the price of a step with that of its lock.

    Args:
        old: the price in the lock.
        new: the price now.
        source: the user's code as it is now.
        places: where its statements stand, by their text.
        tolerances: by field, as a share of the figure of the lock.
    """
    code = _Code(old, new, source, places)
    close = {
        name: lambda a, b, share=share: _is_close(a, b, share) for name, share in tolerances.items()
    }
    is_same_torch = old.torch in (None, new.torch) and old.device in (None, new.device)
    sent = _collectives(old, new, code, close)
    ops = _ops(old, new, code, close["ops"]) if is_same_torch else []
    # other ops follow from other collectives; without these they are what has changed
    first, last = ([], ops) if sent else (ops, [])
    lines = [
        *_heads(old, new),
        *sent,
        *first,
        *_buckets(old, new, close, tolerances["collectives"]),
        *_totals(old, new, close["bytes"]),
        *_peaks(old, new, tolerances["peak_bytes"]),
        *_times(old, new, tolerances["ms"]),
        *_placements("argument ", old.arguments, new.arguments),
        *_placements("", old.results, new.results),
        *last,
        *(_closed_over(old, new) if is_same_torch else ()),
        *(_kernels(old, new, close["kernels"]) if is_same_torch else ()),
    ]
    return Differences(tuple(lines), tuple(_notes(old, new, is_same_torch)))


def _is_close(old: float, new: float, share: float) -> bool:
    return old == new or (math.isinf(share) or abs(new - old) <= share * old)


def _notes(old: Price, new: Price, is_same_torch: bool) -> list[str]:
    """Say what was not compared. With ops, kernels and closed-over tensors are left out."""
    notes = []
    absent = [x for x in attrs.asdict(new, recurse=False) if getattr(old, x) is None]
    absent = [x for x in absent if getattr(new, x) is not None]
    if absent:
        notes.append(f"the lock file has no entry for {', '.join(absent)}")
    if not is_same_torch and old.ops is not None:
        then = " on ".join(filter(None, (old.torch, old.device)))
        now = f"{new.torch} on {new.device}"
        notes.append(
            f"ops are not compared: the lock was written with torch {then}, and this is torch {now}"
        )
    elif old.kernels is not None and new.kernels is None:
        notes.append("kernels were not compared: sf.lock(..., kernels=True) compiles the step")
    return notes


def _heads(old: Price, new: Price) -> list[str]:
    names = ("mesh", "rank", "backend", "hardware")
    rows = [(name, getattr(old, name), getattr(new, name)) for name in names]
    return [f"{name} is {b}, was {a}" for name, a, b in rows if a is not None and a != b]


class _Code:
    """The statements of a lock and of the program now, and which of them were edited.

    Args:
        old: the price in the lock.
        new: the price now.
        source: the user's code as it is now.
        places: where its statements stand.
    """

    def __init__(
        self, old: Price, new: Price, source: SourceLines, places: Mapping[str, str]
    ) -> None:
        before, now = _statements(old), _statements(new)
        self.source, self.places = source, places
        ran = {Statement.parsed(line) for line in old.ops or ()}
        # edited, removed or no longer run since the lock; and those in their place
        gone = [x for x in before - now if x in ran or source.find(x) is None]
        self.gone = dict.fromkeys(sorted(gone, key=str))
        self.fresh = dict.fromkeys(sorted(now - before, key=str))
        self.pairs = _pairs(self.gone, self.fresh)  # by the new one

    def at(self, statement: Statement) -> str:
        """Return where a statement stands, or stood."""
        found = self.places.get(str(statement)) or self.source.find(statement)
        if found:
            return found
        if not statement.file:
            return f"the {statement.text}" if statement.text in READERS else statement.text
        return f"{statement.file}, `{statement.text}` in {statement.function}"

    def changed(
        self,
        old: Mapping[Row, Any],
        new: Mapping[Row, Any],
        total: Callable[[Iterable[Any]], Any],
        is_same: Callable[[Any, Any], bool],
    ) -> dict[tuple[Statement, str], tuple[Any, Any]]:
        """Return the rows that differ, each with its value before and now. Statements that were
        edited, moved or split into others differ only if they do together.

        Args:
            old: values of the lock by statement and by op or collective.
            new: those of the program now.
            total: adds values up.
            is_same: whether two values are the same.
        """
        keys = dict.fromkeys([*new, *old])
        nothing = total([])
        fixed = [x for x in keys if x[0] not in self.gone and x[0] not in self.fresh]
        rows = {x: (old.get(x, nothing), new.get(x, nothing)) for x in fixed}
        for what in dict.fromkeys(x for _, x in keys):
            before = {s: old[s, what] for s in self.gone if (s, what) in old}
            now = {s: new[s, what] for s in self.fresh if (s, what) in new}
            if is_same(total(before.values()), total(now.values())):
                continue
            for s, value in now.items():
                was = self.pairs.get(s)
                rows[s, what] = (before.pop(was, nothing) if was else nothing, value)
            for s, value in before.items():
                place = next((b for b, a in self.pairs.items() if a == s), s)
                rows[place, what] = (value, nothing)
        return {x: pair for x, pair in rows.items() if not is_same(*pair)}


def _statements(price: Price) -> set[Statement]:
    """Return the statements that a price names."""
    sent = (key.rpartition(DOES)[0] for key in price.collectives or ())
    return {x for x in map(Statement.parsed, (*sent, *(price.ops or ()))) if x.file}


def _pairs(gone: Iterable[Statement], fresh: Iterable[Statement]) -> dict[Statement, Statement]:
    """Pair statements with those that they were before: of the same function, the most alike
    first; or of the same text elsewhere.
    """
    by_function = collections.defaultdict[tuple[str, str], list[Statement]](list)
    by_text = collections.defaultdict[str, list[Statement]](list)
    for x in gone:
        by_function[x.file, x.function].append(x)
        by_text[x.text].append(x)
    ranked = []
    for x in fresh:
        inside = by_function[x.file, x.function]
        for y in {*inside, *by_text[x.text]}:
            alike = difflib.SequenceMatcher(None, x.text, y.text).ratio()
            ranked.append((-alike, str(x), str(y), x, y))
    pairs: dict[Statement, Statement] = {}
    for *_, x, y in sorted(ranked, key=lambda row: row[:3]):
        if x not in pairs and y not in pairs.values():
            pairs[x] = y
    return pairs


def _shown(lines: list[str]) -> list[str]:
    """Return the first differences of a kind, and how many more there are."""
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"and {more} more lines of this kind"]


def _rows_sent(price: Price) -> dict[Row, Sent]:
    rows = (key.rpartition(DOES)[::2] for key in price.collectives or ())
    values = (price.collectives or {}).values()
    return {
        (Statement.parsed(line), what): sent
        for (line, what), sent in zip(rows, values, strict=True)
    }


def _added(sent: Iterable[Sent]) -> Sent:
    every = list(sent)
    return Sent(
        sum(x.count for x in every), sum(x.bytes for x in every), sum(x.implicit for x in every)
    )


def _collectives(old: Price, new: Price, code: _Code, close: Mapping[str, Any]) -> list[str]:
    """Return the differences in what lines send."""
    if old.collectives is None:
        return []

    def is_same(a: Sent, b: Sent) -> bool:
        counts, sizes = close["collectives"], close["bytes"]
        is_close = counts(a.count, b.count) and sizes(a.bytes, b.bytes)
        return is_close and counts(a.implicit, b.implicit)

    rows = code.changed(_rows_sent(old), _rows_sent(new), _added, is_same)
    largest = sorted(rows.items(), key=lambda row: -abs(row[1][1].bytes - row[1][0].bytes))
    return _shown([_sent_line(code.at(s), what, a, b) for (s, what), (a, b) in largest])


def _sent_line(at: str, what: str, old: Sent, new: Sent) -> str:
    """Return a line such as `train.py:41 now gathers 2.1 GiB over tp (was 0)`."""
    kind, _, rest = what.removesuffix("]").partition("[")
    op, _, axis = rest.rpartition(", ")
    row = COLLECTIVES.get(kind)
    verb = row.verb if row is not None else f"runs {kind} of"
    over = f"over {axis}" + (f" ({op})" if op not in ("", "sum") else "")
    if not new.count:
        return f"{at} no longer {verb} {over} (was {_amount(old, new)})"
    implicit = ", implicit" if new.implicit and not old.implicit else ""
    return f"{at} now {verb} {_amount(new, old)} {over}{implicit} (was {_amount(old, new)})"


def _amount(sent: Sent, other: Sent) -> str:
    """Return bytes, with the number of collectives where that differs too."""
    if not sent.count:
        return "0"
    size = human_bytes(sent.bytes)
    if size == human_bytes(other.bytes) and sent.bytes != other.bytes:
        size = f"{sent.bytes:,} B"
    if sent.count == other.count or (sent.count == 1 and not other.count):
        return size
    noun = "collective" if sent.count == 1 else "collectives"
    return f"{size} in {sent.count} {noun}"


def _buckets(old: Price, new: Price, close: Mapping[str, Any], share: float) -> list[str]:
    """Return the differences between bucket plans."""
    if old.buckets is None or new.buckets is None or _are_same(old.buckets, new.buckets, close):
        return []
    before, now = (collections.Counter(b.kind for b in x.buckets or ()) for x in (old, new))
    kinds = dict.fromkeys([*now, *before])
    if share and all(_is_close(before[kind], now[kind], share) for kind in kinds):
        return []  # other buckets are allowed, as long as there are about as many
    lines = [
        f"{now[kind]} {_buckets_of(now[kind])} {kind} (was {before[kind]})"
        for kind in kinds
        if before[kind] != now[kind]
    ]
    for i, bucket in enumerate(new.buckets):
        if bucket not in old.buckets:
            at = f", {bucket.at}," if bucket.at else ""
            lines.append(f"bucket {i}{at} is now {bucket}")
    lines += [
        f"bucket {i} was {bucket}"
        for i, bucket in enumerate(old.buckets)
        if bucket not in new.buckets
    ]
    return _shown(lines or ["the order of buckets has changed"])


def _buckets_of(count: int) -> str:
    return "bucket of" if count == 1 else "buckets of"


def _are_same(old: tuple[Bucket, ...], new: tuple[Bucket, ...], close: Mapping[str, Any]) -> bool:
    same = [
        attrs.evolve(a, bytes=b.bytes) == b and close["bytes"](a.bytes, b.bytes)
        for a, b in zip(old, new, strict=False)
    ]
    return len(old) == len(new) and all(same)


def _totals(old: Price, new: Price, is_close: Callable[..., bool]) -> list[str]:
    """Return the differences in the bytes of axes."""
    before, now = old.bytes or {}, new.bytes or {}
    if old.bytes is None:
        return []
    return [
        f"in all {human_bytes(b)} of {kind} (was {human_bytes(a) if a else 0})"
        for kind in sorted({*before, *now})
        if not is_close(a := before.get(kind, 0), b := now.get(kind, 0))
    ]


def _peaks(old: Price, new: Price, share: float) -> list[str]:
    return _figures(
        old.peak_bytes, new.peak_bytes, share, lambda part: f"the peak{_of(part)}", human_bytes
    )


def _times(old: Price, new: Price, share: float) -> list[str]:
    if old.hardware not in (None, new.hardware):
        return []
    on = f" on {new.hardware}"
    name = lambda part: f"the predicted time{_of(part)}{on}"
    return _figures(old.ms, new.ms, share, name, lambda ms: f"{ms:g} ms")


def _of(part: str) -> str:
    return "" if part == "step" else f" of the {part}"


def _figures(
    old: Mapping[str, float] | None,
    new: Mapping[str, float] | None,
    share: float,
    name: Callable[[str], str],
    shown: Callable[[float], str],
) -> list[str]:
    """Return the differences between figures that may vary by a share."""
    if old is None or new is None:
        return []
    lines = []
    for part in sorted({*old, *new}):
        a, b = old.get(part), new.get(part)
        if a is None or b is None:
            state = "is no longer known" if b is None else f"is {shown(b)}, and was not known"
            lines.append(f"{name(part)} {state}")
        elif not _is_close(a, b, share):
            change = f", {_percent(abs(b - a) / a)} {'more' if b > a else 'less'}" if a else ""
            allowed = f"; {_percent(share)} is allowed" if share else ""
            lines.append(f"{name(part)} is {shown(b)} (was {shown(a)}{change}{allowed})")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _placements(
    noun: str, old: Mapping[str, str] | None, new: Mapping[str, str] | None
) -> list[str]:
    """Return the differences in dtypes, shapes and placements. Equal ones of layers are one."""
    if old is None or new is None:
        return []
    groups = collections.defaultdict[tuple[str, str, str], list[str]](list)
    for path in dict.fromkeys([*new, *old]):
        was, now = old.get(path, "absent"), new.get(path, "absent")
        if was != now:
            groups[NUMBER.sub("*", path), now, was].append(path)
    lines = []
    for (pattern, now, was), paths in groups.items():
        named = paths[0] if len(paths) == 1 else f"{pattern}, {len(paths)} of them,"
        is_now, was_then = ("is", "was") if len(paths) == 1 else ("are", "were")
        lines.append(f"{noun}{named} {is_now} {now}, {was_then} {was}")
    return _shown(lines)


def _closed_over(old: Price, new: Price) -> list[str]:
    """Return the differences in the tensors that a step closes over."""
    before, now = old.closed_over, new.closed_over
    if before is None or now is None:
        return []
    return _shown(
        [
            f"the function closes over {b} tensors {kind} (was {a})"
            for kind in sorted({*before, *now})
            if (a := before.get(kind, 0)) != (b := now.get(kind, 0))
        ]
    )


def _ops(old: Price, new: Price, code: _Code, is_close: Callable[..., bool]) -> list[str]:
    """Return the differences in the ops that lines run."""
    if old.ops is None or new.ops is None:
        return []
    before, now = (
        {(Statement.parsed(line), op): n for line, row in ops.items() for op, n in row.items()}
        for ops in (old.ops, new.ops)
    )
    by_line = collections.defaultdict[Statement, list[str]](list)
    for (statement, op), (a, b) in code.changed(before, now, sum, is_close).items():
        by_line[statement].append(f"{op} x {b} (was {a})")
    lines = [f"{code.at(s)} now runs {', '.join(sorted(rows))}" for s, rows in by_line.items()]
    return _shown(sorted(lines))


def _kernels(old: Price, new: Price, is_close: Callable[..., bool]) -> list[str]:
    """Return the differences in compiled kernels."""
    if old.kernels is None or new.kernels is None:
        return []
    names = sorted({*old.kernels, *new.kernels})
    pairs = [(name, old.kernels.get(name, 0), new.kernels.get(name, 0)) for name in names]
    return _shown(
        [
            f"kernel {name} is called {b} times (was {a})"
            for name, a, b in pairs
            if not is_close(a, b)
        ]
    )
