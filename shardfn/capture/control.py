"""scan, cond and while_loop under every transform of torch.func: each an autograd.Function over functions of flat tensors.

A derivative of a scan is a scan: forward-mode carries the tangents along, reverse-mode runs from the last row to the first
on the carries that entered each run. So every derivative of every order is again one op with a graph inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..errors import CaptureError, problem
from ..loops import Branch, Scan, Tensors, While
from . import recording, sources
from .regions import Left

Body = Callable[..., Sequence[torch.Tensor]]  # of flat tensors


@attrs.frozen(eq=False)
class Scanned:
    """A scan that is not traced yet: body(*consts, *carries, *rows) returns the carries and rows of results."""

    body: Body
    consts: int
    carries: int
    length: int
    reverse: bool
    transposes: tuple[int, int] | None = None

    def parts(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Consts, carries and rows, of one list."""
        end = self.consts + self.carries
        return list(xs[: self.consts]), list(xs[self.consts : end]), list(xs[end:])


class _Scan(torch.autograd.Function):
    """(consts, carries, stacked rows) -> (carries, stacked results, the carries that entered each run)."""

    @staticmethod
    def forward(scan: Scanned, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        consts, carries, columns = scan.parts(tensors)
        examples = [*consts, *carries, *(torch.empty(x.shape[1:], dtype=x.dtype, device=x.device) for x in columns)]
        run = lambda *xs: [*scan.body(*xs), *scan.parts(xs)[1]]  # noqa: E731
        graph, constants = recording.traced(run, examples, "scan")
        _move_constants(graph, len(constants), scan.consts)
        made = Scan((graph,), scan.consts + len(constants), scan.carries, scan.length, scan.reverse, scan.transposes)
        return tuple(recording.emitted(made, [*consts, *constants, *carries, *columns]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scan, ctx.count = inputs[0], len(inputs) - 1
        entered = output[len(output) - ctx.scan.carries :]
        ctx.save_for_backward(*inputs[1:], *entered)
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not _is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        tensors, entered = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return None, *_pulled(ctx.scan, tensors, entered, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return _pushed(ctx.scan, ctx.saved_tensors[: ctx.count], tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, scan: Scanned, *tensors: torch.Tensor) -> Any:
        return _batched(scan, info.batch_size, in_dims[1:], tensors)


def _move_constants(graph: torch.fx.Graph, count: int, at: int) -> None:
    """Have the constants, which come in last, come in behind the first so many inputs."""
    holders = graph.find_nodes(op="placeholder")
    for holder in holders[len(holders) - count :] if at < len(holders) - count else ():
        holders[at].prepend(holder)


def _is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _floats(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in xs if _is_float(x)]


def _filled(like: Sequence[torch.Tensor], floats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first tensors with these in the places of the floating ones."""
    feed = iter(floats)
    return [next(feed) if _is_float(x) else x for x in like]


def _spread(like: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """These in the places of the floating ones, None for the others."""
    feed = iter(found)
    return [next(feed) if _is_float(x) else None for x in like]


def _pulled(scan: Scanned, tensors: Any, entered: Any, cotangents: Any) -> list[torch.Tensor | None]:
    """The cotangents of a scan's inputs: a scan from the last row to the first."""
    consts, init, columns = scan.parts(tensors)
    ends, rest = cotangents[: scan.carries], cotangents[scan.carries :]
    ys, of_entered = rest[: len(rest) - scan.carries], rest[len(rest) - scan.carries :]
    begin = [torch.zeros_like(c) if g is None else g for c, g in zip(init, ends, strict=True) if _is_float(c)]
    given = [k for k, g in enumerate(ys) if g is not None]
    again = [k for k, g in enumerate(of_entered) if g is not None]
    nc, nf, ni = len(consts), len(_floats(consts)), len(_floats(init))

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        sizes = (nc, nf, ni, scan.carries, len(columns), len(given), len(again))
        constants, sums, back, carries, rows, of_ys, more = _split(xs, sizes)
        like = [*constants, *carries, *rows]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = scan.body(*_filled(like, floats))
            wanted = [*_floats(outs[: scan.carries]), *(outs[scan.carries + k] for k in given)]
            sources.follow_backward(x.grad_fn for x in wanted)
            return tuple(wanted)

        with sources.kept():
            _, pull = torch.func.vjp(run, *_floats(like))
            found = pull((*back, *of_ys))
            of_consts, of_carries, of_rows = _split(found, (nf, ni, len(_floats(rows))))
            where = [sum(_is_float(c) for c in carries[:k]) for k in again]
            for k, g in zip(where, more, strict=True):
                of_carries[k] = of_carries[k] + g
            return [*(s + g for s, g in zip(sums, of_consts, strict=True)), *of_carries, *of_rows]

    made = Scanned(body, nc, nf + ni, scan.length, not scan.reverse, (nc, scan.carries))
    zeros = [torch.zeros_like(c) for c in _floats(consts)]
    more = [*(ys[k] for k in given), *(of_entered[k] for k in again)]
    outs = _Scan.apply(made, *consts, *zeros, *begin, *entered, *columns, *more)
    of_consts, of_init, of_columns = _split(outs, (nf, ni, len(_floats(columns))), loose=True)
    return [*_spread(consts, of_consts), *_spread(init, of_init), *_spread(columns, of_columns)]


def _split(xs: Sequence[torch.Tensor], sizes: Sequence[int], loose: bool = False) -> list[list[torch.Tensor]]:
    """A list in parts of these sizes."""
    feed = iter(xs)
    parts = [[next(feed) for _ in range(n)] for n in sizes]
    assert loose or next(feed, None) is None
    return parts


def _pushed(scan: Scanned, tensors: Any, tangents: Any) -> tuple[torch.Tensor | None, ...]:
    """The tangents of a scan's results: a scan of the values and the tangents together."""
    consts, init, columns = scan.parts(tensors)
    pairs = zip(tensors, tangents, strict=True)
    along = scan.parts([torch.zeros_like(x) if t is None and _is_float(x) else t for x, t in pairs])
    dots = [_floats([t for t in part if t is not None]) for part in along]
    sizes = (len(consts), len(dots[0]), len(init), len(dots[1]), len(columns), len(dots[2]))

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        constants, of_constants, carries, of_carries, rows, of_rows = _split(xs, sizes)
        like, floating = [*constants, *carries, *rows], list[bool]()

        def run(*floats: torch.Tensor) -> Any:
            outs = scan.body(*_filled(like, floats))
            floating[:] = [_is_float(x) for x in outs]
            return tuple(_floats(outs)), tuple(x for x in outs if not _is_float(x))

        values, dots, others = _compat.jvp(run, tuple(_floats(like)), (*of_constants, *of_carries, *of_rows), has_aux=True)
        feeds = iter(others), iter(values)
        outs, n = [next(feeds[f]) for f in floating], sum(floating[: scan.carries])
        return [*outs[: scan.carries], *dots[:n], *outs[scan.carries :], *dots[n:]]

    made = Scanned(body, len(consts) + len(dots[0]), len(init) + len(dots[1]), scan.length, scan.reverse)
    outs = _Scan.apply(made, *consts, *dots[0], *init, *dots[1], *columns, *dots[2])
    rest = outs[made.carries : len(outs) - made.carries]
    ends, of_ends, of_entered = outs[: scan.carries], outs[scan.carries : made.carries], outs[len(outs) - len(dots[1]) :]
    floats = _count_with_tangents(rest)
    ys, of_ys = rest[: len(rest) - floats], rest[len(rest) - floats :]
    return (*_spread(ends, of_ends), *_spread(ys, of_ys), *_spread(init, of_entered))


def _count_with_tangents(rest: Sequence[torch.Tensor]) -> int:
    """How many of (values, tangents of the floating ones) are tangents."""
    floats = len(_floats(rest))
    assert floats % 2 == 0
    return floats // 2


def _batched(scan: Scanned, size: int, in_dims: Any, tensors: Any) -> Any:
    """A scan of many at once: every carry has the new axis, in front."""
    dims, init_dims, row_dims = scan.parts(in_dims)
    consts, init, columns = scan.parts(tensors)
    consts = [c if d is None else c.movedim(d, 0) for c, d in zip(consts, dims, strict=True)]
    init = [c.expand(size, *c.shape) if d is None else c.movedim(d, 0) for c, d in zip(init, init_dims, strict=True)]
    columns = [x if d is None else x.movedim(d, 1) for x, d in zip(columns, row_dims, strict=True)]
    inner = (*(d if d is None else 0 for d in dims), *[0] * len(init), *(d if d is None else 0 for d in row_dims))
    body = lambda *xs: torch.func.vmap(lambda *ys: tuple(scan.body(*ys)), in_dims=inner)(*xs)  # noqa: E731
    if all(d is None for d in inner):
        body = lambda *xs: [x.expand(size, *x.shape) for x in scan.body(*xs)]  # noqa: E731
    outs = _Scan.apply(attrs.evolve(scan, body=body), *consts, *init, *columns)
    return outs, tuple(0 if k < scan.carries else 1 for k in range(len(outs)))


@attrs.frozen(eq=False)
class Branched:
    """A branch that is not traced yet: two bodies of the same tensors with results of the same shapes."""

    bodies: tuple[Body, Body]


class _Branch(torch.autograd.Function):
    """(truth, consts) -> results."""

    @staticmethod
    def forward(branch: Branched, truth: torch.Tensor, *consts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (yes, first), (no, second) = (recording.traced(body, consts, "cond") for body in branch.bodies)
        _add_inputs(yes, len(consts) + len(first), second)
        _add_inputs(no, len(consts), first)
        made = Branch((yes, no), len(consts) + len(first) + len(second))
        return tuple(recording.emitted(made, [*consts, *first, *second, truth]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.branch = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not _is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        truth, *consts = ctx.saved_tensors
        given = [k for k, g in enumerate(cotangents) if g is not None]
        bodies = [_transposed(body, len(consts), given) for body in ctx.branch.bodies]
        found = _Branch.apply(Branched((bodies[0], bodies[1])), truth, *consts, *(cotangents[k] for k in given))
        return None, None, *_spread(consts, found)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: torch.Tensor | None) -> Any:
        truth, *consts = ctx.saved_tensors
        dots = [torch.zeros_like(x) if t is None else t for x, t in zip(consts, tangents, strict=True) if _is_float(x)]
        floating: list[bool] = []
        bodies = [_with_tangents(body, len(consts), floating) for body in ctx.branch.bodies]
        found = iter(_Branch.apply(Branched((bodies[0], bodies[1])), truth, *consts, *dots))
        return tuple(next(found) if f else None for f in floating)

    @staticmethod
    def vmap(info: Any, in_dims: Any, branch: Branched, truth: torch.Tensor, *consts: torch.Tensor) -> Any:
        dims = tuple(in_dims[2:])
        bodies = [_mapped(body, dims, info.batch_size) for body in branch.bodies]
        if in_dims[1] is None:
            outs = _Branch.apply(Branched((bodies[0], bodies[1])), truth, *consts)
        else:
            truth = truth.movedim(in_dims[1], 0)
            pairs = zip(*(body(*consts) for body in bodies), strict=True)
            outs = tuple(torch.where(truth.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs)
        return outs, tuple([0] * len(outs))


def _add_inputs(graph: torch.fx.Graph, at: int, examples: Sequence[torch.Tensor]) -> None:
    """Give a graph inputs that it does not read."""
    holders = graph.find_nodes(op="placeholder")
    before = holders[at] if at < len(holders) else next(n for n in graph.nodes if n.op != "placeholder")
    for x in examples:
        with graph.inserting_before(before):
            graph.placeholder("unread").meta["val"] = x


def _transposed(body: Body, count: int, given: Sequence[int]) -> Body:
    """The cotangents of a body's floating inputs, of its inputs and the cotangents of some results."""

    def pulled(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts, cotangents = xs[:count], xs[count:]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = body(*_filled(consts, floats))
            sources.follow_backward(outs[k].grad_fn for k in given)
            return tuple(outs[k] for k in given)

        with sources.kept():
            return torch.func.vjp(run, *_floats(consts))[1](tuple(cotangents))

    return pulled


def _with_tangents(body: Body, count: int, floating: list[bool]) -> Body:
    """The tangents of a body's floating results, of its inputs and their tangents."""

    def pushed(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts, dots = xs[:count], xs[count:]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = body(*_filled(consts, floats))
            floating[:] = [_is_float(x) for x in outs]
            return tuple(_floats(outs))

        return _compat.jvp(run, tuple(_floats(consts)), tuple(dots))[1]

    return pushed


def _mapped(body: Body, dims: tuple[int | None, ...], size: int) -> Body:
    """A body of many at once, the new axis of every result in front."""
    if all(d is None for d in dims):
        return lambda *xs: [x.expand(size, *x.shape) for x in body(*xs)]
    return lambda *xs: torch.func.vmap(lambda *ys: tuple(body(*ys)), in_dims=dims)(*xs)


@attrs.frozen(eq=False)
class Looped:
    """A while loop that is not traced yet: go_on(*consts, *carries) and body(*consts, *carries)."""

    go_on: Body
    body: Body
    consts: int


class _While(torch.autograd.Function):
    """(consts, carries) -> carries."""

    @staticmethod
    def forward(loop: Looped, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (go_on, first), (body, second) = (recording.traced(f, tensors, "while_loop") for f in (loop.go_on, loop.body))
        count = loop.consts + len(first) + len(second)
        _move_constants(go_on, len(first), loop.consts)
        _move_constants(body, len(second), loop.consts)
        _add_inputs(go_on, loop.consts + len(first), second)
        _add_inputs(body, loop.consts, first)
        made = While((go_on, body), count, len(tensors) - loop.consts)
        return tuple(recording.emitted(made, [*tensors[: loop.consts], *first, *second, *tensors[loop.consts :]]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.loop = inputs[0]
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not _is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        fix = "scan with a fixed length, and torch.where for what is done only sometimes; or jvp"
        raise CaptureError(problem("while_loop", "it is differentiated in reverse, and how often it runs is not known", fix=fix), fix=fix)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        loop, tensors = ctx.loop, ctx.saved_tensors
        dots = [torch.zeros_like(x) if t is None and _is_float(x) else t for x, t in zip(tensors, tangents, strict=True)]
        n, along = loop.consts, [[t for t in part if t is not None] for part in (dots[: loop.consts], dots[loop.consts :])]
        sizes = (n, len(along[0]), len(tensors) - n, len(along[1]))

        def body(*xs: torch.Tensor) -> list[torch.Tensor]:
            consts, of_consts, carries, of_carries = _split(xs, sizes)
            moved = _with_tangents(loop.body, len(tensors), [])(*consts, *carries, *of_consts, *of_carries)
            return [*loop.body(*consts, *carries), *moved]

        def go_on(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
            consts, _, carries, _ = _split(xs, sizes)
            return loop.go_on(*consts, *carries)

        made = Looped(go_on, body, n + len(along[0]))
        outs = _While.apply(made, *tensors[:n], *along[0], *tensors[n:], *along[1])
        return tuple(_spread(tensors[n:], outs[len(tensors) - n :]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, loop: Looped, *tensors: torch.Tensor) -> Any:
        """All samples go on until none does; one that is done keeps its values."""
        size, n = info.batch_size, loop.consts
        dims = (*in_dims[1 : n + 1], *[0] * (len(tensors) - n))
        pairs = list(zip(tensors, in_dims[1:], strict=True))
        init = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs[n:]]
        go_on, body = _mapped(loop.go_on, dims, size), _mapped(loop.body, dims, size)

        def step(*xs: torch.Tensor) -> list[torch.Tensor]:
            (truth,) = go_on(*xs)
            moved = zip(body(*xs), xs[n:], strict=True)
            return [torch.where(truth.view(-1, *[1] * (new.dim() - 1)), new, old) for new, old in moved]

        made = Looped(lambda *xs: [go_on(*xs)[0].any()], step, n)
        outs = _While.apply(made, *tensors[:n], *init)
        return outs, tuple([0] * len(outs))


def scanned(left: Sequence[Left], init: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], length: int, reverse: bool) -> Tensors:
    """The scan of a region whose first results are the carries."""
    region = left[0].region
    count = len(region.free)
    body = lambda *xs: region(xs[count:], xs[:count])  # noqa: E731
    outs = _Scan.apply(Scanned(body, count, len(init), length, reverse), *region.free, *init, *columns)
    return list(outs[: len(outs) - len(init)])


def branched(truth: torch.Tensor, yes: Sequence[Left], no: Sequence[Left]) -> Tensors:
    """One of two regions."""
    first, second = yes[0].region, no[0].region
    n = len(first.free)
    bodies = (lambda *xs: first([], xs[:n])), (lambda *xs: second([], xs[n:]))
    return list(_Branch.apply(Branched(bodies), truth, *first.free, *second.free))


def looped(go_on: Left, left: Sequence[Left], init: Sequence[torch.Tensor]) -> Tensors:
    """A region run on its results as long as another says so."""
    test, body = go_on.region, left[0].region
    n, count = len(test.free), len(test.free) + len(body.free)
    made = Looped(lambda *xs: test(xs[count:], xs[:n]), lambda *xs: body(xs[count:], xs[n:count]), count)
    return list(_While.apply(made, *test.free, *body.free, *init))
