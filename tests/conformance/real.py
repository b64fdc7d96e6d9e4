"""A part of the cases again on real gloo processes: each rank's results are compared with its
pieces of the true ones.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence

import pieces
import torch
import torch.distributed as dist

from conformance import calls, judge
from conformance.judge import Ready
from shardfn import _compat
from shardfn.errors import ShardError
from shardfn.partition import emit, layout, propagate
from shardfn.schedule import plan_schedule, schedule
from shardfn.types import MeshPlacements

SHARE = 0.03


def is_chosen(text: str, share: float) -> bool:
    """Whether a case is in the part that is run, which is the same in every run."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10_000 < 10_000 * share


def cases(
    names: Sequence[str], n: int, share: float, most: int
) -> Iterator[tuple[str, Ready, list[MeshPlacements]]]:
    """The chosen cases of some operators on n ranks; only those are captured of which one is."""
    known = calls.entries()
    for name in names:
        for call in calls.calls(name, known[name], most):
            for what, truth in (("value", judge.value), ("gradient", judge.gradient)):
                if not is_chosen(
                    f"{call} {what} {n}", 4 * share
                ):  # a quarter of the cases of four times as many calls
                    continue
                try:
                    if (true := truth(call)) is None:
                        continue
                    ready = Ready(
                        call, what, judge.captured(true.fn, call, *true.args), true.ins, true.wanted
                    )
                except Exception:  # torch cannot, or it is refused: `judge` counts those
                    continue
                for marks in judge.placements(ready, (n,)):
                    if is_chosen(f"{call} {what} {marks}", 0.25):
                        yield f"{call}, {what} on ({n},): {marks}", ready, marks


def checked(
    names: Sequence[str], share: float = SHARE, most: int = calls.MOST
) -> tuple[int, list[str]]:
    """(how many cases this rank ran, what was wrong), called on every rank of a gloo world."""
    n, rank = dist.get_world_size(), dist.get_rank()
    _compat.register_group("conformance", dist.group.WORLD)
    count, wrong = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, ready, marks in cases(names, n, share, most):
            try:
                found = ran(ready, marks, n, rank)
            except ShardError:  # random numbers, on every rank alike
                continue
            except RuntimeError as error:
                found = [judge.said(error)]
            count += 1
            wrong += [f"{case}: {what}" for what in found]
    return count, wrong


def ran(ready: Ready, marks: list[MeshPlacements], n: int, rank: int) -> list[str]:
    """Run one case with everybody else; what is wrong with this rank's results."""
    xs = (*ready.ins, *ready.captured.closed_over)
    program, axes = ready.captured.program, pieces.mesh_axes((n,))
    outs = marks[len(xs) :] or [None] * len(ready.wanted)
    placed = [layout.canonical(x.shape, m, (n,)) for x, m in zip(xs, marks, strict=False)]
    chosen = propagate(program, axes, placed, outs)
    graph = schedule(emit(chosen, (rank,), ("conformance",), "cpu"), plan_schedule(chosen, "case"))[
        -1
    ]
    mine = [
        pieces.cut(x, m, (n,), seed, exact=True)[rank]
        for seed, (x, m) in enumerate(zip(xs, placed, strict=True))
    ]
    with torch.no_grad():
        got = torch.fx.GraphModule(torch.nn.Module(), graph)(torch.tensor(rank), *mine)
    wrong = []
    for k, (x, whole, slot) in enumerate(zip(got, ready.wanted, chosen.outs, strict=True)):
        try:
            judge.compared_piece(ready, x, whole, slot.placements, n, rank)
        except AssertionError as error:
            wrong.append(f"result {k} of rank {rank}: {error}"[:400])
    return wrong
