"""Control-flow ops over bodies: scan, cond, while_loop and custom derivatives, in Dynamo's
graph and when it is replayed.

For Dynamo, the results need only the right shapes and dependencies. They come from one run of
the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ..dynamo_nodes import is_wrap
from . import bodies, cond_branches, custom_derivatives, while_loops
from . import scan as scans


def scan(
    outs: list[torch.Tensor],
    init: list[torch.Tensor],
    columns: list[torch.Tensor],
    length: int,
    reverse: bool,
    like: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """The results of a scan as Dynamo sees them: shapes and dependencies, from one step.

    Args:
        outs: the results of a step: carries, terms of means, outputs to stack.
        init: the carries of the first step.
        columns: the stacked per-step inputs.
        length: the number of steps.
        reverse: whether the last step comes first.
        like: a tensor like each mean over the steps.
    """
    n = len(init) + len(like)
    outs = _depending_on_all(outs, [*outs, *init, *columns])
    return [*outs[:n], *(x.unsqueeze(0).expand(length, *x.shape).clone() for x in outs[n:])]


def cond(
    truth: torch.Tensor, yes: list[torch.Tensor], no: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of a cond as Dynamo sees them, from both branches."""
    return _depending_on_all(
        [torch.where(truth, a, b) for a, b in zip(yes, no, strict=True)], [*yes, *no]
    )


def while_loop(
    go_on: list[torch.Tensor], outs: list[torch.Tensor], init: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of a while_loop as Dynamo sees them, from one step."""
    return _depending_on_all(outs, [*outs, *init])


def custom_vjp(
    name: str,
    outs: list[torch.Tensor],
    fwd: list[torch.Tensor],
    bwd: list[torch.Tensor],
    xs: list[torch.Tensor],
    has_cotangent: list[bool],
) -> list[torch.Tensor]:
    """The results of a custom_vjp as Dynamo sees them: those of the function."""
    return _depending_on_all(outs, [*outs, *xs])


def custom_jvp(
    name: str, outs: list[torch.Tensor], pushed: list[torch.Tensor], xs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of a custom_jvp as Dynamo sees them: those of the function."""
    return _depending_on_all(outs, [*outs, *xs])


def _depending_on_all(outs: list[torch.Tensor], reads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make each result depend on every input, as it may after the last step. Dynamo looks at one
    run to see whether a result has a tangent.
    """
    nothing = sum(x.sum() * 0 for x in reads if x.is_floating_point())
    return [x + nothing if x.is_floating_point() else x.clone() for x in outs]


# The function that replaces each of these ops when Dynamo's graph is replayed. Its first argument
# runs the graph of a body.
REPLAYED: dict[Any, Callable[..., Any]] = {
    bodies.mark_entering: bodies.replay_entering,
    bodies.mark_inputs: bodies.replay_marked,
    bodies.mark_results: bodies.replay_marked,
    scan: lambda replay, *args: scans.replay_scan(*args),
    cond: lambda replay, *args: cond_branches.replay_cond(*args),
    custom_vjp: lambda replay, *args: custom_derivatives.replay_custom_vjp(*args),
    custom_jvp: lambda replay, *args: custom_derivatives.replay_custom_jvp(*args),
    while_loop: lambda replay, go_on, *args: while_loops.replay_while_loop(go_on[0], *args),
}


def is_control_flow(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is a control-flow op, runs a body, or marks values that
    enter or leave one.
    """
    return is_wrap(node) or node.target in REPLAYED


def install() -> None:
    """Have Dynamo keep these ops as graph nodes. Capture calls this before it traces."""
    for fn in REPLAYED:
        _compat.keep_in_graph(fn)
