"""The backward of a call that torch's autograd records: from cotangents of the results to
gradients.

The forward returns the results and the saved values. Autograd treats the saved values like those of
its own ops, and detects writes to them, frees them, and calls hooks on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...capture import Captured
from ...compile import Runner
from ...errors import ShardError, call_site
from ...mesh import all_coordinates
from ...partition.plan import Slot
from ...partition.split_backward import INPUT, SAVED, SplitPlan
from ...placement import torch_placements
from ...simulated import (
    SimulatedTensor,
    UnreadTensor,
    dtensors,
    is_on_part,
    of_one_part,
    on_mesh,
    ranks_of,
    shown,
)
from ...types import LocalProgram
from ..arguments import Placed
from ..layouts import Reader, laid_out, local_of_rank, readers, row_of_part, spec_of
from ..options import Request
from ..simulator import simulate

SECOND = (
    "call backward() only on the loss value that pipelined_grad returns; or call the captured "
    "function under torch.no_grad(), and in it apply sf.grad to a function of the gradients"
)
Local = list[torch.Tensor]  # one value's local tensors, of each rank that runs here


@attrs.frozen(eq=False)
class Backward:
    """The compiled backward of a call that autograd follows.

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
    halves: SplitPlan
    forwards: dict[tuple[int, ...], LocalProgram]
    programs: dict[tuple[int, ...], LocalProgram]
    floating: tuple[int, ...]
    runner: Runner | None
    reads: list[tuple[int, Reader]] = attrs.field(init=False)  # of the arguments
    inputs: list[list[torch.Tensor]] = attrs.field(init=False)  # fake ones, by rank
    specs: list[Any] = attrs.field(init=False)  # of gradients; None for a plain tensor

    @reads.default
    def _reads(self) -> list[tuple[int, Reader]]:
        programs = [self.forwards[c] for c in self.everyone]
        return readers(self.request.name, self.placed, self.captured, programs)

    @inputs.default
    def _inputs(self) -> list[list[torch.Tensor]]:
        return [_fakes(self.programs[c]) for c in self.everyone]

    @specs.default
    def _specs(self) -> list[Any]:
        followed = self.request.followed
        slots = self.halves.backward.outs
        assert followed is not None
        kinds = dict(zip(self.placed.tensors, self.placed.dtensors, strict=True))
        closed = [isinstance(x, DTensor) for x in followed.closed_over]
        are_dtensors = [kinds[i] for i in followed.leaves] + closed
        specs = [
            spec_of(self.placed.mesh, slot.placements, slot.value) if is_dtensor else None
            for slot, is_dtensor in zip(slots, are_dtensors, strict=True)
        ]
        last = zip(specs[len(followed.leaves) :], followed.closed_over, strict=True)
        on_parts = [self._spec_like(spec, x) for spec, x in last]
        return [*specs[: len(followed.leaves)], *on_parts]

    def _spec_like(self, spec: Any, x: torch.Tensor) -> Any:
        """Build the spec of a closed-over tensor's gradient, on the mesh of that tensor."""
        if not is_on_part(x, self.placed.mesh):
            return spec
        own: Any = x
        like = x if self.request.rank is not None else spec
        shape, stride = tuple(like.shape), _stride_of(like)
        return _compat.dtensor_spec(own.device_mesh, own.placements, shape, stride, x.dtype)

    @property
    def everyone(self) -> list[tuple[int, ...]]:
        """The coordinates of the ranks that run in this process."""
        if self.placed.is_simulated:
            return all_coordinates(self.placed.axes)
        return [self.placed.coordinate]

    @property
    def is_unread(self) -> bool:
        """Whether tensors have no values in this world (`numerics=False`)."""
        return self.placed.mesh is not None and self.placed.world.kind == "fake"

    def has_derivative(self) -> list[bool]:
        """For each result, whether autograd differentiates it."""
        derivative = self.captured.derivative
        assert derivative is not None
        flags = dict(zip(self.floating, derivative.results, strict=True))
        count = len(self.halves.forward.outs) - self._count(SAVED)
        return [flags.get(i, False) for i in range(count)]

    def saved(
        self, leaves: list[Any], results: Sequence[Any], values: Sequence[Any]
    ) -> list[torch.Tensor]:
        """List the tensors that autograd is to save for the backward.

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
        """Compute the gradients of the tensors that autograd follows. None for a tensor that no
        result with a cotangent depends on.
        """
        self._refuse_second(cotangents)
        if self.is_unread:
            outs: list[Any] = self._unread()
        else:
            outs = self._executed([*self._residuals(saved), *self._given(cotangents)])
        derivative = self.captured.derivative
        assert derivative is not None
        numbers = enumerate(self.floating)
        given = {k for k, i in numbers if cotangents[i] is not None}
        rows = zip(outs, self.specs, derivative.primals, strict=True)
        return [
            None if given.isdisjoint(results) else self._placed(out, spec)
            for out, spec, results in rows
        ]

    def _refuse_second(self, cotangents: Sequence[Any]) -> None:
        """Refuse cotangents of results that are made of the gradients of a pipeline, which are
        computed once.

        Raises:
            ShardError: names the results.
        """
        derivative = self.captured.derivative
        assert derivative is not None
        given = [i for k, i in enumerate(self.floating) if k in derivative.once]
        paths = [self.captured.program.out_paths[i] for i in given if cotangents[i] is not None]
        if paths:
            wrong = [
                f"{path} depends on a result of pipelined_grad that is not its value"
                for path in paths
            ]
            raise ShardError.of(
                self.request.name,
                *wrong,
                needed="a backward only of the loss value that pipelined_grad returns",
                fix=SECOND,
                source=call_site(),
            )

    def _placed(self, out: Any, spec: Any) -> torch.Tensor:
        """Wrap a local gradient as a DTensor, or as a global tensor; in per-rank code as the local
        tensor.
        """
        if spec is not None:
            is_row = out.dim() > len(spec.shape)
            own = out.squeeze(0) if is_row else out
            local = of_one_part(own, spec.mesh)
            return dtensors([local], [spec])[0]
        if self.request.rank is not None:
            return out.squeeze(0)
        return out.shards[out.shown] if isinstance(out, SimulatedTensor) else out

    def _unread(self) -> list[UnreadTensor]:
        """Make gradients without values, of the right shapes."""
        (output,) = self.programs[self.placed.coordinate].graph.find_nodes(op="output")
        return [UnreadTensor(node.meta["val"]) for node in output.args[0]]

    def _count(self, kind: str) -> int:
        return sum(other == kind for other, _ in self.halves.residuals)

    def _executed(self, values: list[Local]) -> list[Any]:
        """Run the backward, and return local gradients; in a simulated world those of all ranks."""
        rows: list[list[torch.Tensor]] = []
        for rank, fakes in enumerate(self.inputs):
            own = [value[rank] for value in values]
            pairs = zip(own, fakes, strict=True)
            rows.append([laid_out(x, like.stride()) for x, like in pairs])
        values.clear()
        if self.runner is None:
            programs = [self.programs[c] for c in self.everyone]
            results = simulate(programs, rows, self.everyone)
            at = shown(self.placed.mesh, self.placed.world.rank)
            ranks = ranks_of(self.placed.mesh)
            return [SimulatedTensor(x, at, ranks=ranks) for x in zip(*results, strict=True)]
        mesh = self.placed.mesh
        device = mesh.device_type if mesh is not None else None
        coords = [torch.tensor(c, device=device) for c in self.placed.coordinate]
        return self.runner([*coords, *rows.pop()])

    def _residuals(self, saved: Sequence[torch.Tensor]) -> Iterator[Local]:
        """List the local tensors of each saved residual."""
        feed = iter(saved)
        for kind, i in self.halves.residuals:
            if kind == SAVED:
                yield [next(feed) for _ in self.everyone]
            elif kind == INPUT and i < len(self.reads):
                local = self.reads[i][1](next(feed))
                yield local if isinstance(local, list) else [local]
            else:
                x = self._global(next(feed))
                yield [local_of_rank(x, r) for r in range(len(self.everyone))]

    def _global(self, x: Any) -> Any:
        """Turn a residual on a submesh, or of per-rank code, into one on the mesh."""
        mesh = self.placed.mesh
        is_row = self.request.rank is not None and is_on_part(x, mesh)
        return row_of_part(x) if is_row else on_mesh(x, mesh)

    def _given(self, cotangents: Sequence[Any]) -> Iterator[Local]:
        """List the local tensors of each cotangent, with zeros where autograd has none."""
        first = len(self.halves.residuals)
        slots = self.halves.backward.ins[first:]
        rows = zip(self.halves.cotangents, slots, strict=True)
        for at, (number, slot) in enumerate(rows, start=first):
            g = cotangents[self.floating[number]]
            if g is None:
                yield [_zeros(fakes[at]) for fakes in self.inputs]
                continue
            yield self._locals(g, slot)

    def _locals(self, g: torch.Tensor, slot: Slot) -> Local:
        """List the local tensors of one cotangent; in per-rank code the rank's row of
        a global one.
        """
        numbers = range(len(self.everyone))
        if g.dim() > len(slot.value.shape):
            return [local_of_rank(g, r).squeeze(0) for r in numbers]
        placements = torch_placements(slot.placements)
        if isinstance(g, DTensor) and g.placements != placements:
            g = g.redistribute(placements=placements)
        return [local_of_rank(g, r) for r in numbers]


def _stride_of(like: Any) -> tuple[int, ...]:
    """Return the strides of a tensor or of a DTensorSpec."""
    if isinstance(like, torch.Tensor):
        return tuple(like.stride())
    return tuple(like.stride)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Make zeros with the layout of a fake tensor."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _every(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """List the local tensors of a value, one for each rank that runs in this process."""
    return x.shards if isinstance(x, SimulatedTensor) else [x]


def _fakes(program: LocalProgram) -> list[torch.Tensor]:
    """List the fake inputs of a program, without the rank's coordinates."""
    holders = program.graph.find_nodes(op="placeholder")[len(program.axes.names) :]
    return [holder.meta["val"] for holder in holders]
