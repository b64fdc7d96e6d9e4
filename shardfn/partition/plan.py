"""The plan of a partition: what happens on every rank, before any local size is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ..buckets import BucketOptions
from ..ops import debug
from ..types import AtStage, MeshAxes, MeshPlacements
from .redistribute import Move


@attrs.frozen(eq=False)
class Slot:
    """A value at one placement: the unit that steps read and make."""

    number: int
    value: torch.Tensor  # fake, global
    placements: MeshPlacements


@attrs.frozen(eq=False)
class _Step:
    """A step of a plan. One with a coordinate runs only there, on the axis of a pipeline."""

    coordinate: int | None = attrs.field(default=None, kw_only=True)


@attrs.frozen(eq=False)
class _Change(_Step):
    """A step that makes one slot of another."""

    node: torch.fx.Node
    source: Slot
    target: Slot

    @property
    def read(self) -> tuple[Slot, ...]:
        """The slots that the step reads."""
        return (self.source,)

    @property
    def made(self) -> tuple[Slot, ...]:
        """The slots that the step makes."""
        return (self.target,)


@attrs.frozen(eq=False)
class Redistribute(_Change):
    """A step that moves a slot to another placement, by one or more collectives and slices."""

    moves: tuple[Move, ...]
    implicit: bool


@attrs.frozen(eq=False)
class Relabel(_Change):
    """A step that gives a local tensor another global shape and placement, at no cost."""


@attrs.frozen(eq=False)
class OnStage(Relabel):
    """A step that puts a value on a stage of a pipeline, as a constraint of the user asks."""

    home: AtStage = attrs.field(kw_only=True)


@attrs.frozen(eq=False)
class FromStage(Relabel):
    """A step that makes a value of one coordinate a term of a sum over the axis of a pipeline; the
    terms of other coordinates are zero.
    """

    home: int = attrs.field(kw_only=True)  # the coordinate that has the value


@attrs.frozen(eq=False)
class Rescale(_Change):
    """A step that turns a Partial mean into a sum, or back, by a local multiplication."""


@attrs.frozen(eq=False)
class _Call(_Step):
    """A step that runs a node of the global graph."""

    node: torch.fx.Node
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]  # one for each tensor that the op returns

    @property
    def read(self) -> tuple[Slot, ...]:
        """The slots that the step reads."""
        return self.ins

    @property
    def made(self) -> tuple[Slot, ...]:
        """The slots that the step makes."""
        return self.outs


@attrs.frozen(eq=False)
class Apply(_Call):
    """A step that runs an op on local tensors."""

    # how a rank runs it, if that is not by the op's rule
    local: Callable[..., Any] | None = None
    # whether a rank with empty shards runs it, too
    run_empty: bool = False


@attrs.frozen(eq=False)
class Exchange(Apply):
    """A step that runs a collective of several tensors, of which it sends the first. Its local
    function emits the collective once, with its wait; on an axis of one rank it emits none.
    """

    move: Move = attrs.field(kw_only=True)  # of the first tensor to the first result
    implicit: bool = attrs.field(default=False, kw_only=True)

    @property
    def source(self) -> Slot:
        """The slot that it sends."""
        return self.ins[0]

    @property
    def target(self) -> Slot:
        """The slot that it makes."""
        return self.outs[0]

    @property
    def moves(self) -> tuple[Move, ...]:
        """The one collective."""
        return (self.move,)


@attrs.frozen(eq=False)
class Nested(_Call):
    """A step that runs a loop or a branch, whose bodies have plans of their own."""

    plans: tuple[Plan, ...]

    @property
    def bodies(self) -> tuple[Plan, ...]:
        """The plans of the graphs of the loop."""
        return self.plans


@attrs.frozen(eq=False)
class Pipelined(Nested):
    """A step that runs a pipeline. Its plans are those of the actions of all stages."""

    # how a coordinate runs them (stages/actions.py)
    actions: Any = attrs.field(kw_only=True, repr=False)

    @property
    def bodies(self) -> tuple[Plan, ...]:
        """The plan of one microbatch, of which its plans are parts."""
        return (self.actions.body.plan,)


@attrs.frozen(eq=False)
class Fill(_Step):
    """A step that makes a rank's shard of a constant tensor."""

    node: torch.fx.Node
    out: Slot
    value: Any

    @property
    def read(self) -> tuple[Slot, ...]:
        """The slots that the step reads: none."""
        return ()

    @property
    def made(self) -> tuple[Slot, ...]:
        """The slots that the step makes."""
        return (self.out,)


Step = Redistribute | Apply | Nested | Fill | Relabel | Rescale
Sending = Redistribute | Exchange
SENDING = (Redistribute, Exchange)


def holders(graph: torch.fx.Graph, ins: Iterable[Slot]) -> list[torch.fx.Node]:
    """Add a placeholder to a graph for each input of a step that is no op of the program."""
    found = []
    for slot in ins:
        found.append(graph.placeholder("x"))
        found[-1].meta["val"] = slot.value
    return found


def part_of(
    node: torch.fx.Node,
    graph: torch.fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    outs: Sequence[torch.Tensor],
) -> torch.fx.Node:
    """Make the node of a step that is a part of an op of the program, with the op's metadata.

    Args:
        node: the op.
        graph: of the parts.
        target: what the part computes.
        args: its arguments.
        outs: the values of its results.
    """
    part = graph.call_function(target, args)
    keys = "source", "module", "phase", "custom"
    part.meta.update({k: node.meta[k] for k in keys if k in node.meta})
    part.meta["val"] = outs[0] if len(outs) == 1 else tuple(outs)
    return part


def transfer_key(step: Sending, move: Move) -> tuple[Any, ...]:
    """Return the key of a move, equal on all ranks and for equal moves."""
    phase = step.node.meta.get("phase", "forward")
    key = (step.source.number, move.before, move.after, move.perm, phase)
    return (*key, step.target.number) if isinstance(step, Exchange) else key


@attrs.frozen(eq=False)
class Gradient:
    """A gradient that `bucketed_grad` redistributes to its parameter's placement."""

    node: torch.fx.Node  # the global node that does
    options: BucketOptions
    region: str  # the same for all gradients of one call
    like: Slot | None  # the parameter, where it is an input
    slot: Slot  # the result
    unused: bool  # whether the loss does not depend on the parameter


@attrs.frozen(eq=False)
class Plan:
    """All steps of a partitioned program in order, equal on all ranks."""

    axes: MeshAxes
    steps: tuple[Step, ...]
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]
    gradients: tuple[Gradient, ...] = ()
    unreduced: tuple[
        tuple[Slot, torch.fx.Node], ...
    ] = ()  # outs that are gradients which somebody else is to reduce
    # of a function with its gradients: the cotangents of its results, by their number
    cotangents: tuple[tuple[int, Slot], ...] = ()
    # the mesh axis of a pipeline's stages, for a plan of which coordinates run parts
    stage_axis: int | None = None
    # the placements that a plan of all ops has (propagation/values.py)
    advice: Any = attrs.field(default=None, repr=False)


def moves(chosen: Plan) -> Iterator[tuple[Sending, Move]]:
    """Yield the moves of a plan, each that becomes a collective once; those of loops are left
    out.
    """
    seen = set()
    for step in chosen.steps:
        if not isinstance(step, SENDING):
            continue
        for move in step.moves:
            key = transfer_key(step, move)
            if key not in seen:
                seen.add(key)
                yield step, move


def on_one_rank(chosen: Plan) -> Iterator[str]:
    """Yield the names of nodes whose collectives send nothing, since their axis has one rank."""
    sizes = chosen.axes.sizes
    for step, move in moves(chosen):
        if move.sends and sizes[move.axis] == 1:
            yield step.node.name
    for step in chosen.steps:
        plans = step.plans if isinstance(step, Nested) else ()
        for inner in plans:
            yield from on_one_rank(inner)


def shows(step: Step) -> bool:
    """Return whether a step prints or calls back, itself or in a loop."""
    return isinstance(step, (Apply, Nested)) and debug.has_effect(step.node)


def has_effect(step: Step) -> bool:
    """Return whether a step must run though nothing reads it: it checks or shows values."""
    return not step.made or shows(step)


def needed(planned: list[Step], outs: tuple[Slot, ...]) -> tuple[Step, ...]:
    """Keep the steps that results depend on, or that check values; the same on every rank."""
    live = {slot.number for slot in outs}
    kept = []
    for step in reversed(planned):
        if has_effect(step) or any(slot.number in live for slot in step.made):
            kept.append(step)
            live.update(slot.number for slot in step.read)
    return tuple(reversed(kept))
