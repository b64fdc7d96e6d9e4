"""Training steps of the Llama example on two ranks next to DDP and FSDP2: time and peak memory.
`make bench-train`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.training import rivals
from shardfn_demo.runs import LOOPBACK

ROUNDS, STEPS = 15, 2  # STEPS of each rival in a round
CHECKED = 3  # steps before the parameters are compared
CLOSE = 1e-3  # of how far all parameters have come since the start, in norm
SAME_LOSS = 1e-4
MEASURED = 3  # steps whose memory is measured
WHOLE = 1.00  # the target: of the best step
MEMORY = {"DDP": 1.00, "FSDP2": 1.10}  # the targets: of its peak
# Every tensor of a page or more has pages of its own, which are returned when it is freed.
PAGED = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
MB = 1e6


@attrs.frozen(kw_only=True)
class Row:
    """The figures of a rival.

    Args:
        ms: the median of a step, whose slower rank counts.
        held: bytes of a rank between steps.
        growth: bytes that a step adds at its peak.
        planned: the peak in bytes that the lowered program states.
    """

    ms: float
    held: int
    growth: int
    planned: int | None = None

    @property
    def peak(self) -> int:
        """The peak of a rank in bytes."""
        return self.held + self.growth


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, and what it leaves to the example."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.steps")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    backends = ("inductor", "aten")
    parser.add_argument("--backend", choices=backends, default="inductor")
    parser.add_argument("--only", nargs="*", help="rivals, such as zero3")
    known = parser.parse_args(given)
    known.dtype = "float32"
    return known


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at its peak."""
    text = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found is not None, f"no {field} in /proc/self/status"
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Let VmHWM start anew from what is in memory now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def growth(step: Any) -> int:
    """Bytes that a call adds to the memory of this process at its peak.

    It needs `PAGED` in the environment of the process, so that freed tensors leave.
    """
    gc.collect()
    reset_peak()
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def timed(known: Mapping[str, rivals.Rival], rounds: int) -> dict[str, float]:
    """Median milliseconds of a step of each, all in turn; the slower rank counts."""
    names = list(known)
    mine: dict[str, list[float]] = {name: [] for name in names}
    compiled = rivals.compilations()
    for turn in range(rounds):
        first = turn % len(names)
        for name in itertools.chain(names[first:], names[:first]):
            known[name].step()  # its caches are warm
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                known[name].step()
                mine[name].append((time.perf_counter() - start) * 1e3)
    assert rivals.compilations() == compiled, "a compilation while the clock ran"
    ranks: list[Any] = [None] * rivals.RANKS
    dist.all_gather_object(ranks, mine)
    return {name: slower_median([r[name] for r in ranks]) for name in names}


def slower_median(ranks: Sequence[Sequence[float]]) -> float:
    """The median of steps that take as long as their slower rank."""
    return statistics.median(map(max, zip(*ranks, strict=True)))


def ready(args: argparse.Namespace, rank: int) -> dict[str, rivals.Rival]:
    """The rivals, each compiled, and found to compute the same.

    Raises:
        RuntimeError: one was not captured, or computes something else than DDP.
    """
    known: dict[str, rivals.Rival] = {}
    losses: dict[str, list[float]] = {}
    start = dict(rivals.example().model(args).named_parameters())
    for name, rival in rivals.field(args, rank, args.only):
        before = rivals.compilations()
        losses[name] = [rivals.mean_loss(rival.step()) for _ in range(CHECKED)]
        captured = rivals.compilations() > before
        if captured == name.endswith("eager"):
            raise RuntimeError(f"{name}: captured a graph: {captured}")
        known[name] = rival
    wanted = known[rivals.DDP].params()
    for name, rival in known.items():
        off = distance(rival.params(), wanted, start)
        far = max(abs(x - y) for x, y in zip(losses[name], losses[rivals.DDP], strict=True))
        if not (off < CLOSE and far < SAME_LOSS):
            raise RuntimeError(f"{name}: parameters {off:.1e}, losses {far:.1e} off")
        if rank == 0:
            print(f"{name:16} parameters {off:.1e}, losses {far:.1e} off", flush=True)
    return known


def distance(
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
) -> float:
    """How far parameters are from the wanted ones, as a share of how far these have come."""
    norm = lambda xs, ys: sum(
        (xs[name].detach() - ys[name].detach()).double().square().sum() for name in wanted
    )
    return (norm(found, wanted) / norm(wanted, start)).sqrt().item()


def _rank(rank: int, store: str, args: argparse.Namespace, kind: str, result: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=rivals.RANKS)
    known = ready(args, rank)
    found: Any
    if kind == "time":
        found = timed(known, args.rounds)
    else:
        found = {name: _memory(rival) for name, rival in known.items()}
    if rank == 0:
        pathlib.Path(result).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # Gloo's threads may outlive the group (torch 2.13)


def _memory(rival: rivals.Rival) -> tuple[int, int, int | None]:
    rival.step()
    grown = [growth(rival.step) for _ in range(MEASURED)]
    return rival.held(), int(statistics.median(grown)), rival.planned


def on_ranks(args: argparse.Namespace, kind: str) -> Any:
    """What rank 0 measured: kind is time or memory."""
    changed = PAGED if kind == "memory" else {}
    os.environ.update(changed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = (pathlib.Path(folder) / "store").as_uri()
            result = pathlib.Path(folder) / "result.json"
            mp.spawn(_rank, (store, args, kind, str(result)), rivals.RANKS)
            return json.loads(result.read_text())
    finally:
        for name in changed:
            os.environ.pop(name)


def table(rows: Mapping[str, Row]) -> str:
    """A line of markdown for each rival."""
    lines = [
        "| | ms a step | held MB | peak MB | peak stated by `lower` |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        stated = "" if row.planned is None else f"{row.planned / MB:.1f}"
        figures = f"{row.ms:.1f} | {row.held / MB:.1f} | {row.peak / MB:.1f}"
        lines.append(f"| {name} | {figures} | {stated} |")
    return "\n".join(lines)


def verdicts(rows: Mapping[str, Row]) -> list[tuple[bool, str]]:
    """The targets, and whether they are met: each strategy next to its own kind and to the best."""
    others = [name for name in rows if name not in rivals.OURS]
    best = min(others, key=lambda name: rows[name].ms)
    found = []
    for name in (name for name in rows if name in rivals.OURS):
        kind = "FSDP2" if name == "zero3" else "DDP"
        like = [other for other in others if other.startswith(kind)]
        rival = min(like, key=lambda other: rows[other].ms)
        least = min(like, key=lambda other: rows[other].peak)
        shares = [
            (rows[name].ms / rows[rival].ms, WHOLE, f"of a step of {rival}"),
            (rows[name].peak / rows[least].peak, MEMORY[kind], f"of the peak of {least}"),
        ]
        for share, most, what in shares:
            said = "Met" if share <= most else "Missed"
            text = f"{said}: {name} takes {share:.2f} {what}; the target is {most:.2f}."
            found.append((share <= most, text))
    ours = min((name for name in rows if name in rivals.OURS), key=lambda n: rows[n].ms)
    share = rows[ours].ms / rows[best].ms
    said = "Met" if share <= WHOLE else "Missed"
    text = f"{said}: {ours} takes {share:.2f} of the best step, {best}."
    return [*found, (share <= WHOLE, text)]


def main(given: Sequence[str] | None = None) -> int:
    """Time, measure, print tables and verdicts.

    Returns:
        0 if every target is met, 1 if not.
    """
    args = arguments(given)
    times = on_ranks(args, "time")
    memory = on_ranks(args, "memory")
    rows = {
        name: Row(ms=ms, held=held, growth=grown, planned=planned)
        for name, ms in times.items()
        for held, grown, planned in [memory[name]]
    }
    found = verdicts(rows)
    print(table(rows), *(text for _, text in found), sep="\n")
    print(f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.")
    return 0 if all(is_met for is_met, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
