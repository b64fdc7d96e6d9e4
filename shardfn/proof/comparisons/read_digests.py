"""The calls of a recorded run, each value put together from the digests of its ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ...errors import ShardError, call_site
from ...partition import layout
from ...types import REDUCTIONS, MeshAxes

FIX = "SHARDFN_DIGESTS=run.digests python train.py, then sf.compare('run.digests', 'other.digests')"


@attrs.frozen(eq=False)
class RecordedValue:
    """A value of a recorded call, put together from the lines of its ranks.

    Args:
        value: its name in the program.
        op: its op.
        line: of the user's code.
        phase: "forward" or "backward".
        reads: the names of the values that its op reads.
        shape: global.
        dtype: as text.
        length: the number of terms in the sums of its op.
        placements: on the mesh.
        hashes: of the local tensor of each rank.
        norm: of the global tensor; None for a Partial value.
        projection: of the global tensor; None where it does not add up.
    """

    value: str
    op: str
    line: str | None
    phase: str
    reads: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    length: int
    placements: tuple[Any, ...]
    hashes: Mapping[int, str]
    norm: float | None
    projection: float | None


@attrs.frozen(eq=False)
class RecordedCall:
    """A recorded call: the function, its mesh, and each value in order, once."""

    name: str
    axes: MeshAxes
    values: dict[str, RecordedValue]


def read_digests(path: Any) -> list[RecordedCall]:
    """Read the calls of a folder of digests, or of one rank's file.

    Raises:
        ShardError: it does not exist, has no digests, or ranks have recorded different calls.
    """
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("rank*.jsonl"))
    where = f"compare, digests {str(path)!r}"
    if not files:
        got = (
            "the folder does not exist"
            if not Path(path).exists()
            else "the folder has no files rank*.jsonl"
        )
        raise ShardError.of(where, got, fix=FIX, source=call_site())
    by_rank: dict[int, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    for number, file in enumerate(files):
        name = file.stem.removeprefix("rank")
        by_rank[int(name) if name.isdigit() else number] = _calls_of(file, where)
    counts = {len(calls) for calls in by_rank.values()}
    if len(counts) > 1:
        shown = [f"rank {r}: {len(calls)} calls" for r, calls in sorted(by_rank.items())[:8]]
        fix = "use only files of one finished run, in a folder of its own"
        raise ShardError.of(where, "ranks have recorded different calls", *shown, fix=fix)
    rows = zip(*(by_rank[r] for r in sorted(by_rank)), strict=True)
    return [_call(dict(zip(sorted(by_rank), row, strict=True)), where) for row in rows]


def _calls_of(file: Path, where: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    calls: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(text)
            if "call" in row:
                calls.append((row, []))
            else:
                calls[-1][1].append(row)
        except (json.JSONDecodeError, IndexError, TypeError):
            got = f"line {number} of {file.name} is no digest"
            raise ShardError.of(where, got, fix=FIX, source=call_site()) from None
    return calls


def _call(
    ranks: Mapping[int, tuple[dict[str, Any], list[dict[str, Any]]]], where: str
) -> RecordedCall:
    """Put one call together from what its ranks wrote."""
    head = next(iter(ranks.values()))[0]
    heads = {(h["call"], tuple(h["axes"]), tuple(h["sizes"])) for h, _ in ranks.values()}
    if len(heads) > 1:
        got = f"ranks have recorded different calls: {', '.join(sorted({h[0] for h in heads}))}"
        fix = "use only files of one run, in a folder of its own"
        raise ShardError.of(where, got, fix=fix, source=call_site())
    axes = MeshAxes(tuple(head["axes"]), tuple(head["sizes"]))
    coordinates = {r: tuple(h["coordinates"]) for r, (h, _) in ranks.items()}
    by_slot: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, (_, rows) in ranks.items():
        for row in rows:
            by_slot.setdefault(row["slot"], {})[rank] = row
    values: dict[str, RecordedValue] = {}
    places: dict[str, int] = {}
    for slot in sorted(by_slot):
        rows = by_slot[slot]
        one = next(iter(rows.values()))
        if one["value"] not in values:
            values[one["value"]] = _value(rows, coordinates)
            places[one["value"]] = one["place"]
    ordered = sorted(values, key=places.__getitem__)
    return RecordedCall(head["call"], axes, {name: values[name] for name in ordered})


def _value(
    rows: Mapping[int, dict[str, Any]], coordinates: Mapping[int, tuple[int, ...]]
) -> RecordedValue:
    one = next(iter(rows.values()))
    marks = tuple(tuple(m) if isinstance(m, list) else m for m in one["placements"])
    firsts = [
        r
        for r in rows
        if all(m != "R" or not k for m, k in zip(marks, coordinates[r], strict=True))
        and layout.is_here(marks, coordinates[r])
    ]
    adds = all(m == "sum" or m not in REDUCTIONS for m in marks) and not one["of_rank"]
    is_partial = any(m in REDUCTIONS for m in marks) or one["of_rank"]
    squares = sum(rows[r]["norm"] ** 2 for r in firsts)
    return RecordedValue(
        one["value"],
        one["op"],
        one["line"],
        one["phase"],
        tuple(one["reads"]),
        tuple(one["shape"]),
        one["dtype"],
        one["length"],
        marks,
        {r: row["hash"] for r, row in rows.items()},
        None if is_partial else math.sqrt(squares),
        sum(rows[r]["projection"] for r in firsts) if adds else None,
    )
