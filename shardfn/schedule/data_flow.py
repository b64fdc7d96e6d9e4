"""The data flow of a plan's steps, and every collective that they need. Equal on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from ..buckets import BucketOptions
from ..collectives import ALL_GATHER, COLLECTIVES
from ..partition import plan as steps
from ..partition import rules
from ..partition.collective_bytes import nbytes
from ..partition.redistribute import Move
from ..types import MeshAxes
from .bucketing.gradient_terms import Outs, Served
from .bucketing.gradient_terms import served as terms_of


@attrs.frozen(eq=False)
class Transfer:
    """One collective that a step needs, before bucketing."""

    key: Any  # the key that nodes of the local graph carry
    kind: str  # all_reduce, reduce_scatter, all_gather, all_to_all, ...
    axis: str
    op: str | None
    dtype: torch.dtype  # dtype on the wire
    nbytes: int  # bytes of a rank with full shards
    phase: str
    step: int
    options: (
        BucketOptions | None
    )  # the options of the gradient that it reduces, or whose parameter it gathers
    region: str
    coordinate: int | None = None  # of a pipeline's axis, where it is sent; None: everywhere

    @property
    def reduces(self) -> bool:
        """Whether the collective reduces."""
        return COLLECTIVES[self.kind].reduces


@attrs.frozen(eq=False)
class Flow:
    """A plan as a graph of steps: who makes, reads and sends what."""

    plan: steps.Plan
    made_by: dict[int, int]  # slot number -> step; inputs have none
    transfers: dict[int, tuple[Transfer, ...]]  # by step
    readers: dict[int, list[int]]  # step -> steps that read its results
    returned: frozenset[int]  # steps that make a result
    served: Served  # slot -> the gradient that it is a term of
    shown: dict[int, int]  # a step that shows values -> the one before it, which comes first

    def sources(self, step: int) -> list[int]:
        """List the steps that make a step's inputs."""
        read = self.plan.steps[step].read
        found = [self.made_by[s.number] for s in read if s.number in self.made_by]
        return [*found, self.shown[step]] if step in self.shown else found

    def rearranges_input(self, step: int) -> bool:
        """Return whether a step only rearranges an input, such as a transposed parameter."""
        return rules.row_of(self.plan.steps[step].node.target).rearranges and all(
            self.rearranges_input(s) for s in self.sources(step)
        )


def flow(plan: steps.Plan, outs: Outs) -> Flow:
    """Compute the data flow of a plan and all its transfers."""
    served = terms_of(plan, outs)
    made_by = {slot.number: i for i, step in enumerate(plan.steps) for slot in step.made}
    readers: dict[int, list[int]] = {i: [] for i in range(len(plan.steps))}
    for i, step in enumerate(plan.steps):
        for slot in step.read:
            if slot.number in made_by:
                readers[made_by[slot.number]].append(i)
    showing = [i for i, step in enumerate(plan.steps) if steps.shows(step)]
    shown = {after: before for before, after in itertools.pairwise(showing)}
    for after, before in shown.items():
        readers[before].append(after)
    gradients = {**_terms(plan, served), **_reductions(plan, made_by, readers)}
    parameters = _parameters(plan)
    transfers: dict[int, tuple[Transfer, ...]] = {}
    for i, step in enumerate(plan.steps):
        if isinstance(step, steps.SENDING):
            sent = tuple(
                _transfer(plan.axes, i, step, move, gradients, parameters)
                for move in step.moves
                if _is_sent(move, plan.axes)
            )
            if sent:
                transfers[i] = sent
    returned = frozenset(made_by[slot.number] for slot in plan.outs if slot.number in made_by)
    return Flow(plan, made_by, transfers, readers, returned, served, shown)


def _terms(plan: steps.Plan, served: Served) -> dict[int, steps.Gradient]:
    """Map redistributions of a gradient's terms to that gradient."""
    own = set(plan.gradients)
    found = {}
    for i, step in enumerate(plan.steps):
        mine = served.get(step.target.number) if isinstance(step, steps.Redistribute) else None
        if mine and len(mine) == 1 and mine <= own:
            (found[i],) = mine
    return found


def _is_sent(move: Move, axes: MeshAxes) -> bool:
    """Return whether a move communicates on this mesh."""
    return move.sends and axes.sizes[move.axis] > 1


def _reductions(
    plan: steps.Plan, made_by: dict[int, int], readers: dict[int, list[int]]
) -> dict[int, steps.Gradient]:
    """Map the redistributions that reduce a gradient to it, also where a cast follows.

    If the parameter is cast or constrained, its gradient is reduced before the cast or the
    constraint is undone.
    """
    found = {i: g for g in plan.gradients for i in _lineage(plan, made_by, readers, g)}
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
            found[i] = by_node[step.node] if step.node in by_node else leaving[step.target.number]
    return found


def _as_sum(plan: steps.Plan, made_by: dict[int, int], slot: steps.Slot) -> steps.Slot:
    """Return a result before it is rescaled to a Partial mean."""
    step = plan.steps[made_by[slot.number]] if slot.number in made_by else None
    return step.source if isinstance(step, steps.Rescale) else slot


def _lineage(
    plan: steps.Plan,
    made_by: dict[int, int],
    readers: dict[int, list[int]],
    gradient: steps.Gradient,
) -> Iterator[int]:
    """Yield the redistributions on the chain of single-input steps that ends in a gradient."""
    slot = gradient.slot.number
    last = None
    while slot in made_by:
        i = made_by[slot]
        step = plan.steps[i]
        if last is not None and readers[i] != [last]:
            return
        if isinstance(step, steps.Redistribute):
            yield i
        if len(step.read) != 1:
            return
        slot = step.read[0].number
        last = i


def _parameters(plan: steps.Plan) -> dict[int, steps.Gradient]:
    """Map the slots of parameters, and their rearrangements, to their gradients."""
    found = {g.like.number: g for g in plan.gradients if g.like is not None}
    for step in plan.steps:
        if (
            isinstance(step, steps.Apply)
            and rules.row_of(step.node.target).rearranges
            and step.ins
            and step.ins[0].number in found
        ):
            found.update((slot.number, found[step.ins[0].number]) for slot in step.outs)
    return found


def _transfer(
    axes: MeshAxes,
    i: int,
    step: steps.Sending,
    move: Move,
    gradients: dict[int, steps.Gradient],
    parameters: dict[int, steps.Gradient],
) -> Transfer:
    """Describe the collective of one move."""
    row = move.collective
    kind = row.name
    reduces = row.reduces
    # a reduction belongs to its gradient, a gather to its parameter; other transfers move
    # activations
    served = (
        gradients.get(i)
        if reduces
        else parameters.get(step.source.number)
        if kind == ALL_GATHER
        else None
    )
    dtype = step.source.value.dtype
    if served is not None and reduces and served.options.reduce_dtype is not None:
        dtype = getattr(torch, served.options.reduce_dtype)
    return Transfer(
        key=steps.transfer_key(step, move),
        kind=kind,
        axis=axes.names[move.axis],
        op=str(move.before[move.axis]) if reduces else None,
        dtype=dtype,
        nbytes=nbytes(step.source.value.shape, dtype.itemsize, move, axes),
        phase="backward"
        if reduces and served is not None
        else step.node.meta.get("phase", "forward"),
        step=i,
        options=None if served is None else served.options,
        region="" if served is None else served.region,
        coordinate=step.coordinate,
    )
