"""scan under every transform of torch.func: an autograd.Function over a function of flat tensors.

A derivative of a scan is a scan: forward-mode carries the tangents along, reverse-mode runs
from the last row to the first on the carries that entered each run. So every derivative of
every order is again one op with a graph inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...ops.loops import Scan, Tensors
from .. import annotations as sources
from .. import trace
from .bodies import Left
from .flat import (
    Body,
    filled,
    floats_of,
    is_float,
    mapped,
    move_constants,
    split,
    spread,
)


@attrs.frozen(eq=False)
class Scanned:
    """A scan that is not traced yet: body(*consts, *carries, *rows) returns the carries and
    rows of results.
    """

    body: Body
    consts: int
    carries: int
    length: int
    reverse: bool
    transposes: tuple[int, int, int] | None = None
    # whether it computes a derivative of another, and on the way what that computes
    derived: bool = False

    def parts(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Consts, carries and rows, of one list."""
        end = self.consts + self.carries
        return list(xs[: self.consts]), list(xs[self.consts : end]), list(xs[end:])


class _Scan(torch.autograd.Function):
    """(consts, carries, stacked rows) -> (carries, stacked results, the carries that entered
    each run).
    """

    @staticmethod
    def forward(scan: Scanned, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        consts, carries, columns = scan.parts(tensors)
        examples = [
            *consts,
            *carries,
            *(
                torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
                for x in columns
            ),
        ]
        run = lambda *xs: [*scan.body(*xs), *scan.parts(xs)[1]]
        graph, constants = trace.traced(run, examples, "scan", scan.derived)
        move_constants(graph, len(constants), scan.consts)
        made = Scan(
            (graph,),
            scan.consts + len(constants),
            scan.carries,
            scan.length,
            scan.reverse,
            scan.transposes,
        )
        return tuple(trace.emitted(made, [*consts, *constants, *carries, *columns]))

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
        tensors, entered = (
            ctx.saved_tensors[: ctx.count],
            ctx.saved_tensors[ctx.count :],
        )
        return None, *_pulled(ctx.scan, tensors, entered, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return _pushed(ctx.scan, ctx.saved_tensors[: ctx.count], tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, scan: Scanned, *tensors: torch.Tensor) -> Any:
        return _batched(scan, info.batch_size, in_dims[1:], tensors)


def _pulled(
    scan: Scanned, tensors: Any, entered: Any, cotangents: Any
) -> list[torch.Tensor | None]:
    """The cotangents of a scan's inputs: a scan from the last row to the first."""
    consts, init, columns = scan.parts(tensors)
    ends, rest = cotangents[: scan.carries], cotangents[scan.carries :]
    ys, of_entered = (
        rest[: len(rest) - scan.carries],
        rest[len(rest) - scan.carries :],
    )
    begin = [
        torch.zeros_like(c) if g is None else g
        for c, g in zip(init, ends, strict=True)
        if is_float(c)
    ]
    given = [k for k, g in enumerate(ys) if g is not None]
    again = [k for k, g in enumerate(of_entered) if g is not None]
    nc, nf, ni = len(consts), len(floats_of(consts)), len(floats_of(init))

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        sizes = (nc, nf, ni, scan.carries, len(columns), len(given), len(again))
        constants, sums, back, carries, rows, of_ys, more = split(xs, sizes)
        like = [*constants, *carries, *rows]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = scan.body(*filled(like, floats))
            wanted = [
                *floats_of(outs[: scan.carries]),
                *(outs[scan.carries + k] for k in given),
            ]
            sources.follow_backward((x.grad_fn for x in wanted), {})
            return tuple(wanted)

        with sources.kept():
            pull = torch.func.vjp(run, *floats_of(like))[1]
            found = pull((*back, *of_ys))
            of_consts, of_carries, of_rows = split(
                found, (nf, ni, len(floats_of(rows)))
            )
            where = [sum(is_float(c) for c in carries[:k]) for k in again]
            for k, g in zip(where, more, strict=True):
                of_carries[k] = of_carries[k] + g
            return [
                *(s + g for s, g in zip(sums, of_consts, strict=True)),
                *of_carries,
                *of_rows,
            ]

    made = Scanned(
        body,
        nc,
        nf + ni,
        scan.length,
        not scan.reverse,
        (nc, scan.carries, len(columns)),
        derived=True,
    )
    zeros = [torch.zeros_like(c) for c in floats_of(consts)]
    more = [*(ys[k] for k in given), *(of_entered[k] for k in again)]
    outs = _Scan.apply(made, *consts, *zeros, *begin, *entered, *columns, *more)
    of_consts, of_init, of_columns = split(
        outs, (nf, ni, len(floats_of(columns))), loose=True
    )
    return [
        *spread(consts, of_consts),
        *spread(init, of_init),
        *spread(columns, of_columns),
    ]


def _pushed(
    scan: Scanned, tensors: Any, tangents: Any
) -> tuple[torch.Tensor | None, ...]:
    """The tangents of a scan's results: a scan of the values and the tangents together."""
    consts, init, columns = scan.parts(tensors)
    pairs = zip(tensors, tangents, strict=True)
    along = scan.parts(
        [torch.zeros_like(x) if t is None and is_float(x) else t for x, t in pairs]
    )
    dots = [floats_of([t for t in part if t is not None]) for part in along]
    sizes = (
        len(consts),
        len(dots[0]),
        len(init),
        len(dots[1]),
        len(columns),
        len(dots[2]),
    )

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        constants, of_constants, carries, of_carries, rows, of_rows = split(
            xs, sizes
        )
        like, floating = [*constants, *carries, *rows], list[bool]()

        def run(*floats: torch.Tensor) -> Any:
            outs = scan.body(*filled(like, floats))
            floating[:] = [is_float(x) for x in outs]
            return tuple(floats_of(outs)), tuple(x for x in outs if not is_float(x))

        values, dots, others = _compat.jvp(
            run,
            tuple(floats_of(like)),
            (*of_constants, *of_carries, *of_rows),
            has_aux=True,
        )
        feeds = iter(others), iter(values)
        outs, n = [next(feeds[f]) for f in floating], sum(floating[: scan.carries])
        return [*outs[: scan.carries], *dots[:n], *outs[scan.carries :], *dots[n:]]

    made = Scanned(
        body,
        len(consts) + len(dots[0]),
        len(init) + len(dots[1]),
        scan.length,
        scan.reverse,
        derived=True,
    )
    outs = _Scan.apply(made, *consts, *dots[0], *init, *dots[1], *columns, *dots[2])
    rest = outs[made.carries : len(outs) - made.carries]
    ends, of_ends, of_entered = (
        outs[: scan.carries],
        outs[scan.carries : made.carries],
        outs[len(outs) - len(dots[1]) :],
    )
    floats = _count_with_tangents(rest)
    ys, of_ys = rest[: len(rest) - floats], rest[len(rest) - floats :]
    return (*spread(ends, of_ends), *spread(ys, of_ys), *spread(init, of_entered))


def _count_with_tangents(rest: Sequence[torch.Tensor]) -> int:
    """How many of (values, tangents of the floating ones) are tangents."""
    floats = len(floats_of(rest))
    assert floats % 2 == 0
    return floats // 2


def _batched(scan: Scanned, size: int, in_dims: Any, tensors: Any) -> Any:
    """A scan of many at once: every carry has the new axis, in front."""
    dims, init_dims, row_dims = scan.parts(in_dims)
    consts, init, columns = scan.parts(tensors)
    consts = [
        c if d is None else c.movedim(d, 0)
        for c, d in zip(consts, dims, strict=True)
    ]
    init = [
        c.expand(size, *c.shape) if d is None else c.movedim(d, 0)
        for c, d in zip(init, init_dims, strict=True)
    ]
    columns = [
        x if d is None else x.movedim(d, 1)
        for x, d in zip(columns, row_dims, strict=True)
    ]
    inner = (
        *(d if d is None else 0 for d in dims),
        *[0] * len(init),
        *(d if d is None else 0 for d in row_dims),
    )
    outs = _Scan.apply(
        attrs.evolve(scan, body=mapped(scan.body, inner, size)),
        *consts,
        *init,
        *columns,
    )
    return outs, tuple(0 if k < scan.carries else 1 for k in range(len(outs)))


def scanned(
    left: Sequence[Left],
    init: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
    length: int,
    reverse: bool,
) -> Tensors:
    """The scan of a region whose first results are the carries."""
    region = left[0].region
    count = len(region.free)
    body = lambda *xs: region(xs[count:], xs[:count])
    outs = _Scan.apply(
        Scanned(body, count, len(init), length, reverse),
        *region.free,
        *init,
        *columns,
    )
    return list(outs[: len(outs) - len(init)])
