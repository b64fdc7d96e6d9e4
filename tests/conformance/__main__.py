"""`make conformance`: every operator of torch's database; cut it with --ops and --sample, go on
with --resume.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence

import attrs
from ranks import run_ranks

from conformance import calls, dtypes, report
from conformance.judge import Verdict
from conformance.real import SHARE, checked
from conformance.workers import Found, judged_all

KEPT = pathlib.Path("build/conformance.jsonl")
PAGE = pathlib.Path("docs/logs/conformance.md")
SAMPLE = 10  # one operator in so many is CI's


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, print, write the page.

    Args:
        argv: `--ops NAME...`, `--sample N`, `--calls N`, `--jobs N`, `--dtypes D...`,
            `--resume`; None reads the command line.

    Returns:
        0 if nothing is wrong and nothing crashed, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="make conformance", description="Every operator, sharded in every way."
    )
    parser.add_argument(
        "--ops",
        nargs="+",
        help="only these entries, or all whose name starts so with a * at the end",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=1,
        help="only one operator in so many, chosen by the hash of its name",
    )
    parser.add_argument("--calls", type=int, default=calls.MOST, help="sample calls of an operator")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--gloo",
        type=int,
        metavar="N",
        help=f"run {SHARE:.0%}% of the cases again on N real gloo processes instead",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        help="in these dtypes that an operator takes, or `all`: op by op, compiled and sharded",
    )
    parser.add_argument("--resume", action="store_true", help=f"keep what {KEPT} holds")
    options = parser.parse_args(argv)
    names = [n for n in chosen(options.ops) if in_sample(n, options.sample)]
    if options.gloo:
        return on_gloo(names, options.gloo, options.calls)
    if options.dtypes:
        wanted = dtypes.ALL if options.dtypes == ["all"] else options.dtypes
        return in_dtypes(names, wanted, options.calls)
    KEPT.parent.mkdir(exist_ok=True)
    if not options.resume:
        KEPT.unlink(missing_ok=True)
    done = {f.name: f for f in kept() if f.name in names}
    for found in judged_all([n for n in names if n not in done], options.calls, options.jobs):
        with KEPT.open("a") as out:
            out.write(json.dumps(attrs.asdict(found)) + "\n")
        done[found.name] = found
        print(f"{len(done):>4}/{len(names)}  {report.line(found)}", flush=True)
    rows = [report.row(done[name]) for name in names]
    print(report.totals(rows))
    if options.ops is None and options.sample == 1:
        PAGE.write_text(report.page(rows))
    return int(any(row.verdict in report.BAD for row in rows))


def in_dtypes(names: Sequence[str], wanted: Sequence[str], most: int) -> int:
    """Judge operators in some dtypes, and print what is wrong."""
    bad, count = 0, 0
    for verdict in dtypes.verdicts(names, wanted, most):
        count += 1
        if verdict.what in report.BAD:
            bad += 1
            print(f"{verdict.what}: {verdict.case}\n  {verdict.said[:600]}", flush=True)
    print(f"{count} cases in {' '.join(wanted)}, {bad} wrong or crashed")
    return int(bad > 0)


def on_gloo(names: Sequence[str], n: int, most: int) -> int:
    """Run a part of the cases on real processes."""
    counts, wrongs = zip(*run_ranks(n, checked, names, SHARE, most), strict=True)
    print(
        f"{counts[0]} cases on {n} gloo processes, {sum(map(len, wrongs))} wrong",
        *itertools.chain(*wrongs),
        sep="\n",
    )
    return int(len(set(counts)) > 1 or any(wrongs))


def chosen(wanted: Sequence[str] | None) -> list[str]:
    """The entries asked for, in the order of their names."""
    names = sorted(calls.entries())
    if wanted is None:
        return names
    starts = tuple(w[:-1] for w in wanted if w.endswith("*"))
    return [n for n in names if n in wanted or (starts and n.startswith(starts))]


def in_sample(name: str, one_in: int) -> bool:
    """Whether an operator is among the fixed part that is chosen by the hash of its name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % one_in == 0


def kept() -> list[Found]:
    """What an earlier run found."""
    if not KEPT.exists():
        return []
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()]
    return [
        Found(r["name"], r["seconds"], tuple(Verdict(**v) for v in r["verdicts"])) for r in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
