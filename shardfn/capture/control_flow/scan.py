"""scan under every transform of torch.func: an autograd.Function over a function of flat tensors.

A derivative of a scan is a scan. Forward mode carries the tangents along. Reverse mode runs
from the last step to the first, on the carries that entered each step. So every derivative of
any order is again one op with a graph inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ... import _compat
from ...ops.loops import Scan, Tensors
from ...random import ambient
from .. import annotations as sources
from .. import aten_trace
from ..shard_map import axis_names
from . import wrapper_subclasses
from .bodies import BodyResult, BodyWithSums
from .flat_tensors import (
    Body,
    NumberedBody,
    body_with_random_state,
    floats_of,
    for_floats,
    is_float,
    move_constants,
    randomness_of,
    split,
    vmapped_body,
    with_floats,
)


@attrs.frozen(eq=False)
class UntracedScan:
    """A scan that is not traced yet: body(*consts, *carries, *rows) returns the carries and the
    per-step outputs. `rows` are the per-step inputs.
    """

    body: Body
    consts: int
    carries: int
    length: int
    reverse: bool
    transposes: tuple[int, int, int] | None = None
    # whether it is a derivative of another one, whose values it recomputes
    derived: bool = False
    # the levels of the vmaps around it, or around those values
    origin: frozenset[int] = attrs.field(factory=_compat.vmap_levels)

    def parts(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split one list into consts, carries and rows."""
        end = self.consts + self.carries
        consts = list(xs[: self.consts])
        carries = list(xs[self.consts : end])
        return consts, carries, list(xs[end:])


class ScanOp(torch.autograd.Function):
    """The autograd.Function of a scan: (consts, carries, stacked rows) -> (carries, stacked
    outputs, the stacked carries that entered each step).
    """

    @staticmethod
    def forward(scan: UntracedScan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        consts, carries, columns = scan.parts(tensors)
        row = [torch.empty(x.shape[1:], dtype=x.dtype, device=x.device) for x in columns]
        examples = [*consts, *carries, *row]
        run = lambda *xs: [*scan.body(*xs), *scan.parts(xs)[1]]
        graph, constants = aten_trace.traced(run, examples, "scan", scan.derived)
        if isinstance(scan.body, NumberedBody):
            scan.body.settle(graph)
        move_constants(graph, len(constants), scan.consts)
        loop = Scan(
            (graph,),
            scan.consts + len(constants),
            scan.carries,
            scan.length,
            scan.reverse,
            scan.transposes,
        )
        return tuple(aten_trace.emit_loop(loop, [*consts, *constants, *carries, *columns]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scan, ctx.count = inputs[0], len(inputs) - 1
        entered = output[len(output) - ctx.scan.carries :]
        ctx.save_for_backward(*inputs[1:], *entered)
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors[: ctx.count]
        entered = ctx.saved_tensors[ctx.count :]
        return None, *scan_cotangents(ctx.scan, tensors, entered, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return _scan_tangents(ctx.scan, ctx.saved_tensors[: ctx.count], tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, scan: UntracedScan, *tensors: torch.Tensor) -> Any:
        return _batched_scan(scan, info, in_dims[1:], tensors)


class _ResultCotangents(NamedTuple):
    """The cotangents of a scan's results, None for zero."""

    ends: Sequence[torch.Tensor | None]  # of the carries after the last step
    ys: Sequence[torch.Tensor | None]  # of the stacked outputs
    entered: Sequence[torch.Tensor | None]  # of the stacked carries that entered


def _split_cotangents(scan: UntracedScan, cotangents: Any) -> _ResultCotangents:
    """The cotangents of a scan's results, in their three parts."""
    ends = cotangents[: scan.carries]
    rest = cotangents[scan.carries :]
    start = len(rest) - scan.carries
    return _ResultCotangents(ends, rest[:start], rest[start:])


def _positions_not_none(xs: Sequence[Any | None]) -> list[int]:
    """The positions of the values that are not None."""
    return [k for k, x in enumerate(xs) if x is not None]


@attrs.frozen(eq=False)
class _TransposedBody:
    """The body of the transpose of a scan, which goes from the last step to the first. Its
    constants are those of the scan. Its carries are the cotangents of the constants so far and of
    the carries after the step. Its rows are the carries that entered the step, the scan's rows, and
    the cotangents that are not None.
    """

    scan: UntracedScan
    consts: int
    floating_consts: int
    floating_carries: int
    rows: int
    ys: list[int]  # the results that have a cotangent
    entered: list[int]  # the stacked carries that have a cotangent

    def __call__(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        sizes = (
            self.consts,
            self.floating_consts,
            self.floating_carries,
            self.scan.carries,
            self.rows,
            len(self.ys),
            len(self.entered),
        )
        consts, sums, of_after, carries, rows, of_ys, of_entered = split(xs, sizes)
        primals = [*consts, *carries, *rows]
        with sources.annotations_restored():
            results = self.results_of(primals)
            pull = torch.func.vjp(results, *floats_of(primals))[1]
            of_consts, of_carries, of_rows = split(pull((*of_after, *of_ys)), self.counts(rows))
            for k, g in zip(self.entered, of_entered, strict=True):
                position = len(floats_of(carries[:k]))
                of_carries[position] = of_carries[position] + g
            totals = [s + g for s, g in zip(sums, of_consts, strict=True)]
            return [*totals, *of_carries, *of_rows]

    def transposed(self) -> UntracedScan:
        """The transposed scan."""
        return UntracedScan(
            self,
            self.consts,
            self.floating_consts + self.floating_carries,
            self.scan.length,
            not self.scan.reverse,
            (self.consts, self.scan.carries, self.rows),
            derived=True,
            origin=self.scan.origin,
        )

    def counts(self, rows: Sequence[torch.Tensor]) -> tuple[int, int, int]:
        """The numbers of cotangents of constants, of carries and of these rows."""
        return self.floating_consts, self.floating_carries, len(floats_of(rows))

    def results_of(
        self, primals: Sequence[torch.Tensor]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The step's floating carries and the outputs with cotangents, as a function of its
        floating inputs.
        """

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = self.scan.body(*with_floats(primals, floats))
            carries = floats_of(outs[: self.scan.carries])
            ys = [outs[self.scan.carries + k] for k in self.ys]
            wanted = (*carries, *ys)
            sources.follow_backward((x.grad_fn for x in wanted), {})
            return wanted

        return run


def scan_cotangents(
    scan: UntracedScan, tensors: Any, entered: Any, cotangents: Any
) -> list[torch.Tensor | None]:
    """The cotangents of a scan's inputs: a scan from the last step to the first."""
    consts, init, columns = scan.parts(tensors)
    of_ends, of_ys, of_entered = _split_cotangents(scan, cotangents)
    last = [
        torch.zeros_like(c) if g is None else g
        for c, g in zip(init, of_ends, strict=True)
        if is_float(c)
    ]
    step = _TransposedBody(
        scan,
        consts=len(consts),
        floating_consts=len(floats_of(consts)),
        floating_carries=len(last),
        rows=len(columns),
        ys=_positions_not_none(of_ys),
        entered=_positions_not_none(of_entered),
    )
    sums = [torch.zeros_like(c) for c in floats_of(consts)]
    given = [g for g in (*of_ys, *of_entered) if g is not None]
    outs = ScanOp.apply(step.transposed(), *consts, *sums, *last, *entered, *columns, *given)
    counts = step.counts(columns)
    of_consts, of_init, of_columns = split(outs, counts, loose=True)
    return [
        *for_floats(consts, of_consts),
        *for_floats(init, of_init),
        *for_floats(columns, of_columns),
    ]


@attrs.frozen(eq=False)
class _BodyWithTangents:
    """The body of a scan of values together with their tangents. Its constants, carries and rows
    are those of the scan, each part followed by the tangents of its floating ones.
    """

    scan: UntracedScan
    sizes: tuple[int, ...]  # the sizes of the six parts

    def __call__(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        consts, of_consts, carries, of_carries, rows, of_rows = split(xs, self.sizes)
        primals = [*consts, *carries, *rows]
        tangents = (*of_consts, *of_carries, *of_rows)
        outs, dots = self.pushed(primals, tangents)
        count = self.scan.carries
        floating = len(floats_of(outs[:count]))
        return [*outs[:count], *dots[:floating], *outs[count:], *dots[floating:]]

    def pushed(
        self, primals: Sequence[torch.Tensor], tangents: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        """The results of the scan's body, with the tangents of the floating ones."""
        floating = list[bool]()

        def run(*floats: torch.Tensor) -> Any:
            outs = self.scan.body(*with_floats(primals, floats))
            floating[:] = [is_float(x) for x in outs]
            return tuple(floats_of(outs)), tuple(x for x in outs if not is_float(x))

        values, dots, others = _compat.jvp(run, tuple(floats_of(primals)), tangents, has_aux=True)
        feeds = iter(others), iter(values)
        return [next(feeds[f]) for f in floating], dots


def _tangents_of(scan: UntracedScan, tensors: Any, tangents: Any) -> list[list[torch.Tensor]]:
    """The tangents of the floating constants, carries and rows, with zeros for None."""
    dots = [
        torch.zeros_like(x) if t is None and is_float(x) else t
        for x, t in zip(tensors, tangents, strict=True)
    ]
    return [floats_of([t for t in part if t is not None]) for part in scan.parts(dots)]


def _scan_tangents(
    scan: UntracedScan, tensors: Any, tangents: Any
) -> tuple[torch.Tensor | None, ...]:
    """The tangents of a scan's results: a scan of the values and the tangents together."""
    consts, init, columns = scan.parts(tensors)
    of_consts, of_init, of_columns = _tangents_of(scan, tensors, tangents)
    inputs = (consts, of_consts, init, of_init, columns, of_columns)
    both = UntracedScan(
        _BodyWithTangents(scan, tuple(len(part) for part in inputs)),
        len(consts) + len(of_consts),
        len(init) + len(of_init),
        scan.length,
        scan.reverse,
        derived=True,
        origin=scan.origin,
    )
    outs = ScanOp.apply(both, *(x for part in inputs for x in part))
    ends = outs[: scan.carries]
    of_ends = outs[scan.carries : both.carries]
    stacked = outs[both.carries : len(outs) - both.carries]
    of_entered = outs[len(outs) - len(of_init) :]
    return (*for_floats(ends, of_ends), *_stacked_tangents(stacked), *for_floats(init, of_entered))


def _stacked_tangents(stacked: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The tangents of stacked results, from the results and the tangents of the floating ones."""
    floats = len(floats_of(stacked))
    assert floats % 2 == 0
    start = len(stacked) - floats // 2
    return for_floats(stacked[:start], stacked[start:])


def _batched_scan(scan: UntracedScan, info: Any, in_dims: Any, tensors: Any) -> Any:
    """The scan under vmap, with the batch dim first in every carry."""
    size = info.batch_size
    dims, init_dims, row_dims = scan.parts(in_dims)
    consts, init, columns = scan.parts(tensors)
    consts = [c if d is None else c.movedim(d, 0) for c, d in zip(consts, dims, strict=True)]
    init = [
        c.expand(size, *c.shape) if d is None else c.movedim(d, 0)
        for c, d in zip(init, init_dims, strict=True)
    ]
    columns = [x if d is None else x.movedim(d, 1) for x, d in zip(columns, row_dims, strict=True)]
    inner = (
        *(d if d is None else 0 for d in dims),
        *[0] * len(init),
        *(d if d is None else 0 for d in row_dims),
    )
    randomness = randomness_of(info, scan.origin, scan.derived)
    outs = ScanOp.apply(
        attrs.evolve(scan, body=vmapped_body(scan.body, inner, size, randomness)),
        *consts,
        *init,
        *columns,
    )
    return outs, tuple(0 if k < scan.carries else 1 for k in range(len(outs)))


def replay_scan(
    results: Sequence[BodyResult],
    init: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
    length: int,
    reverse: bool,
    like: Sequence[torch.Tensor] = (),
) -> Tensors:
    """When Dynamo's graph is replayed: the scan of a body whose first results are the carries, and
    then the terms of means, of which each is like another tensor.
    """
    start, end = len(init), len(init) + len(like)
    body = BodyWithSums(results[0].region, start, len(like))
    init = [*init, *map(torch.zeros_like, like)]
    wrapper_subclasses.refuse_partly_followed("scan", [*body.free, *init, *columns])
    init, carried = wrapper_subclasses.inner_tensors(init)
    entered = [*carried, *wrapper_subclasses.specs_of_rows("scan", columns)]
    columns, _ = wrapper_subclasses.inner_tensors(columns)
    region = wrapper_subclasses.BodyOverInnerTensors("scan", body, entered, len(carried))
    inputs = [*region.free, *init, *columns]
    outs = _apply_scan(region, len(init), length, reverse, inputs)
    n = len(carried)
    wrapper_subclasses.refuse_different_results("scan", carried, region.left[:n])
    specs = [*region.left[:n], *wrapper_subclasses.stacked_specs(region.left[n:], length)]
    found = list(
        wrapper_subclasses.rebuilt_subclasses("scan", specs, outs[: len(outs) - len(init)])
    )
    return [*found[:start], *(x / length for x in found[start:end]), *found[end:]]


def _apply_scan(
    region: wrapper_subclasses.BodyOverInnerTensors,
    carries: int,
    length: int,
    reverse: bool,
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Call the scan; if its body draws random numbers, with a random state for each step."""
    count = len(region.free)
    body = lambda *xs: region(xs[count:], xs[:count])
    if sources.is_pipelined() and ambient.is_counting():
        numbered = NumberedBody(body)
        states = ambient.states_of_steps(length)
        outs = ScanOp.apply(
            UntracedScan(numbered, count, carries, length, reverse), *inputs, states
        )
        ambient.count_calls(length * numbered.calls)
        return outs
    try:
        return ScanOp.apply(UntracedScan(body, count, carries, length, reverse), *inputs)
    except ambient.StateMissing:
        states = ambient.new_states([length], axis_names.device())  # one a step
        made = UntracedScan(body_with_random_state(body), count, carries, length, reverse)
        return ScanOp.apply(made, *inputs, states)
