"""One sample call under one placement on one mesh: is it right, and what does it send?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pieces
import torch
from conformance.calls import Call

import shardfn as sf
from shardfn.capture import Captured, capture
from shardfn.errors import ShardError
from shardfn.partition import Plan, plan, steps
from shardfn.types import Marks

MESHES = ((2,), (3,), (5,), (2, 2))
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
UNSET = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "resize_as_"}
MAKE_WHOLE = ("gather", "all_to_all")
NATIVE, GATHERED, WHOLE, REFUSED, WRONG, CRASHED = VERDICTS = ("native", "gathered", "whole", "refused", "wrong", "crashed")


@attrs.frozen
class Verdict:
    """What became of one case.

    native: something came in cut, and nothing was made whole. gathered: something was. whole: nothing came in cut. refused: an
    error of the family says why. wrong, crashed: what must not be. `said` is empty where all is well.
    """

    what: str
    of: str  # value or gradient
    case: str
    said: str = ""


@attrs.frozen(eq=False)
class Ready:
    """A captured call with what it must compute."""

    call: Call
    what: str  # value or gradient
    captured: Captured
    ins: tuple[torch.Tensor, ...]
    wanted: tuple[torch.Tensor, ...]


def verdicts(call: Call, meshes: Sequence[tuple[int, ...]] = MESHES) -> Iterator[Verdict]:
    """Everything about one call: its value and its gradient, under every placement, on every mesh."""
    for what in ("value", "gradient"):
        name = f"{call}, {what}"
        if what == "gradient" and not differentiable(call):
            return
        try:
            ready = prepared(call, what)
        except ShardError as error:
            yield Verdict(REFUSED, what, name, str(error))
            continue
        except Exception as error:
            yield Verdict(CRASHED, what, name, said(error))
            continue
        for sizes in meshes:
            for marks in placements(ready, sizes):
                yield judged(ready, marks, sizes, name)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def differentiable(call: Call) -> bool:
    return bool(call.active) and any(x.requires_grad for x in attached(call)[1])


def attached(call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors, those that can be differentiated as leaves of autograd, and the results."""
    xs = [x.clone().requires_grad_(i in call.active) for i, x in enumerate(call.tensors)]
    return xs, call.fn(*xs)


def prepared(call: Call, what: str) -> Ready:
    """Capture a call, and compute what it must give with torch alone."""
    if what == "value":
        wanted = [x.detach().clone() for x in call.fn(*(x.clone() for x in call.tensors))]
        return Ready(call, what, captured(call.fn, call, call.tensors), call.tensors, tuple(wanted))
    xs, outs = attached(call)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outs if y.requires_grad]
    kept = [i for i, y in enumerate(outs) if y.requires_grad]

    def loss(active: tuple[torch.Tensor, ...], rest: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        found, total = call.fn(*merged(call, active, rest)), 0.0
        for i, w in zip(kept, weights, strict=True):
            product = (found[i] * w).sum()
            total = total + (product.real if product.is_complex() else product)
        return total

    active, rest = tuple(xs[i] for i in call.active), tuple(x for i, x in enumerate(xs) if i not in call.active)
    wanted = torch.autograd.grad(loss(active, rest, tuple(weights)), active, allow_unused=True, materialize_grads=True)
    detached = tuple(x.detach() for x in active)
    graph = captured(sf.grad(loss).inline, call, detached, rest, tuple(weights))
    return Ready(call, what, graph, (*detached, *rest, *weights), tuple(x.detach() for x in wanted))


def merged(call: Call, active: Sequence[torch.Tensor], rest: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call in their order again."""
    feed, other = iter(active), iter(rest)
    return [next(feed) if i in call.active else next(other) for i in range(len(call.tensors))]


def captured(fn: Any, call: Call, *args: Any) -> Captured:
    from shardfn import _tree

    taken = args if fn is not call.fn else args[0]
    return capture(fn, call.name, taken, {}, _tree.paths((taken, {})))


def placements(ready: Ready, sizes: tuple[int, ...]) -> Iterator[list[Marks]]:
    """Everything whole, then each tensor cut on each of its dims in turn, and each floating one pending; on two axes, the next one too."""
    ways: list[tuple[int, Any]] = []
    for i, x in enumerate(ready.ins[: len(ready.call.tensors)]):
        ways += [(i, d) for d in range(x.dim())]
        ways += [(i, "sum")] if x.is_floating_point() or x.is_complex() else []
    if len(sizes) == 1:
        yield marked(ready, [()])
    for n, way in enumerate(ways):
        yield marked(ready, [(way,)] if len(sizes) == 1 else [(way,), (ways[(n + 1) % len(ways)],)])


def marked(ready: Ready, per_axis: Sequence[Sequence[tuple[int, Any]]]) -> list[Marks]:
    """The marks of every input, from what is placed on each axis."""
    found = [["R"] * len(per_axis) for _ in (*ready.ins, *ready.captured.closed_over)]
    for axis, placed in enumerate(per_axis):
        for i, mark in placed:
            found[i][axis] = mark
    return [tuple(m) for m in found]


def judged(ready: Ready, marks: list[Marks], sizes: tuple[int, ...], name: str) -> Verdict:
    """Partition, run on every rank, compare."""
    from shardfn.partition import layout

    xs = (*ready.ins, *ready.captured.closed_over)
    marks = [layout.canonical(x.shape, m, sizes) for x, m in zip(xs, marks, strict=True)]
    case = f"{name} on {sizes}: " + ", ".join(f"{list(x.shape)} {m}" for x, m in zip(xs, marks, strict=True))
    program = ready.captured.program
    try:
        chosen = plan(program, pieces.mesh_axes(sizes), marks, [None] * len(program.out_paths))
        columns = [pieces.cut(x, m, sizes, seed) for seed, (x, m) in enumerate(zip(xs, marks, strict=True))]
        found = pieces.run_plan(chosen, columns)
    except ShardError as error:
        return Verdict(REFUSED, ready.what, case, str(error))
    except Exception as error:
        return Verdict(CRASHED, ready.what, case, said(error))
    try:
        for got, whole, slot in zip(found, ready.wanted, chosen.outs, strict=True):
            compared(ready, got, whole, slot.marks, sizes)
    except AssertionError as error:
        return Verdict(WRONG, ready.what, case, str(error)[:500])
    return Verdict(kind(chosen), ready.what, case)


def compared(ready: Ready, got: Sequence[torch.Tensor], whole: torch.Tensor, marks: Marks, sizes: tuple[int, ...]) -> None:
    if ready.call.name.split(".")[0] in UNSET:
        got, whole = [torch.zeros_like(x) for x in got], torch.zeros_like(whole)
    tolerance = max(TOLERANCE.get(x.dtype, 0.0) for x in (whole, *ready.ins))
    scale = float(whole.abs().nan_to_num(0, 0, 0).max()) if whole.numel() and whole.dtype in TOLERANCE else 1.0
    pieces.check_pieces(got, whole, marks, sizes, tolerance * max(1.0, scale))


def kind(chosen: Plan) -> str:
    """Whether something came in cut, and whether anything was made whole again."""
    cut = any(not isinstance(m, str) for slot in chosen.ins for m in slot.marks)
    moves = [m for s in chosen.steps if isinstance(s, steps.Redistribute) for m in s.moves]
    return WHOLE if not cut else GATHERED if any(m.kind in MAKE_WHOLE for m in moves) else NATIVE
