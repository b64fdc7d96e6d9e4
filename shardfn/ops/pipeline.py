"""One coordinate's part of a pipeline, as an op of a graph: the graphs of its stages, and the order
in which it runs them, sends and receives.

A schedule says which actions a coordinate runs. `partition/stages` adds the messages, and says of
each value when it is no longer needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import attrs
import torch

from ..collectives import SEND
from ..types import Aval, Collective
from .loops import Driver, Loop, drive_loop
from .messages import Exchange, Message, Receive, Ref, Send, empty, shown


@attrs.frozen
class Run:
    """An instruction to run an action: a graph on values of one microbatch.

    Args:
        graph: the number of the graph.
        kind: F, B, W or BW.
        stage: the stage.
        microbatch: the microbatch.
        reads: the inputs of the graph.
        makes: its results.
    """

    graph: int
    kind: str
    stage: int
    microbatch: int
    reads: tuple[Ref, ...] = ()
    makes: tuple[Ref, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


@attrs.frozen
class Zero:
    """An instruction to begin a sum."""

    total: Ref
    aval: Aval


@attrs.frozen
class Add:
    """An instruction to add a value to a sum."""

    total: Ref
    term: Ref


@attrs.frozen
class Free:
    """An instruction to forget values that nothing reads any more."""

    values: tuple[Ref, ...]


Instruction = Send | Receive | Run | Zero | Add | Free


@attrs.frozen(eq=False, repr=False)
class Pipeline(Loop):
    """The actions of one coordinate of a pipeline, with its messages.

    The arguments are constants, then microbatches that are stacked along a new first dim. A ref
    `("in", i)` or `("row", i, k)` counts all of them.

    Args:
        length: the number of microbatches.
        instructions: what the coordinate does, in order.
        results: the values that it returns: sums, an argument of all microbatches, or a value of
            each microbatch, to be stacked.
        coordinates: how many arguments are coordinates, which every graph takes first.
    """

    length: int
    instructions: tuple[Instruction, ...]
    results: tuple[Ref, ...]
    coordinates: int = 0

    def drive(self, tensors: Sequence[torch.Tensor]) -> Driver:
        first = list(tensors[: self.coordinates])
        inputs = tensors[self.coordinates :]
        values: dict[Ref, torch.Tensor] = {}

        def look(ref: Ref) -> torch.Tensor:
            if ref in values:
                return values[ref]
            kind, i, *microbatch = ref
            return inputs[i][microbatch[0]] if kind == "row" else inputs[i]

        for step in self.instructions:
            if isinstance(step, Run):
                outs = yield step.graph, [*first, *map(look, step.reads)]
                values.update(zip(step.makes, outs, strict=True))
                del outs
            elif isinstance(step, Send):
                yield step, [look(step.message.value)]
            elif isinstance(step, Receive):
                (values[step.message.value],) = yield step, []
            elif isinstance(step, Zero):
                values[step.total] = empty(step.aval).zero_()
            elif isinstance(step, Add):
                values[step.total] = values[step.total] + values[step.term]
            else:
                for ref in step.values:
                    values.pop(ref, None)
        return [self._result(ref, look) for ref in self.results]

    def runs(self) -> Iterator[torch.fx.Graph]:
        yield from (x for x in self.runs_and_messages() if isinstance(x, torch.fx.Graph))

    def runs_and_messages(self) -> Iterator[Any]:
        records: dict[str, Collective] = {}  # equal messages share a record
        for x in self.instructions:
            if isinstance(x, Run):
                yield self.graphs[x.graph]
            elif isinstance(x, Send):
                about = f"{x.message.about} {x.message.source} {x.message.target}"
                yield records.setdefault(about, _record(x))

    def exchange(self) -> Exchange:
        receives = [x for x in self.instructions if isinstance(x, Receive)]
        return Exchange(receives)

    def _result(self, ref: Ref, look: Any) -> torch.Tensor:
        kind, number = ref
        if kind == "in":  # no result shares memory with an argument
            return look(ref).clone()
        if kind != "stack":
            return look(ref)
        return torch.stack([look(("value", number, k)) for k in range(self.length)])

    def sums_of(self, graph: int) -> dict[int, int]:
        """Return the results of a graph that are sums, each with the input that it was before:
        their memory is used again.
        """
        run = next(x for x in self.actions() if x.graph == graph)
        made = {ref: i for i, ref in enumerate(run.makes) if ref[0] == "sum"}
        return {made[ref]: self.coordinates + run.reads.index(ref) for ref in made}

    @property
    def titles(self) -> tuple[str, ...]:
        """What each graph computes."""
        found = {x.graph: f"{x.kind} of stage {x.stage}" for x in self.actions()}
        return tuple(found[i] for i in range(len(self.graphs)))

    def sends(self) -> list[Send]:
        """Return what the coordinate sends, in order."""
        return [x for x in self.instructions if isinstance(x, Send)]

    def doing(self, step: Instruction) -> str | None:
        """Describe an instruction at which a rank may stand: an action, or a message."""
        if isinstance(step, Run):
            return str(step)
        if isinstance(step, Send):
            return f"sending {shown(step.message)}"
        if not isinstance(step, Receive):
            return None
        after = self.instructions[self.instructions.index(step) :]
        reader = next((f"{x}, " for x in after if isinstance(x, Run)), "")
        return f"{reader}waiting for {shown(step.message)}"

    def actions(self) -> list[Run]:
        """Return what the coordinate runs, in order."""
        return [x for x in self.instructions if isinstance(x, Run)]

    @property
    def messages(self) -> list[Message]:
        """What the coordinate sends, in order."""
        return [x.message for x in self.sends()]


def doing(frames: Iterable[FrameType]) -> str | None:
    """Describe the instruction of the pipeline that runs in some frames; None without one.

    Args:
        frames: of a thread, or of a traceback.
    """
    for frame in frames:
        if frame.f_code is drive_loop.__code__:
            driver = frame.f_locals["driver"].gi_frame  # None once it has returned
            if driver is not None and driver.f_code is Pipeline.drive.__code__:
                known = driver.f_locals
                return known["self"].doing(known["step"]) if "step" in known else None
    return None


def _record(send: Send) -> Collective:
    """The record of a message among the collectives of a program."""
    x = send.message
    name = f"{x.about} to coordinate {x.target}"
    return Collective(SEND, send.axis, x.aval.nbytes, None, name, implicit=False, **x.origin)
