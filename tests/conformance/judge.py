"""One sample call under one placement on one mesh: is it right, and what does it send?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pieces
import torch

import shardfn as sf
from conformance.calls import Call
from shardfn import _tree
from shardfn.capture import Arguments, Captured, capture
from shardfn.capture.rewrites.as_strided import refuse_unstrided
from shardfn.errors import ShardError
from shardfn.partition import Plan, layout, plan, propagate
from shardfn.types import MeshPlacements

MESHES = ((2,), (3,), (5,), (2, 2))
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 4e-3,
    torch.complex32: 4e-3,
    torch.bfloat16: 3e-2,
}
UNSET = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "resize_as_",
}
MAKE_WHOLE = ("all_gather", "all_to_all")
NATIVE, GATHERED, WHOLE, ABSENT, REFUSED, WRONG, CRASHED = VERDICTS = (
    "native", "gathered", "whole", "absent", "refused", "wrong", "crashed"
)  # fmt: skip


@attrs.frozen
class Verdict:
    """What became of one case.

    native: something came in cut, and nothing was made whole. gathered: something was. whole:
    nothing came in cut. refused: an error of the family says why. absent: torch cannot compute
    it here either. wrong, crashed: what must not be. `said` is empty where all is well.
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
    """Everything about one call: its value and its gradient, under every placement, on every
    mesh.
    """
    for what, truth in (("value", value), ("gradient", gradient)):
        name = f"{call}, {what}"
        try:
            true = truth(call)
        except Exception as error:
            yield Verdict(ABSENT, what, name, said(error))
            return
        if true is None:
            return
        try:
            ready = Ready(call, what, captured(true.fn, call, *true.args), true.ins, true.wanted)
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


@attrs.frozen(eq=False)
class Truth:
    """A function, its arguments, the tensors in them, and what torch alone makes of them."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    ins: tuple[torch.Tensor, ...]
    wanted: tuple[torch.Tensor, ...]


def on_one_device(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function returns on one device, eagerly; its random calls draw from the state that
    a captured one is run with here.
    """
    sf.random.state.seed(0)
    with sf.random.plain():
        return fn(*args)


def value(call: Call) -> Truth:
    """The results of a call."""
    found = on_one_device(call.fn, *(x.clone() for x in call.tensors))
    wanted = tuple(x.detach().clone() for x in found)
    return Truth(call.fn, call.tensors, call.tensors, wanted)


def gradient(call: Call) -> Truth | None:
    """The gradients of a weighted sum of the results of a call; None if it has none."""
    xs = [x.clone().requires_grad_(i in call.active) for i, x in enumerate(call.tensors)]
    outs = on_one_device(call.fn, *xs) if call.active else []
    kept = [i for i, y in enumerate(outs) if y.requires_grad]
    if not kept:
        return None
    generator = torch.Generator().manual_seed(3)
    weights = tuple(
        torch.randn(outs[i].shape, generator=generator, dtype=weighed(outs[i].dtype)) for i in kept
    )

    def loss(
        active: tuple[torch.Tensor, ...],
        rest: tuple[torch.Tensor, ...],
        weights: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        found, total = call.fn(*merged(call, active, rest)), 0.0
        for i, w in zip(kept, weights, strict=True):
            product = (found[i].to(w.dtype) * w).sum()
            total = total + (product.real if product.is_complex() else product)
        return total

    active, rest = (
        tuple(xs[i] for i in call.active),
        tuple(x for i, x in enumerate(xs) if i not in call.active),
    )
    wanted = torch.autograd.grad(
        on_one_device(loss, active, rest, weights),
        active,
        allow_unused=True,
        materialize_grads=True,
    )
    detached = tuple(x.detach() for x in active)
    return Truth(
        sf.grad(loss).inline,
        (detached, rest, weights),
        (*detached, *rest, *weights),
        tuple(x.detach() for x in wanted),
    )


def weighed(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weights: sums of half complex numbers have no kernel."""
    return torch.complex64 if dtype == torch.complex32 else dtype


def merged(
    call: Call, active: Sequence[torch.Tensor], rest: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors of a call in their order again."""
    feed, other = iter(active), iter(rest)
    return [next(feed) if i in call.active else next(other) for i in range(len(call.tensors))]


def captured(fn: Callable[..., Any], call: Call, *args: Any) -> Captured:
    """A call as the public transforms capture it."""
    arguments = Arguments.of(args, {}, _tree.paths((args, {})))
    refuse_unstrided(call.name, arguments.leaves, arguments.paths)
    return capture(fn, call.name, arguments)


def placements(ready: Ready, sizes: tuple[int, ...]) -> Iterator[list[MeshPlacements]]:
    """Everything whole, then each tensor cut on each of its dims in turn, and each floating one
    pending; on two axes, the next one too. Then each dim that has the chunks of a zigzag as one.
    """
    ways: list[tuple[int, Any]] = []
    zigzags = [
        (i, (d, 1, -2))
        for i, x in enumerate(ready.ins[: len(ready.call.tensors)])
        for d, size in enumerate(x.shape)
        if size and size % (2 * sizes[0]) == 0
    ]
    for i, x in enumerate(ready.ins[: len(ready.call.tensors)]):
        ways += [(i, d) for d in range(x.dim())]
        ways += [(i, "sum")] if x.is_floating_point() or x.is_complex() else []
    if len(sizes) == 1:
        yield marked(ready, [()])
    if not ways:
        yield from results_cut(ready, sizes)
    for n, way in enumerate(ways):
        yield marked(ready, [(way,)] if len(sizes) == 1 else [(way,), (ways[(n + 1) % len(ways)],)])
    for n, (i, mark) in enumerate(zigzags):
        others = [way for way in ways if way != (i, mark[0])]
        if len(sizes) == 1:
            yield marked(ready, [((i, mark),)])
        elif others:
            yield marked(ready, [((i, mark),), (others[n % len(others)],)])


def results_cut(ready: Ready, sizes: tuple[int, ...]) -> Iterator[list[MeshPlacements]]:
    """Each result cut on each dim, of a call that makes tensors of nothing."""
    for i, x in enumerate(ready.wanted):
        for d in range(x.dim()):
            outs: list[MeshPlacements] = [("R",) * len(sizes) for _ in ready.wanted]
            outs[i] = layout.canonical(x.shape, (d,) * len(sizes), sizes)
            yield [*marked(ready, [()] * len(sizes)), *outs]


def marked(ready: Ready, per_axis: Sequence[Sequence[tuple[int, Any]]]) -> list[MeshPlacements]:
    """The marks of every input, from what is placed on each axis."""
    found = [["R"] * len(per_axis) for _ in (*ready.ins, *ready.captured.closed_over)]
    for axis, placed in enumerate(per_axis):
        for i, mark in placed:
            found[i][axis] = mark
    return [tuple(m) for m in found]


def judged(ready: Ready, marks: list[MeshPlacements], sizes: tuple[int, ...], name: str) -> Verdict:
    """Partition, run on every rank, compare."""
    xs = (*ready.ins, *ready.captured.closed_over)
    outs = marks[len(xs) :] or [None] * len(ready.wanted)
    marks = [layout.canonical(x.shape, m, sizes) for x, m in zip(xs, marks, strict=False)]
    case = f"{name} on {sizes}: " + ", ".join(
        f"{list(x.shape)} {m}" for x, m in zip(xs, marks, strict=True)
    )
    program = ready.captured.program
    try:
        chosen = propagate(program, pieces.mesh_axes(sizes), marks, outs)
        columns = [
            pieces.cut(x, m, sizes, seed, exact=True)
            for seed, (x, m) in enumerate(zip(xs, marks, strict=True))
        ]
        found = pieces.run_plan(chosen, columns)
    except ShardError as error:
        return Verdict(REFUSED, ready.what, case, str(error))
    except Exception as error:
        return Verdict(CRASHED, ready.what, case, said(error))
    try:
        for got, whole, slot in zip(found, ready.wanted, chosen.outs, strict=True):
            compared(ready, got, whole, slot.placements, sizes)
    except AssertionError as error:
        return Verdict(WRONG, ready.what, case, str(error)[:500])
    what, why = kind(chosen)
    return Verdict(what, ready.what, case, why)


def compared(
    ready: Ready,
    got: Sequence[torch.Tensor],
    whole: torch.Tensor,
    marks: MeshPlacements,
    sizes: tuple[int, ...],
) -> None:
    if ready.call.name.split(".")[0] in UNSET:
        got, whole = [torch.zeros_like(x) for x in got], torch.zeros_like(whole)
    pieces.check_pieces(got, whole, marks, sizes, tolerance(ready, whole))


def tolerance(ready: Ready, whole: torch.Tensor) -> float:
    """How far a result may be off: the rounding of the least exact dtype, times the size of the
    result.
    """
    return tolerance_of((whole, *ready.ins), whole)


def tolerance_of(every: Sequence[torch.Tensor], whole: torch.Tensor) -> float:
    """The rounding of the least exact dtype of some tensors, times the size of a result."""
    least = max(TOLERANCE.get(x.dtype, 0.0) for x in every)
    scale = (
        float(whole.abs().nan_to_num(0, 0, 0).max())
        if whole.numel() and whole.dtype in TOLERANCE
        else 1.0
    )
    return least * max(1.0, scale)


def compared_piece(
    ready: Ready, got: torch.Tensor, whole: torch.Tensor, marks: MeshPlacements, n: int, rank: int
) -> None:
    """Compare one rank's results with its piece of the true ones."""
    if ready.call.name.split(".")[0] in UNSET:
        got, whole = torch.zeros_like(got), torch.zeros_like(whole)
    pieces.same(got, pieces.cut(whole, marks, (n,))[rank], "a piece", tolerance(ready, whole))


def kind(chosen: Plan) -> tuple[str, str]:
    """Whether something is cut at the door, and for which ops what was cut is made whole."""
    cut = any(
        not isinstance(m, str) for slot in (*chosen.ins, *chosen.outs) for m in slot.placements
    )
    moved = [s for s in chosen.steps if isinstance(s, plan.Redistribute) and s.implicit]
    ops = ", ".join(
        dict.fromkeys(
            str(s.node.target) for s in moved if any(m.kind in MAKE_WHOLE for m in s.moves)
        )
    )
    return (WHOLE, "") if not cut else (GATHERED, f"made whole for {ops}") if ops else (NATIVE, "")
