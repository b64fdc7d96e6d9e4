"""The second half of a call that autograd follows: from cotangents of the results to gradients.

The first half returns the results and the values that it saves. Autograd keeps these, as those of
its own ops: it counts writes to them, frees them, and calls hooks on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from ..capture import Captured
from ..compile import Runner
from ..mesh import all_coordinates
from ..partition.halves import INPUT, SAVED, Halves
from ..partition.plan import Slot
from ..placements import torch_placements
from ..simulated import SimulatedTensor, UnreadTensor, dtensors, shown
from ..types import LocalProgram
from .arguments import Placed, spec_of
from .layouts import Reader, laid_out, local_of_rank, readers
from .options import Request
from .simulator import simulate

Local = list[torch.Tensor]  # one value's local tensors, of each rank that runs here


@attrs.frozen(eq=False)
class Backward:
    """The compiled second half.

    Args:
        request: for the function with its gradients.
        placed: the arguments of the call.
        captured: the capture of the function with its gradients.
        halves: how the values of the first half reach the second.
        forwards: the programs of the first half.
        programs: those of the second.
        floating: the positions of the results that may have derivatives.
        runner: the compiled program; None in simulated and fake worlds.
    """

    request: Request
    placed: Placed
    captured: Captured
    halves: Halves
    forwards: dict[tuple[int, ...], LocalProgram]
    programs: dict[tuple[int, ...], LocalProgram]
    floating: tuple[int, ...]
    runner: Runner | None
    reads: list[tuple[int, Reader]] = attrs.field(init=False)  # of the arguments

    @reads.default
    def _reads(self) -> list[tuple[int, Reader]]:
        programs = [self.forwards[c] for c in self.everyone]
        return readers(self.request.name, self.placed, self.captured, programs)

    @property
    def everyone(self) -> list[tuple[int, ...]]:
        """The coordinates of the ranks that run here."""
        if self.placed.is_simulated:
            return all_coordinates(self.placed.axes)
        return [self.placed.coordinate]

    @property
    def is_unread(self) -> bool:
        """Whether tensors have no values in this world."""
        return self.placed.mesh is not None and self.placed.world.kind == "fake"

    def has_derivative(self) -> list[bool]:
        """For each result, whether autograd goes on from it."""
        derivative = self.captured.derivative
        assert derivative is not None
        flags = dict(zip(self.floating, derivative.results, strict=True))
        count = len(self.halves.forward.outs) - self._count(SAVED)
        return [flags.get(i, False) for i in range(count)]

    def saved(
        self, leaves: list[Any], results: Sequence[Any], values: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The tensors that autograd is to keep.

        Args:
            leaves: of the arguments.
            results: of the call.
            values: the local values that the first half saves.
        """
        every = [*(leaves[i] for i in self.placed.tensors), *self.captured.closed_over]
        kept: list[torch.Tensor] = []
        for kind, i in self.halves.residuals:
            if kind == SAVED:
                kept += _every(values[i])
            else:
                kept.append(every[i] if kind == INPUT else results[i])
        return kept

    def run(
        self, saved: Sequence[torch.Tensor], cotangents: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensors that autograd follows."""
        (output,) = self.programs[self.everyone[0]].graph.find_nodes(op="output")
        if self.is_unread:
            outs: list[Any] = [UnreadTensor(n.meta["val"]) for n in output.args[0]]
        else:
            outs = self._executed([*self._residuals(saved), *self._given(cotangents)])
        derivative = self.captured.derivative
        assert derivative is not None
        rows = zip(
            outs,
            self.halves.backward.outs,
            self._are_dtensors(),
            derivative.primals,
            strict=True,
        )
        return [
            self._gradient(out, slot, is_dtensor) if reached else None
            for out, slot, is_dtensor, reached in rows
        ]

    def _count(self, kind: str) -> int:
        return sum(other == kind for other, _ in self.halves.residuals)

    def _executed(self, values: list[Local]) -> list[Any]:
        """The local gradients: in a simulated world those of all ranks."""
        programs = [self.programs[c] for c in self.everyone]
        rows = [
            [
                laid_out(x, stride)
                for x, stride in zip(row, _strides(program), strict=True)
            ]
            for row, program in zip(zip(*values, strict=True), programs, strict=True)
        ]
        values.clear()
        if self.runner is None:
            results = simulate(programs, rows, self.everyone)
            at = shown(self.placed.mesh, self.placed.world.rank)
            return [SimulatedTensor(x, at) for x in zip(*results, strict=True)]
        mesh = self.placed.mesh
        device = mesh.device_type if mesh is not None else None
        coords = [torch.tensor(c, device=device) for c in self.placed.coordinate]
        return self.runner([*coords, *rows.pop()])

    def _residuals(self, saved: Sequence[torch.Tensor]) -> Iterator[Local]:
        """The local tensors of each residual."""
        feed = iter(saved)
        for kind, i in self.halves.residuals:
            if kind == SAVED:
                yield [next(feed) for _ in self.everyone]
            elif kind == INPUT and i < len(self.reads):
                local = self.reads[i][1](next(feed))
                yield local if isinstance(local, list) else [local]
            else:
                x = next(feed)
                yield [local_of_rank(x, r) for r in range(len(self.everyone))]

    def _given(self, cotangents: Sequence[Any]) -> Iterator[Local]:
        """The local tensors of each cotangent: zeros where autograd has none."""
        slots = self.halves.backward.ins[len(self.halves.residuals) :]
        for number, slot in zip(self.halves.cotangents, slots, strict=True):
            g = cotangents[self.floating[number]]
            if g is None:
                yield [self._zeros(slot, c) for c in self.everyone]
                continue
            placements = torch_placements(slot.marks)
            if isinstance(g, DTensor) and g.placements != placements:
                g = g.redistribute(placements=placements)
            yield [local_of_rank(g, r) for r in range(len(self.everyone))]

    def _zeros(self, slot: Slot, coordinate: tuple[int, ...]) -> torch.Tensor:
        at = self.halves.backward.ins.index(slot)
        skip = len(self.placed.axes.names)
        holders = self.programs[coordinate].graph.find_nodes(op="placeholder")
        like = holders[skip + at].meta["val"]
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def _are_dtensors(self) -> list[bool]:
        """For each tensor that autograd follows, whether it is a DTensor."""
        followed = self.request.followed
        assert followed is not None
        kinds = dict(zip(self.placed.tensors, self.placed.dtensors, strict=True))
        closed = [isinstance(x, DTensor) for x in followed.closed_over]
        return [kinds[i] for i in followed.leaves] + closed

    def _gradient(self, out: Any, slot: Slot, is_dtensor: bool) -> torch.Tensor:
        if is_dtensor:
            spec = spec_of(self.placed.mesh, slot.marks, slot.value)
            return dtensors([out], [spec])[0]
        return out.shards[out.shown] if isinstance(out, SimulatedTensor) else out


def _every(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The local tensors of a value: of each rank that runs here."""
    return x.shards if isinstance(x, SimulatedTensor) else [x]


def _strides(program: LocalProgram) -> list[tuple[int, ...]]:
    """Those of the inputs, without the coordinates."""
    holders = program.graph.find_nodes(op="placeholder")[len(program.axes.names) :]
    return [holder.meta["val"].stride() for holder in holders]
