"""The proof of a sharding rule: every strategy is run on shards and compared with the op on
global inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture import Arguments, capture
from ...errors import RuleError, ShardError
from ...mesh import all_coordinates
from ...partition import Plan, emit, layout, local_sizes, propagate
from ...partition import plan as steps
from ...partition.collective_bytes import collectives_in
from ...partition.printing import local_text
from ...partition.rule_api.strategy import Choice, OpCall, Rule
from ...runtime.layouts import cut, join
from ...runtime.simulator import simulate
from ...schedule import plan_schedule, schedule
from ...types import PARTIAL_KINDS, TENSOR, AxisPlacement, LocalProgram, MeshAxes
from ..derivatives._grad import grad
from ._sample import Sample, filled, mapped, tensors_of

WORLDS = (2, 3, 5)  # a size that is not a multiple of 30 is sharded unevenly by one of them
TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
INEXACT = 1e-4  # for other floating dtypes; integers must be exact
FAILS = (
    AssertionError,
    RuleError,
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
)  # errors that an op, its fake kernel or a wrong shape raises
FIX = (
    "name in need_whole each dim that the op needs whole on every rank (in a strategy of a rule "
    "function, use 'R', replicated); or correct the rule"
)


def prove_values(rule: Rule, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prove every strategy of a rule for these arguments.

    Raises:
        RuleError: a wrong strategy, with the number of ranks, the shapes and the first element
            that differs.
    """
    sample = Sample(target, args, kwargs)
    for choice in sample.choices(rule):
        for n in WORLDS:
            _prove_choice(sample, choice, n)


def _prove_choice(sample: Sample, choice: Choice, n: int) -> None:
    """Run an op on shards by one strategy, on n ranks, and compare with its true results."""
    axes = MeshAxes(("axis",), (n,))
    slots = _slots(sample.call, choice, n)
    if slots is None:
        # a unit that does not fit this many ranks: the partition does not take the strategy
        # either
        return
    ins, outs = slots
    shards = [
        _pieces(x, slot.placements, axes) for x, slot in zip(sample.tensors, ins, strict=True)
    ]
    plan = Plan(axes, (steps.Apply(sample.node, ins, outs),), ins, outs)
    try:
        results = run(plan, shards)
    except FAILS as error:
        first = str(error).strip().split("\n", maxsplit=1)[0]
        reason = first.removeprefix(f"rule({sample.call.target}): ")
        text = f"the op fails on the shards: {reason}"
        raise _refuted(sample.call, choice, n, text) from error
    tolerance = max(_tolerance(x) for x in (*sample.tensors, *sample.results))
    rows = zip(results, sample.results, outs, strict=True)
    for i, (column, wanted, slot) in enumerate(rows):
        if wrong := _difference(column, wanted, slot.placements, axes, tolerance):
            text = f"result {i}, shape {tuple(wanted.shape)}: {wrong}"
            raise _refuted(sample.call, choice, n, text)


def _slots(
    call: OpCall, choice: Choice, n: int
) -> tuple[tuple[steps.Slot, ...], tuple[steps.Slot, ...]] | None:
    """The inputs and the results of a call, placed on n ranks by a strategy. None where one
    does not fit.
    """
    values = (*call.ins, *call.outs)
    slots = []
    for x, mark in zip(values, (*choice[0], *choice[1]), strict=True):
        marks = _fit(x, mark, n)
        if marks is None:
            return None
        slots.append(steps.Slot(len(slots), x, marks))
    count = len(call.ins)
    return tuple(slots[:count]), tuple(slots[count:])


def prove_gradient(rule: Rule, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prove that the gradient of a custom op is right for the first strategy of its rule that
    shards an input.

    Raises:
        RuleError: the gradient differs from autograd's, or cannot be captured.
    """
    sample = Sample(target, args, kwargs)
    floating = tuple(i for i, x in enumerate(sample.tensors) if x.is_floating_point())
    if not floating or not any(x.is_floating_point() for x in sample.results):
        return
    loss = _sum_of_squares(target, args, kwargs)
    leaves = [x.clone().requires_grad_(i in floating) for i, x in enumerate(sample.tensors)]
    wanted = torch.autograd.grad(loss(*leaves), [leaves[i] for i in floating], allow_unused=True)
    captured = _captured_gradient(sample, loss, floating)
    cutting = [c for c in sample.choices(rule) if _is_sharded(c)]
    for choice in cutting[:1]:
        for n in WORLDS:
            _prove_captured(sample, captured, choice, n, wanted)


def _sum_of_squares(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., torch.Tensor]:
    """Build a scalar loss of an op: the sum of squares of its floating results."""
    # constants without tensors, so that no tensor is closed over
    empty = mapped((args, kwargs), lambda _: TENSOR)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        args, kwargs = filled(empty, iter(tensors))
        squares = [
            (x * x).sum() for x in tensors_of(target(*args, **kwargs)) if x.is_floating_point()
        ]
        return sum(squares[1:], start=squares[0])

    return loss


def _captured_gradient(
    sample: Sample, loss: Callable[..., torch.Tensor], floating: tuple[int, ...]
) -> Any:
    """The Program of the gradient of a loss with respect to a sample's floating tensors.

    Raises:
        RuleError: it cannot be captured.
    """
    target = sample.call.target
    tensors = tuple(sample.tensors)
    paths = [f"input {i}" for i in range(len(tensors))]
    gradient = grad(loss, floating).inline
    try:
        return capture(gradient, f"grad({target})", Arguments.of(tensors, {}, paths))
    except ShardError as error:
        text = f"rule({target}), its gradient\n{error}"
        raise RuleError(text, fix=error.fix) from error


def _is_sharded(choice: Choice) -> bool:
    """Return whether a strategy shards an input and needs no Partial input."""
    ins = choice[0]
    return any(layout.split(m) for m in ins) and not {*ins} & {*PARTIAL_KINDS}


def _prove_captured(
    sample: Sample, captured: Any, choice: Choice, n: int, wanted: Sequence[Any]
) -> None:
    axes = MeshAxes(("axis",), (n,))
    tensors = [*sample.tensors, *captured.closed_over]
    marks = [_fit(x, m, n) or ("R",) for x, m in zip(sample.call.ins, choice[0], strict=True)]
    marks += [("R",)] * len(captured.closed_over)
    chosen = propagate(captured.program, axes, marks, [None] * len(wanted))
    found = run(chosen, [_pieces(x, m, axes) for x, m in zip(tensors, marks, strict=True)])
    tolerance = max(_tolerance(x) for x in tensors)
    for i, (column, gradient, slot) in enumerate(zip(found, wanted, chosen.outs, strict=True)):
        whole = torch.zeros_like(slot.value, device="cpu") if gradient is None else gradient
        if wrong := _difference(column, whole, slot.placements, axes, tolerance):
            raise _refuted(
                sample.call, choice, n, f"gradient {i}, shape {tuple(whole.shape)}: {wrong}"
            )


def run(plan: Plan, columns: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The local tensors of every result, by rank, in a simulated world.

    Args:
        plan: the plan to run.
        columns: for each input, the local tensor of every rank.
    """
    everyone = all_coordinates(plan.axes)
    kinds = local_sizes(plan, everyone)
    programs = {kind: _local(plan, c) for c, kind in kinds.items()}
    inputs = [[column[r] for column in columns] for r in range(len(everyone))]
    results = simulate([programs[kinds[c]] for c in everyone], inputs, everyone)
    return [list(column) for column in zip(*results, strict=True)]


def _local(plan: Plan, coordinates: tuple[int, ...]) -> LocalProgram:
    graphs = schedule(emit(plan, coordinates, plan.axes.names, "cpu"), plan_schedule(plan, "proof"))
    return LocalProgram(
        name="proof",
        axes=plan.axes,
        graph=graphs[-1],
        unordered=graphs[-2],
        in_paths=tuple(f"input {i}" for i in range(len(plan.ins))),
        in_placements=tuple(slot.placements for slot in plan.ins),
        out_placements=tuple(slot.placements for slot in plan.outs),
        out_paths=tuple(f"result {i}" for i in range(len(plan.outs))),
        elided=(),
        show=local_text,
        records=collectives_in,
    )


def _pieces(x: torch.Tensor, marks: Sequence[AxisPlacement], axes: MeshAxes) -> list[torch.Tensor]:
    """The local tensor of each rank: its chunk, the global value, or a term of a Partial value."""
    if marks[0] not in PARTIAL_KINDS:
        return [cut(x, tuple(marks), axes, c) for c in all_coordinates(axes)]
    generator = torch.Generator().manual_seed(0)
    noise = [
        torch.rand(x.shape, generator=generator).mul(9).to(x.dtype)
        for _ in range(axes.sizes[0] - 1)
    ]
    if x.dtype == torch.bool:
        return [x, *map(torch.zeros_like, noise)]
    if marks[0] == "sum":
        return [*noise, x - sum(noise)]
    return [*(x - r if marks[0] == "max" else x + r for r in noise), x]


def _difference(
    column: Sequence[torch.Tensor],
    wanted: torch.Tensor,
    marks: Any,
    axes: MeshAxes,
    tolerance: float,
) -> str | None:
    """Where the local tensors of a result differ from those of the expected value."""
    if marks == ("R",):
        return next((wrong for x in column if (wrong := _first(x, wanted, tolerance))), None)
    return _first(join(column, wanted.shape, marks, axes), wanted, tolerance)


def _first(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str | None:
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return (
            f"the shards make {tuple(got.shape)} {got.dtype}, wanted {tuple(wanted.shape)} "
            f"{wanted.dtype}"
        )
    wrong = ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"the first different element is at {at}: got {got[at].item()}, expected "
        f"{wanted[at].item()}"
    )


def _tolerance(x: torch.Tensor) -> float:
    return TOLERANCE.get(x.dtype, INEXACT if x.is_floating_point() or x.is_complex() else 0.0)


def _fit(x: torch.Tensor, mark: AxisPlacement, n: int) -> Any:
    return layout.canonical(x.shape, (mark,), (n,))


def _refuted(call: OpCall, choice: Choice, n: int, wrong: str) -> RuleError:
    shapes = ", ".join(f"{tuple(x.shape)}" for x in call.ins)
    lines = (
        f"the strategy {choice[0]} -> {choice[1]} is wrong on {n} ranks",
        f"inputs {shapes}",
        wrong,
    )
    return RuleError.of(
        f"rule({call.target})", *lines, needed="the same result as the op on global inputs", fix=FIX
    )
