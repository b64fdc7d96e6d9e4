"""The capture of a call that torch's autograd records: value and gradients as one program."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs
import torch
from torch.distributed.tensor import DTensor

from ...capture import Arguments, Captured
from ...capture.drawing import refuse_state
from ...capture.key_reuse import used_keys
from ...capture.refusals.torch_errors import is_of_derivative
from ...errors import CaptureError, ShardError, call_site
from ...ops import debug
from ...placement import Stage
from ...types import stage_of
from ..arguments import Placed
from ..backward.followed import Followed
from ..options import Request
from .known import captured_for


def followed_capture(
    request: Request, arguments: Arguments, placed: Placed
) -> tuple[Request, Captured]:
    """Capture a function for a call, together with its gradients if autograd follows the call.

    Tensors that the function closes over are known when it has been captured. If autograd
    follows one of them, the function is captured again. If torch has no derivative of one of its
    ops, as of attention's own backward, it is captured without gradients.

    Returns:
        (the request for the program that is captured, the capture).

    Raises:
        CaptureError: a gradient would be lost.
        ShardError: autograd follows a tensor that a pipeline reads and does not differentiate.
    """
    closed: tuple[torch.Tensor, ...] = ()
    names: tuple[str, ...] = ()
    # the capture without gradients, which has the user's names of what is closed over
    first: Captured | None = None
    with debug.show_constants_at_end(request.name):
        while True:
            mine = _following(request, arguments, placed, closed, names)
            try:
                captured = captured_for(mine, arguments, placed)
            except CaptureError as error:
                if mine is request or not is_of_derivative(error):
                    raise
                first = first or captured_for(request, arguments, placed)
                return request, attrs.evolve(first, no_derivative=error)
            outside = captured.outside
            first = first or captured
            lost = outside.lost(closed) if request.differentiated is not None else []
            if not lost:
                break
            closed += tuple(outside.tensors[i] for i in lost)
            names += tuple(outside.names[i] for i in lost)
    derivative = captured.derivative
    if derivative is not None and derivative.lost:
        _refuse_undifferentiated(mine, derivative.lost)
    count = len(placed.followed)
    reached = derivative.primals[count:] if derivative is not None else ()
    pairs = zip(closed, reached, strict=True)
    known = [x for x, results in pairs if results]
    first.outside.refuse_lost(request.name, known)
    captured = _looking_at_all(captured, first)
    if derivative is not None and not any(derivative.results):
        return request, captured_for(request, arguments, placed)
    return mine, captured


def _looking_at_all(captured: Captured, first: Captured) -> Captured:
    """Join the reads of the capture without gradients to those of the capture with gradients."""
    if captured is first:
        return captured
    every = captured.reads.with_those_of(first.reads)
    return attrs.evolve(captured, reads=every)


def _following(
    request: Request,
    arguments: Arguments,
    placed: Placed,
    closed: tuple[torch.Tensor, ...],
    names: tuple[str, ...],
) -> Request:
    """Build the Request of a function with its gradients, once; without gradients the request
    itself.
    """
    if not placed.followed and not closed:
        return request
    tensors = (*(arguments.leaves[i] for i in placed.followed), *closed)
    paths = (*(placed.paths[i] for i in placed.followed), *names)
    are_real = tuple(x.is_floating_point() for x in tensors)
    on_stages = any(stage_of(mark) for marks in placed.marks for mark in marks)
    on_stages |= any(isinstance(x, DTensor) and _is_on_stage(x) for x in closed)
    followed = Followed(placed.followed, closed, paths, are_real, on_stages)
    known = request.store.followed
    if followed.key not in known:
        assert request.differentiated is not None
        known[followed.key] = attrs.evolve(
            request,
            fn=request.differentiated(request.fn, followed),
            structure=None,
            followed=followed,
        )
    return known[followed.key]


def _is_on_stage(x: DTensor) -> bool:
    return any(isinstance(placement, Stage) for placement in x.placements)


def _refuse_undifferentiated(request: Request, numbers: Sequence[int]) -> None:
    """Refuse tensors that autograd follows through a pipeline which does not differentiate them.

    Raises:
        ShardError: names them.
    """
    followed = request.followed
    assert followed is not None
    wrong = [
        (
            f"autograd records {followed.paths[k]}, which pipelined_grad reads but does not "
            "differentiate"
        )
        for k in numbers
    ]
    fix = "include the argument in argnums= of pipelined_grad, or pass x.detach()"
    raise ShardError.of(request.name, *wrong, fix=fix, source=call_site())


def check_numbers(request: Request, captured: Captured) -> None:
    """Refuse a program whose random numbers are not each made once, from a key.

    Raises:
        CaptureError: they do not, where the request or SHARDFN_CHECK wants it.
    """
    graph = captured.program.graph.graph
    if request.seed == "required":
        refuse_state(graph, request.name)
    if os.environ.get("SHARDFN_CHECK") == "1":
        used_keys(graph, request.name, captured.closed_over)
