"""What a plan's steps read and make, and every collective that they ask for; all of it the same
on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from ..buckets import Wish
from ..partition import layout
from ..partition import plan as steps
from ..partition.emission.emit import transfer_key
from ..partition.redistribute import Move
from ..partition.rules import REARRANGES
from ..types import MeshAxes
from .bucketing.gradient_terms import Outs, Served
from .bucketing.gradient_terms import served as terms_of


@attrs.frozen(eq=False)
class Transfer:
    """One collective that a step asks for, before it is joined with others."""

    key: Any  # as the nodes of the local graph carry it
    kind: (
        str  # all_reduce, reduce_scatter, all_gather, all_to_all, halo or ppermute
    )
    axis: str
    op: str | None
    dtype: torch.dtype  # as it is sent
    nbytes: int  # of a rank with full shards
    phase: str
    step: int
    wish: (
        Wish | None
    )  # of the gradient that it reduces, or whose parameter it gathers
    region: str

    @property
    def reduces(self) -> bool:
        return self.kind in ("all_reduce", "reduce_scatter")


@attrs.frozen(eq=False)
class Flow:
    """A plan as a graph of steps, by their index."""

    plan: steps.Plan
    made_by: dict[int, int]  # slot number -> step; inputs are made by none
    transfers: dict[int, tuple[Transfer, ...]]  # of each step that sends
    readers: dict[int, list[int]]  # step -> steps that read what it makes
    returned: frozenset[int]  # steps that make a result
    served: Served  # the gradients that values are terms of

    def sources(self, step: int) -> list[int]:
        """The steps that make what a step reads."""
        return [
            self.made_by[s.number]
            for s in self.plan.steps[step].read
            if s.number in self.made_by
        ]

    def rearranges_input(self, step: int) -> bool:
        """Whether a step only turns an input around, as a parameter that is gathered transposed."""
        return self.plan.steps[step].node.target in REARRANGES and all(
            self.rearranges_input(s) for s in self.sources(step)
        )


KINDS = {
    "reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "gather": "all_gather",
    "all_to_all": "all_to_all",
    "halo": "halo",
    "ppermute": "ppermute",
}


def flow(plan: steps.Plan, outs: Outs) -> Flow:
    """Read a plan, whose results are terms of these gradients."""
    served = terms_of(plan, outs)
    made_by = {
        slot.number: i for i, step in enumerate(plan.steps) for slot in step.made
    }
    readers: dict[int, list[int]] = {i: [] for i in range(len(plan.steps))}
    for i, step in enumerate(plan.steps):
        for slot in step.read:
            if slot.number in made_by:
                readers[made_by[slot.number]].append(i)
    gradients = {**_terms(plan, served), **_reductions(plan, made_by, readers)}
    parameters = _parameters(plan)
    transfers: dict[int, tuple[Transfer, ...]] = {}
    for i, step in enumerate(plan.steps):
        if isinstance(step, steps.Redistribute):
            sent = tuple(
                _transfer(plan.axes, i, step, move, gradients, parameters)
                for move in step.moves
                if _is_sent(move, plan.axes)
            )
            if sent:
                transfers[i] = sent
    returned = frozenset(
        made_by[slot.number] for slot in plan.outs if slot.number in made_by
    )
    return Flow(plan, made_by, transfers, readers, returned, served)


def _terms(plan: steps.Plan, served: Served) -> dict[int, steps.Gradient]:
    """The steps that redistribute a term of one gradient of this plan."""
    own, found = set(plan.gradients), {}
    for i, step in enumerate(plan.steps):
        mine = (
            served.get(step.target.number)
            if isinstance(step, steps.Redistribute)
            else None
        )
        if mine and len(mine) == 1 and mine <= own:
            (found[i],) = mine
    return found


def _is_sent(move: Move, axes: MeshAxes) -> bool:
    return move.kind in KINDS and axes.sizes[move.axis] > 1


def _reductions(
    plan: steps.Plan, made_by: dict[int, int], readers: dict[int, list[int]]
) -> dict[int, steps.Gradient]:
    """The steps that bring gradients to their placement: on behalf of the gradient itself, or
    of what only it is made from.

    A cast of the parameter, or a constraint on it, has its gradient reduced before the cast or
    the constraint is undone.
    """
    found = {
        i: g for g in plan.gradients for i in _lineage(plan, made_by, readers, g)
    }
    by_node = {g.node: g for g in plan.gradients}
    leaving = {
        _as_sum(plan, made_by, slot).number: by_node[node]
        for slot, node in plan.unreduced
        if node in by_node
    }
    for i, step in enumerate(plan.steps):
        if isinstance(step, steps.Redistribute) and (
            step.node in by_node or step.target.number in leaving
        ):
            found[i] = (
                by_node[step.node]
                if step.node in by_node
                else leaving[step.target.number]
            )
    return found


def _as_sum(
    plan: steps.Plan, made_by: dict[int, int], slot: steps.Slot
) -> steps.Slot:
    """A result before it is called a mean."""
    step = plan.steps[made_by[slot.number]] if slot.number in made_by else None
    return step.source if isinstance(step, steps.Rescale) else slot


def _lineage(
    plan: steps.Plan,
    made_by: dict[int, int],
    readers: dict[int, list[int]],
    gradient: steps.Gradient,
) -> Iterator[int]:
    """The redistributions on the way to a gradient, as long as each value on it is made from
    one other alone.
    """
    slot, last = gradient.slot.number, None
    while slot in made_by:
        i = made_by[slot]
        step = plan.steps[i]
        if last is not None and readers[i] != [last]:
            return
        if isinstance(step, steps.Redistribute):
            yield i
        if len(step.read) != 1:
            return
        slot, last = step.read[0].number, i


def _parameters(plan: steps.Plan) -> dict[int, steps.Gradient]:
    """The slots that hold a parameter of bucketed_grad, or a rearrangement of one."""
    found = {g.like.number: g for g in plan.gradients if g.like is not None}
    for step in plan.steps:
        if (
            isinstance(step, steps.Apply)
            and step.node.target in REARRANGES
            and step.ins
            and step.ins[0].number in found
        ):
            found.update(
                (slot.number, found[step.ins[0].number]) for slot in step.outs
            )
    return found


def _transfer(
    axes: MeshAxes,
    i: int,
    step: steps.Redistribute,
    move: Move,
    gradients: dict[int, steps.Gradient],
    parameters: dict[int, steps.Gradient],
) -> Transfer:
    kind = KINDS[move.kind]
    reduces = kind in ("all_reduce", "reduce_scatter")
    # a reduction serves its gradient, a gather its parameter; anything else is somebody's
    # activations
    served = (
        gradients.get(i)
        if reduces
        else parameters.get(step.source.number)
        if kind == "all_gather"
        else None
    )
    dtype = step.source.value.dtype
    if served is not None and reduces and served.wish.reduce_dtype is not None:
        dtype = getattr(torch, served.wish.reduce_dtype)
    return Transfer(
        key=transfer_key(step, move),
        kind=kind,
        axis=axes.names[move.axis],
        op=str(move.before[move.axis]) if reduces else None,
        dtype=dtype,
        nbytes=_elements(axes, step.source.value.shape, move) * dtype.itemsize,
        phase="backward"
        if reduces and served is not None
        else step.node.meta.get("phase", "forward"),
        step=i,
        wish=None if served is None else served.wish,
        region="" if served is None else served.region,
    )


def _elements(axes: MeshAxes, shape: Sequence[int], move: Move) -> int:
    """How many elements the whole payload has on a rank with full shards, padding included."""
    local = list(
        layout.local_shape(
            tuple(shape), move.before, axes.sizes, (0,) * len(axes.sizes)
        )
    )
    mark = (
        move.after[move.axis]
        if move.kind in ("reduce_scatter", "all_to_all")
        else move.before[move.axis]
    )
    if move.kind in ("gather", "reduce_scatter"):
        dim, unit = layout.cut_of(mark)
        outer = tuple(
            m if k < move.axis else "R" for k, m in enumerate(move.before)
        )
        size = layout.local_shape(
            tuple(shape), outer, axes.sizes, (0,) * len(axes.sizes)
        )[dim]
        local[dim] = (
            layout.full_chunk(size, unit, axes.sizes[move.axis])
            * axes.sizes[move.axis]
        )
    if move.kind == "all_to_all":
        dim, unit = layout.cut_of(mark)
        n = axes.sizes[move.axis]
        local[dim] = layout.full_chunk(local[dim], unit, n) * n
    if move.kind == "halo":
        local[layout.cut_of(mark)[0]] = sum(layout.halo(move.after[move.axis]))
    count = 1
    for n in local:
        count *= n
    return count
