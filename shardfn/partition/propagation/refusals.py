"""Errors of propagation: random ops, unreduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture.drawing import draws
from ...errors import PlacementError, RuleError
from ...ops.higher_order import HigherOrder
from ...ops.nodes import origin_of
from ...types import REDUCTIONS, MeshAxes, MeshPlacements
from .. import rules


def partials_over(placements: MeshPlacements, axes: MeshAxes) -> str:
    """Write the Partial reductions of placements as text: sum over dp."""
    return ", ".join(
        f"{m} over {a}" for m, a in zip(placements, axes.names, strict=True) if m in REDUCTIONS
    )


def not_reduced(
    name: str, path: str, node: torch.fx.Node, placements: MeshPlacements, axes: MeshAxes
) -> PlacementError:
    """Make the error for an op that needs the value of an unreduced gradient."""
    fix = "reduce the gradient x first: sf.constrain(x, P()), or constrain x to its final placement"
    op = getattr(node.target, "_opname", node.target)
    got = (
        f"the value is an unreduced gradient (Partial {partials_over(placements, axes)}), but "
        f"{op} needs the reduced value"
    )
    return PlacementError.of(
        f"{name}, argument {path}",
        got,
        needed="an explicit reduction",
        fix=fix,
        **origin_of(node),
        arg_path=path,
        placements=placements,
    )


def cannot_stay_partial(
    name: str, path: str, node: torch.fx.Node, placements: MeshPlacements, axes: MeshAxes
) -> PlacementError:
    """Make the error for a result that cannot leave as Partial."""
    fix = (
        "return the gradient unchanged, as sf.grad returns it, or remove Partial from "
        "out_placements"
    )
    got = (
        "the value is already reduced, or was never Partial, so its placement cannot stay "
        f"{partials_over(placements, axes)}"
    )
    return PlacementError.of(
        f"{name}, {path}",
        got,
        needed="a value that is reduced exactly once",
        fix=fix,
        **origin_of(node),
        arg_path=path,
        placements=placements,
    )


def wrong_local_shape(
    node: torch.fx.Node,
    ins: list[MeshPlacements],
    out: MeshPlacements,
    got: tuple[int, ...],
    wanted: tuple[int, ...],
) -> RuleError:
    """Make the error for a user's rule whose local result has another shape than its placement
    gives.
    """
    fix = "sf.rule(..., example=(arguments of the op)), which checks the rule when it is registered"
    lines = (
        f"the op returns {got} on a rank",
        f"inputs placed {', '.join(map(str, ins))}, the result {out}",
    )
    return RuleError.of(
        f"rule({node.target})",
        *lines,
        needed=f"{wanted}",
        fix=fix,
        placements=out,
        **origin_of(node),
    )


RANDOM: Callable[[Any], bool] = lambda target: (
    torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
)


def refuse_random(node: torch.fx.Node, name: str, axes: MeshAxes) -> None:
    """Raise an error for an op that draws random numbers, which ranks would draw differently."""
    is_nested = isinstance(node.target, HigherOrder)
    is_alone = all(n == 1 for n in axes.sizes) and not is_nested
    if is_alone or not draws(node):
        return
    got = "the op draws random numbers, and each rank would draw different ones"
    fix = "pass random tensors as arguments"
    if rules.row_of(node.target).way_of is not None:
        got = "the kernel draws the random numbers of its dropout, and each rank would draw others"
        fix = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose dropout is shardfn's"
    if is_nested:
        got = "the op draws random numbers, but its subgraphs have no random state"
        fix = "use sf.cond, sf.scan or sf.while_loop; or pass random tensors as arguments"
    raise RuleError.of(f"{name}, op {node.target}", got, fix=fix, **origin_of(node))


def partial_is_reduced(node: torch.fx.Node, axes: Sequence[str], kind: str) -> PlacementError:
    """Make the error for `to_local` of a Partial DTensor that is reduced already."""
    over = ", ".join(axes)
    got = (
        f"the DTensor's Partial {kind} over {over} is already reduced, because another op needs "
        "its value"
    )
    return PlacementError.of(
        "DTensor.to_local",
        got,
        needed="a Partial DTensor whose reduced value no other op needs",
        fix="call x.redistribute(mesh, placements) with Replicate() or Shard(dim) first",
        **origin_of(node),
    )


def without_cotangent(node: torch.fx.Node) -> PlacementError:
    """Make the error for a derivative of `to_local` of a Partial DTensor."""
    return PlacementError.of(
        "DTensor.to_local",
        "to_local of a Partial DTensor that an op made is not defined under a derivative",
        needed="a DTensor that is not Partial, or a result of from_local",
        fix="call x.redistribute(mesh, placements) with Replicate() or Shard(dim) first",
        **origin_of(node),
    )
