"""Rank agreement: before a program first runs, all ranks make sure that it is the same one."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ..errors import DivergenceError, problem
from ..partition import Plan
from ..partition.steps import Nested, Redistribute
from ..passes import Agenda


def agree(name: str, plan: Plan, agenda: Agenda) -> None:
    """Compare this rank's plan and order of collectives with the others'.

    Raises:
        DivergenceError: with the first line that differs.
    """
    lines = [*_lines(plan), *str(agenda.plan).splitlines(), f"the order of collectives {agenda.starts}"]
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, lines)
    other = next(r for r, digest in enumerate(digests) if digest != digests[0])
    pairs = itertools.zip_longest(texts[0], texts[other], fillvalue="(nothing)")
    a, b = next((a, b) for a, b in pairs if a != b)
    fix = "make shapes, placements and branches the same on every rank"
    raise DivergenceError(problem(name, "ranks hold different programs", f"rank 0: {a}", f"rank {other}: {b}", fix=fix), fix=fix)


def _lines(plan: Plan) -> list[str]:
    ins = [f"in {tuple(slot.value.shape)} {slot.value.dtype} {slot.marks}" for slot in plan.ins]
    steps = [line for step in plan.steps for line in (_line(step), *_inside(step))]
    return [str(plan.axes), *ins, *steps]


def _inside(step: Any) -> list[str]:
    if not isinstance(step, Nested):
        return []
    loop = step.node.target
    settings = [x for x in attrs.astuple(loop, recurse=False) if isinstance(x, (int, bool))]
    return [f"{loop} of {settings}", *(line for plan in step.plans for line in _lines(plan))]


def _line(step: Any) -> str:
    where = f"%{step.node.name} at {step.node.meta.get('source')}"
    if isinstance(step, Redistribute):
        return f"{where}: {' '.join(m.kind for m in step.moves)} {step.source.marks} -> {step.target.marks}"
    made = " ".join(f"{tuple(s.value.shape)} {s.marks}" for s in step.made)
    constants = [x for x in (*step.node.args, *step.node.kwargs.items()) if not isinstance(x, torch.fx.Node)]
    return f"{where}: {getattr(step.node.target, '__name__', step.node.target)} {constants} -> {made}"
