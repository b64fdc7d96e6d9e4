"""while_loop under every torch.func transform: its derivatives and its vmap.

Every loop counts its steps. Reverse mode runs the loop again in chunks of equal length, as many
as one scan has steps, and saves the carries that enter each chunk. The scan's transpose goes
back over the chunks. Within a chunk each carry is recomputed from the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from ...ops.loops import Tensors, While
from ...random import ambient
from .. import aten_trace
from ..shard_map import axis_names
from . import body_ops, wrapper_subclasses
from . import scan as scans
from .bodies import BodyResult
from .cond_branches import (
    batch_first,
    body_with_tangents,
    operands_of_body,
    select_by_sample,
    transposed_body,
)
from .flat_tensors import (
    Body,
    add_inputs,
    floats_of,
    for_floats,
    is_float,
    move_constants,
    randomness_of,
    split,
    vmapped_body,
)

CHUNKS = 64  # a loop of at most so many steps recomputes no carry twice


@attrs.frozen(eq=False)
class UntracedWhile:
    """A while loop that is not traced yet: go_on(*consts, *carries) and body(*consts, *carries).
    The first carry counts the steps.
    """

    go_on: Body
    body: Body
    consts: int
    derived: bool = False
    # whether it is a chunk, or part of its derivative, of few steps
    chunk: bool = False
    # the position of the random state among its carries, if it draws
    state: int | None = None
    # the levels of the vmaps around it, or around the loop of which it is a derivative
    origin: frozenset[int] = attrs.field(factory=_compat.vmap_levels)


def _while_with_tangents(loop: UntracedWhile, sizes: tuple[int, int, int, int]) -> UntracedWhile:
    """The while loop of values together with their tangents. `sizes` counts its constants, their
    tangents, its carries and their tangents.
    """
    n, tangents_of_consts, carries, _ = sizes
    pushed = body_with_tangents(loop.body, n + carries, [])

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        consts, of_consts, carries, of_carries = split(xs, sizes)
        dots = pushed(*consts, *carries, *of_consts, *of_carries)
        return [*loop.body(*consts, *carries), *dots]

    def go_on(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts, _, carries, _ = split(xs, sizes)
        return loop.go_on(*consts, *carries)

    consts = n + tangents_of_consts
    return attrs.evolve(loop, go_on=go_on, body=body, consts=consts, derived=True)


class _While(torch.autograd.Function):
    """The autograd.Function of a while loop: (consts, carries) -> carries."""

    @staticmethod
    def forward(loop: UntracedWhile, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = loop.consts
        (go_on, first), (body, second) = (
            aten_trace.traced(f, tensors, "while_loop", loop.derived)
            for f in (loop.go_on, loop.body)
        )
        move_constants(go_on, len(first), n)
        move_constants(body, len(second), n)
        add_inputs(go_on, n + len(first), second)
        add_inputs(body, n, first)
        consts = [*tensors[:n], *first, *second]
        carries = tensors[n:]
        target = While((go_on, body), len(consts), len(carries))
        return tuple(aten_trace.emit_loop(target, [*consts, *carries]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.loop = inputs[0]
        ctx.save_for_backward(*inputs[1:], output[0])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        loop = ctx.loop
        *tensors, last = ctx.saved_tensors
        first = tensors[loop.consts]
        steps = (last - first).amax()  # of the sample that takes the most
        ends = [
            torch.zeros_like(c) if g is None and is_float(c) else g
            for c, g in zip(tensors[loop.consts :], cotangents, strict=True)
        ]
        pulled = _chunk_cotangents if loop.chunk else _cotangents_by_chunks
        return None, *pulled(loop, tensors, steps, ends)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        loop = ctx.loop
        n = loop.consts
        tensors = ctx.saved_tensors[: len(tangents)]
        dots = [
            torch.zeros_like(x) if t is None and is_float(x) else t
            for x, t in zip(tensors, tangents, strict=True)
        ]
        consts = tensors[:n]
        carries = tensors[n:]
        # the tangents of floating tensors
        of_consts = [t for t in dots[:n] if t is not None]
        of_carries = [t for t in dots[n:] if t is not None]
        sizes = (n, len(of_consts), len(carries), len(of_carries))
        both = _while_with_tangents(loop, sizes)
        outs = _While.apply(both, *consts, *of_consts, *carries, *of_carries)
        of_outs = outs[len(carries) :]
        return tuple(for_floats(carries, of_outs))

    @staticmethod
    def vmap(info: Any, in_dims: Any, loop: UntracedWhile, *tensors: torch.Tensor) -> Any:
        """Loop until no sample continues. A finished sample keeps its values. All samples draw
        from one random state.
        """
        size = info.batch_size
        n = loop.consts
        consts, dims_of_consts = batch_first(tensors[:n], in_dims[1 : n + 1])
        dims_of_carries: list[int | None] = [0] * (len(tensors) - n)
        if loop.state is not None:
            _refuse_states_of_samples(in_dims[n + 1 + loop.state])
            dims_of_carries[loop.state] = None
        init = [
            x if out is None else x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d, out in zip(tensors[n:], in_dims[n + 1 :], dims_of_carries, strict=True)
        ]
        dims = (*dims_of_consts, *dims_of_carries)
        randomness = randomness_of(info, loop.origin, loop.derived)
        go_on = vmapped_body(loop.go_on, dims, size, randomness)
        body = vmapped_body(loop.body, dims, size, randomness)

        inputs = [*consts, *init]
        raising = body_ops.ops_of(body, inputs, "while_loop").may_raise

        def step(*xs: torch.Tensor) -> list[torch.Tensor]:
            (truth,) = go_on(*xs)  # (size,)
            after = body(*operands_of_body(truth, xs, dims, raising))
            return [
                new.select(0, 0) if d is None else select_by_sample(truth, new, old)
                for new, old, d in zip(after, xs[n:], dims_of_carries, strict=True)
            ]

        any_goes_on = lambda *xs: [go_on(*xs)[0].any()]
        of_all = attrs.evolve(loop, go_on=any_goes_on, body=step)
        return _While.apply(of_all, *inputs), tuple(dims_of_carries)


def _refuse_states_of_samples(dim: int | None) -> None:
    """Refuse the steps of a derivative under vmap that draw: each sample has its own number of
    steps, and so its own random state.
    """
    if dim is not None:
        raise CaptureError.of(
            "while_loop",
            "its functions draw random numbers, and its derivative is under vmap",
            needed="one random state for all samples",
            fix="take the derivative of the sum of vmap: grad(lambda x: vmap(f)(x).sum())",
        )


@attrs.frozen(eq=False)
class _LoopSteps:
    """A loop over some of the steps of a while loop, from one number of a step to another. Its last
    constant is the number of the step to stop before. Its first carry is the number of the next
    step.
    """

    loop: UntracedWhile

    def go_on(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        stop = xs[self.loop.consts]
        k = xs[self.loop.consts + 1]
        return [k < stop]

    def body(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        consts = xs[: self.loop.consts]
        _, k, *carries = xs[self.loop.consts :]
        outs = self.loop.body(*consts, *carries)
        return [k + 1, *outs]

    def run(
        self,
        consts: Sequence[torch.Tensor],
        start: torch.Tensor,
        stop: torch.Tensor,
        carries: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The number of the next step and the carries, after the steps from `start` to `stop`."""
        state = None if self.loop.state is None else self.loop.state + 1
        part = _loop_of_few_steps(self, self.loop.consts + 1, state)
        return _While.apply(part, *consts, stop, start, *carries)


def _loop_of_few_steps(
    steps: _LoopSteps | _ReverseChunk, consts: int, state: int | None = None
) -> UntracedWhile:
    """A loop of few steps, which belongs to a derivative."""
    return UntracedWhile(steps.go_on, steps.body, consts, True, True, state)


def _cotangents_by_chunks(
    loop: UntracedWhile,
    tensors: Sequence[torch.Tensor],
    steps: torch.Tensor,
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The cotangents of the inputs of a while loop, by a scan over chunks of its steps."""
    n = loop.consts
    part = _LoopSteps(loop)

    def chunk(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        consts = xs[:n]
        steps, stride, start, *carries = xs[n:]
        stop = torch.minimum(start + stride, steps)
        return part.run(consts, start, stop, carries)

    rounded = steps + CHUNKS - 1
    stride = rounded.div(CHUNKS, rounding_mode="floor")
    start = torch.zeros_like(steps)
    inputs = [*tensors[:n], steps, stride, start, *tensors[n:]]
    carries = len(tensors) - n + 1
    scan = scans.UntracedScan(
        chunk, n + 2, carries, CHUNKS, reverse=False, derived=True, origin=loop.origin
    )
    outs = scans.ScanOp.apply(scan, *inputs)
    entered = outs[carries:]
    of_outs = [None, *cotangents, *[None] * carries]
    of_inputs = scans.scan_cotangents(scan, inputs, entered, of_outs)
    return [*of_inputs[:n], *of_inputs[n + 3 :]]


@attrs.frozen(eq=False)
class _ReverseChunk:
    """The loop from the last step of a chunk to its first. Each step recomputes the carries that
    entered it.

    Its constants are the inputs of the chunk and the number of its steps. Its carries are the
    number of steps so far, and the cotangents of the floating carries and constants.
    """

    loop: UntracedWhile
    sizes: tuple[int, ...]  # of these five parts, the first one divided in two
    pull: Body

    def go_on(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        _, _, (steps,), (k,), _, _ = split(xs, self.sizes)
        return [k < steps]

    def body(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        consts, init, (steps,), (k,), of_after, sums = split(xs, self.sizes)
        before = steps - 1 - k
        start = torch.zeros_like(k)
        part = _LoopSteps(self.loop)
        _, *carries = part.run(consts, start, before, init)
        cotangents = self.pull(*consts, *carries, *of_after)
        counts = len(sums), len(of_after)
        of_consts, of_carries = split(cotangents, counts)
        pairs = zip(sums, of_consts, strict=True)
        totals = [s + g for s, g in pairs]
        return [k + 1, *of_carries, *totals]


def _chunk_cotangents(
    loop: UntracedWhile,
    tensors: Sequence[torch.Tensor],
    steps: torch.Tensor,
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The cotangents of the inputs of one chunk of steps, by a loop from its last step to its
    first.
    """
    n = loop.consts
    count = len(tensors)
    consts = tensors[:n]
    init = tensors[n:]
    ends = [g for g in cotangents if g is not None]
    sums = [torch.zeros_like(c) for c in floats_of(consts)]
    given = [k for k, c in enumerate(init) if is_float(c)]
    pull = transposed_body(loop.body, count, given)
    sizes = (n, len(init), 1, 1, len(ends), len(sums))
    back = _ReverseChunk(loop, sizes, pull)
    reverse = _loop_of_few_steps(back, count + 1)
    zero = torch.zeros_like(steps)
    outs = _While.apply(reverse, *tensors, steps, zero, *ends, *sums)
    counts = 1, len(ends), len(sums)
    _, of_init, of_consts = split(outs, counts)
    return [*for_floats(consts, of_consts), *for_floats(init, of_init)]


def replay_while_loop(
    go_on: BodyResult, results: Sequence[BodyResult], init: Sequence[torch.Tensor]
) -> Tensors:
    """When Dynamo's graph is replayed: the while loop of a condition and a body."""
    frees = [*go_on.region.free, *results[0].region.free]
    wrapper_subclasses.refuse_partly_followed("while_loop", [*frees, *init])
    init, carried = wrapper_subclasses.inner_tensors(init)
    test = wrapper_subclasses.BodyOverInnerTensors("while_loop", go_on.region, carried)
    body = wrapper_subclasses.BodyOverInnerTensors("while_loop", results[0].region, carried)
    outs = _apply_while_loop(test, body, init)
    wrapper_subclasses.refuse_different_results("while_loop", carried, body.left)
    return list(wrapper_subclasses.rebuilt_subclasses("while_loop", body.left, outs))


def _apply_while_loop(
    test: wrapper_subclasses.BodyOverInnerTensors,
    body: wrapper_subclasses.BodyOverInnerTensors,
    init: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Call the while loop; if its functions draw random numbers, with a random state as its last
    carry. A loop whose functions draw has a state as its last carry.
    """
    sizes = (len(test.free), len(body.free), 1, len(init))

    def go_on(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        free, _, _, carries = split(xs, sizes)
        return test(carries, free)

    def step(*xs: torch.Tensor) -> list[torch.Tensor]:
        _, free, (count,), carries = split(xs, sizes)
        outs = body(carries, free)
        return [count + 1, *outs]

    device = axis_names.device()
    count = torch.zeros((), dtype=torch.int64, device=device)
    inputs = [*test.free, *body.free, count, *init]
    consts = len(test.free) + len(body.free)
    try:
        outs = _While.apply(UntracedWhile(go_on, step, consts), *inputs)
    except ambient.StateMissing:
        state = ambient.new_states([], device)
        drawing = _DrawingLoop(go_on, step)
        loop = UntracedWhile(drawing.go_on, drawing.step, consts, state=len(init) + 1)
        outs = _While.apply(loop, *inputs, state)
    return outs[1 : len(init) + 1]


class _DrawingLoop:
    """The condition and the step of a loop with one more carry, last: the state that their random
    calls draw from. In each turn the step draws after the condition.
    """

    def __init__(self, go_on: Body, step: Body) -> None:
        self._go_on, self._step = go_on, step
        self._calls = 0  # of a condition, which is traced before the step

    def go_on(self, *xs: torch.Tensor) -> Sequence[torch.Tensor]:
        *others, state = xs
        source = ambient.Traced(state)
        with ambient.drawing_from(source):
            outs = self._go_on(*others)
        self._calls = source.calls
        return outs

    def step(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        *others, state = xs
        source = ambient.Traced(state, self._calls)
        with ambient.drawing_from(source):
            outs = self._step(*others)
        return [*outs, ambient.after_calls(state, source.calls)]
